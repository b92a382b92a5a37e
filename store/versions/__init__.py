"""Versions at their home, what they hold, what they come from, and how all that moves to another shard."""
