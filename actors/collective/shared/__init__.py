"""Groups of processes on one machine: each reads the others' memory.

From outside: `backend.SharedBackend`, by `connect`. Knows how bytes move; the rest is the core, `collective` itself.
"""
