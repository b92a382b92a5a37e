"""Dask behind the engine seam: a directory in the scheduler, hosts in nannies, a process for each actor.

From outside: `clients.engine_of`. Stands on `engine.engine`, `engine.sockets` and `room`. Only `clients`, `hosts`,
`scheduler_plugin` and `worker_memory` import Dask: actors' processes do not (docs/design/dask.md).
"""
