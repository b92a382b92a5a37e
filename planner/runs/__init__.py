"""Plans of runs of ranks: who sends what in a fork (DeepClone)."""
