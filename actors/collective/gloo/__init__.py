"""Groups between hosts by Gloo, called in the library that PyTorch ships.

From outside: `backend.GlooBackend`, by `connect`. Stands on the core of `collective`.
"""
