"""The parts of a shard that answer its calls, each what the file of the same name in `calls` declares.

Used by `shard` alone. (What is kept in other shards' memory answers from `replicas`.)
"""
