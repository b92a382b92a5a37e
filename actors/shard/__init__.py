"""The shard actor: `store.shard.ShardState` brought to life, and the threads around it.

From outside: `shard.Shard`. `disk/` writes and reads the path, `replicas/` keeps copies on other nodes, `handoff/`
moves names and segments to other shards, `serving/` sends blocks and news. Stands on `transport`, `rpc`, `memory`,
`engine`.
"""
