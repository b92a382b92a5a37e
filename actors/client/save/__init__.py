"""A save, from the caller's arrays to its commit: checked, staged, uploaded, announced to the version's home.

From outside: `saves.Saves`, by the repository; `request.Saved` and `pending.PendingSave`, by all who save. Stands on
`memory`, `rpc` and `shard` (which blocks are small enough for a message).
"""
