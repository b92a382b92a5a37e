"""What runs actors: the protocol, Ray, and the Ray that this process joins or starts.

From outside: `engine.Engine`, `embedded`, `sockets`, and for the command line `auth_token` and `discovery`. Stands on
`store` alone. `engine`, `sockets` and `control_service` import no Ray; the others do.
"""
