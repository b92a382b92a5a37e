"""Trainings of Keras models, on one rank or many, which can be forked.

From outside: `training.KerasTraining`, `callback.ForkCallback`. Stands on `training`.
"""
