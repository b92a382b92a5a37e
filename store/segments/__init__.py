"""Segments: contiguous blocks of tensors, the arena that they lie in, and the header before each."""
