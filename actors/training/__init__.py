"""Data-parallel trainings as actors, and forks of them while they run (DeepClone).

From outside: `start.start_trainers`, `forks.fork`, `mailbox.find_trainers`, and the trainings that ranks run: `numpy`,
`keras/`, `torch/`. Stands on `client` (versions of a training) and `collective` (its gradients).
"""
