"""The whole repository in one process, under one seeded scheduler and one virtual clock (see README.md)."""
