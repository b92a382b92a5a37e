"""Copies of a shard's memory in other shards' memory (`replicas=2`): kept up to date, and given back after a loss.

Used by `shard` alone; `mirrors` is the side that owns, `shelf` the side that keeps.
"""
