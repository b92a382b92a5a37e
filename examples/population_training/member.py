"""A member of the population: a PyTorch training that Ray Tune runs. Its checkpoints are versions or files.

Rules
- Workers import these functions by name from the folder of the script. The samples are sent along.
- The score of a member is the accuracy on images that are not trained on.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from ray import tune
from tensorvine.actors.search import connected
from tensorvine.actors.search import tune as hooks
from torch import nn

SEED, BATCH, MOMENTUM = 7, 64, 0.9
FILE = "member.pt"


@dataclass(frozen=True, slots=True)
class Problem:
    """Everything that a member follows from, except its learning rate."""

    train: tuple[NDArray[np.float32], NDArray[np.int64]]
    """Images (N, 64) from 0 to 1, and digits (N,), of which a tenth is wrong: small rates pay in the end."""
    test: tuple[NDArray[np.float32], NDArray[np.int64]]
    width: int
    """Of both hidden layers."""
    interval: int
    """Steps between two reports."""
    steps: int
    """Of each member, with those of the members that it descends from."""


def load_problem(width: int, interval: int, steps: int) -> Problem:
    """Load scikit-learn's digits."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, digits = load_digits(return_X_y=True)
    images = (images / 16.0).astype(np.float32)
    train, test, answers, truth = train_test_split(images, digits, test_size=600, stratify=digits, random_state=SEED)
    rng = np.random.default_rng(SEED)
    answers = np.where(rng.random(len(answers)) < 0.1, rng.integers(0, 10, len(answers)), answers)
    return Problem((train, answers), (test, truth), width, interval, steps)


class Training:
    """A network of two hidden layers, its optimizer, and the number of steps done."""

    def __init__(self, problem: Problem) -> None:
        torch.set_num_threads(1)  # many members share few cores
        torch.manual_seed(SEED)
        width = problem.width
        self.model = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0, momentum=MOMENTUM)
        self.steps = 0
        self._interval = problem.interval
        self._train, self._test = (tuple(map(torch.from_numpy, part)) for part in (problem.train, problem.test))

    def advance(self, rate: float) -> float:
        """Train one interval with a learning rate, and return the accuracy."""
        images, digits = self._train
        self.optimizer.param_groups[0]["lr"] = rate
        for _ in range(self._interval):
            self.steps += 1
            batch = np.random.default_rng([SEED, self.steps]).choice(len(digits), BATCH, replace=False)
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(images[batch]), digits[batch]).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
            self.optimizer.step()
        with torch.inference_mode():
            return float((self.model(self._test[0]).argmax(1) == self._test[1]).float().mean())


class Versions:
    """Checkpoints that refer to versions in a repository. `Files` has the same methods.

    Args:
        repository: Name of the repository.
        prefix: Prefix of the model names.
    """

    def __init__(self, repository: str, prefix: str) -> None:
        self._repository, self._prefix = repository, prefix
        self._last: Any = None

    def resume(self, training: Training) -> str | None:
        """Load the version of the checkpoint, if there is one, and return the member that saved it.

        It becomes the parent of the next version.
        """
        self._last = hooks.resumed()
        if self._last is None:
            return None
        repo = connected(self._repository)
        repo.load_model(self._last, into=training.model, optimizer=training.optimizer)
        training.steps = int(repo.info(self._last).metadata["steps"])
        return self._last.name.removeprefix(self._prefix)

    def report(self, training: Training, metrics: dict[str, Any]) -> None:
        """Save a version, and report it with the metrics."""
        began = time.perf_counter()
        self._last = (
            connected(self._repository)
            .save_model(
                self._prefix + own_name(),
                training.model,
                optimizer=training.optimizer,
                parent=self._last,
                quality=metrics["accuracy"],
                metadata={"steps": training.steps, "rate": metrics["rate"]},
            )
            .ref
        )
        hooks.report({**metrics, "saved_s": time.perf_counter() - began, "ref": str(self._last)}, self._last)


class Files:
    """Checkpoints with the state in a file, as Tune's users write them."""

    def resume(self, training: Training) -> str | None:
        """Read the file of the checkpoint."""
        checkpoint = tune.get_checkpoint()
        if checkpoint is None:
            return None
        with checkpoint.as_directory() as folder:
            state: Mapping[str, Any] = torch.load(Path(folder, FILE))
        training.model.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])
        training.steps = state["steps"]
        return state["member"]

    def report(self, training: Training, metrics: dict[str, Any]) -> None:
        """Write a file, and report it. Tune copies it to its storage."""
        state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            torch.save({**state, "steps": training.steps, "member": own_name()}, Path(folder, FILE))
            saved_s = time.perf_counter() - began
            tune.report({**metrics, "saved_s": saved_s, "ref": ""}, checkpoint=tune.Checkpoint.from_directory(folder))


def own_name() -> str:
    """Return the name of this member, by the number with which the trial's id ends."""
    return f"member-{int(tune.get_context().get_trial_id().rpartition('_')[2])}"


def member(config: Mapping[str, Any], problem: Problem, checkpoints: Versions | Files) -> None:
    """Train until all steps are done, and report after each interval.

    Args:
        config: "rate" is the learning rate.
        problem: What is trained.
        checkpoints: Keeps the state.
    """
    began = time.perf_counter()
    training = Training(problem)
    source = checkpoints.resume(training)
    loaded_s = time.perf_counter() - began
    while training.steps < problem.steps:
        accuracy = training.advance(config["rate"])
        metrics = {"accuracy": accuracy, "steps": training.steps, "rate": config["rate"], "ended": time.time()}
        checkpoints.report(training, {**metrics, "member": own_name(), "source": source or "", "loaded_s": loaded_s})
        source = None
