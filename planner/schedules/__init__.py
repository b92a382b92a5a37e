"""Schedules of updates, which way an update takes, and the advice to a training that runs (Viper)."""
