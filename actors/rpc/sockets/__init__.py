"""Calls between two processes of one machine, past the engine: framing, connections of threads and loops, the server
and its entrance.

From outside: `framing.SocketAddress`, `server.LazyServer`; the rest is `rpc.channel`'s. Stands on `rpc.calls` and
`rpc.refusals`.
"""
