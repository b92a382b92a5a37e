"""Plans of runs of ranks: who sends what in a fork (DeepClone), and who gathers what in a delivery to a group."""
