"""Dask behind the engine seam: a directory in the scheduler, an agent on each machine, a process for each actor.

From outside: `clients.engine_of`. Stands on `engine.engine`, `engine.sockets` and `room`. Only `links`,
`directory_plugin` and `workers` import Dask: actors' processes do not (docs/design/dask.md).
"""
