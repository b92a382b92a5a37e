"""Groups of processes on one machine: each reads the others' memory.

From outside: `backend.SharedBackend`, by `connect`. Stands on the core of `collective`.
"""
