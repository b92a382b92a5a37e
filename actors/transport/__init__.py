"""How bytes travel between shards and clients: TCP frames, files, collective groups.

From outside: `wire`, `frames`, `parcels`, `files_way`, `pair_sender`, `backends`. Stands on `collective`,
`rpc` and `memory`.
"""
