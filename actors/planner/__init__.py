"""The planner actor: how many shards there are, autoscaling, and what trainings report.

From outside: `planner.Planner`, `resizing.ScaleReport`, `streams`. Stands on `shard` (new ones are its children),
`rpc` and `engine`.
"""
