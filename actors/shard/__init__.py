"""The shard actor: `store.shard.ShardState` brought to life, and the threads around it.

From outside: `shard.Shard`. `disk/` writes and reads the path, `serving/` sends blocks, `reporting` tells the catalog
what is here, `proposals` sends commits on to it. Stands on `transport`, `rpc`, `memory`, `engine`.
"""
