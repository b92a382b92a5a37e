"""Forking a data-parallel training while it runs (DeepClone)."""
