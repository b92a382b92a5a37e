"""What runs actors: the protocol, Ray, and Dask.

From outside: `engine.Engine`, `ray.embedded`, `dask.clients`, `sockets`. Stands on `store` alone. What is not in `ray`
imports no Ray, and what is not in `dask` no Dask.
"""
