"""A shard and the path: its files, what it reads back when it starts, numbers of versions, tiers.

Used by `shard` and its handoffs (docs/design/persistence.md).
"""
