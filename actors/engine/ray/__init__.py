"""Ray behind the engine seam: the Ray that this process joins or starts, whose it is, and the token that it asks for.

From outside: `embedded`, and for the command line `auth_token` and `discovery`. Stands on `engine.engine` and `room`.
`control_service` imports no Ray.
"""
