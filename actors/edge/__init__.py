"""Consumers outside the cluster: Redis, the shards' TCP servers and no engine.

From outside: `consumer.EdgeConsumer`. Stands on `updates` (the double buffer), `transport`, `rpc` (what stands in
Redis) and `memory`. Nothing is imported here, so that an edge process loads no engine.
"""
