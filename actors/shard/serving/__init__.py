"""What goes out of a shard to those who read: blocks on all ways, and the board in Redis.

Used by `shard` and its handoffs. `edge` reads what `redis_board` writes; `rpc.redis_keys` names it for both.
"""
