"""Copies of a shard's memory in other shards' memory (`replicas=2`): kept up to date, and given back after a loss.

Used by `shard` alone; `replication` is the side that owns, `replica_store` the side that keeps.
"""
