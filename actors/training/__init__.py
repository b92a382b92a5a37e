"""Data-parallel trainings as actors, which can be forked."""
