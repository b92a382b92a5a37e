"""The repository as its users see it: names, loads, saves, queries.

From outside: `repository.Repository` and the records that it answers with (`match`, `stats`, `save.request`,
`save.pending`, `verifier`). `save/` takes bytes to the shards, `fetch/` brings them back. Stands on `planner`, `shard`
(whose actors it starts and calls), `transport`, `rpc`, `memory` and `engine`.
"""
