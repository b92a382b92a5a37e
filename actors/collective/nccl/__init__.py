"""Groups between GPUs by NCCL, called through CuPy.

From outside: `backend.NcclBackend`, by `connect`; `cuda`. Stands on the core of `collective`.
"""
