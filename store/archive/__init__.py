"""A repository as files: formats (docs/reference/format.md), places, and the order of writes and deletions."""
