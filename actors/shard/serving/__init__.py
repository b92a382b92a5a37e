"""What goes out of a shard to those who read: blocks on all ways, and the index in Redis.

Used by `shard` and its handoffs. `edge` reads what `redis_index` writes; `rpc.redis_keys` names it for both.
"""
