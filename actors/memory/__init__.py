"""Memory of this machine: a shard's shared memory with its read locks, buffers that are used again, copies.

From outside: all of it. Stands on `store` alone.
"""
