"""The catalog actor: `store.catalog` brought to life, with its journal, its term, and the shards that it orders.

`catalog` is the actor, `parts` answer calls. Stands on `shard.calls` and `rpc`.
"""
