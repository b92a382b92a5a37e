"""A repository as files: their formats (docs/format.md), where they lie, and in what order they come and go."""
