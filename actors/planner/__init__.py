"""The planner actor: topology, changes of the shards, autoscaling, and what trainings report.

From outside: `planner.Planner`, `resizing.ScaleReport`, `streams`. Stands on `shard` (new ones are its children),
`rpc` and `engine`.
"""
