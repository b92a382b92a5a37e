"""Stands for Ray where it is not installed: its folder is the first that a test's program imports from."""

raise ModuleNotFoundError("No module named 'ray'", name="ray")
