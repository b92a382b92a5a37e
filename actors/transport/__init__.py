"""How bytes travel between shards and clients: TCP frames, files, collective groups.

From outside: `tcp`, `tcp_server`, `frames`, `parcels`, `files_transport`, `pair_sender`, `backends`. Stands on
`collective`, `rpc` and `memory`.
"""
