"""What runs actors: the protocol, Ray, the Ray that this process joins or starts, and Dask.

From outside: `engine.Engine`, `embedded`, `dask.clients`, `sockets`, and for the command line `auth_token` and
`discovery`. Stands on `store` alone. `engine`, `dask`, `sockets` and `control_service` import no Ray; the others do.
"""
