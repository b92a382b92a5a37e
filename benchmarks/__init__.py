"""Benchmarks: TensorVine beside what a user would pick instead. `python -m benchmarks list` names them."""
