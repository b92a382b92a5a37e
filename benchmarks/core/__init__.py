"""The parts that all benchmarks share."""
