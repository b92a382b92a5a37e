"""What runs actors: the protocol, Ray, and the Ray that this process joins or starts.

From outside: `engine.Engine`, `embedded`. Stands on `store` alone. `engine` imports no Ray; `ray` and `embedded` do.
"""
