"""Trainings of PyTorch models, on one rank or many, which can be forked.

From outside: `training.TorchTraining`, `rank.ForkableRank`. Stands on `training`.
"""
