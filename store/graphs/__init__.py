"""Architectures: the graph of a model, longest common prefixes, the index of them, and patterns."""
