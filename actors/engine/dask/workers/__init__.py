"""What is added to Dask's workers and nannies: they hold their machine's agent, and count no shard's memory as theirs.

From outside: `plugins`. Stands on `engine.sockets`.
"""
