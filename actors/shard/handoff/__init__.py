"""What a shard gives to others when the number of shards changes, and what it asks them after a restart.

Used by `shard` alone (docs/design/elastic.md).
"""
