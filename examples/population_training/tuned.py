"""The same population under Ray Tune's PopulationBasedTraining, whose exploit goes through checkpoint files.

Rules
- Tune is set as it advises itself: a member that is replaced or paused leaves its process to the next (`reuse_actors`).
- Tune pauses whoever ends an interval while another member waits for a process.
- Members stay on this node, where their files are.
- A checkpoint is what `fork` moves: all tensors of the training, and its facts.
- Times of steps are taken in the members' processes, and those of saving and restoring around all that Tune does there
  with a checkpoint: the member's files, and their copy to where Tune keeps them.
"""

from __future__ import annotations

import json
import logging
import os
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from problem import QUANTILE, SEED, Problem, build, explore
from ray import tune
from ray.tune.schedulers import PopulationBasedTraining
from recorded import Exploit, Interval, Pause, PopulationRun
from tensorvine.actors import RankContext

TENSORS, FACTS = "tensors.npz", "facts.json"
ENVIRONMENT = {
    "RAY_AIR_NEW_OUTPUT": "0",  # as otherwise "verbose" is not heeded
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # no logs for other programs
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # Ctrl-C is the example's matter
}


class Tuned(tune.Trainable):
    """A member: `problem.build`'s training, as Tune wants it."""

    def setup(self, config: dict[str, Any], problem: Problem, saves: Path) -> None:
        """Begin a training.

        Args:
            config: "rate" is the learning rate.
            problem: what is trained.
            saves: a file, to which each save adds a line: the member, when it was, and how long it took.
        """
        self._problem, self._saves = problem, saves
        self.reset_config(config)

    def reset_config(self, config: dict[str, Any]) -> bool:
        """Begin another training in this process."""
        self._rate = config["rate"]
        self._training = build(self._problem, RankContext("tune", 0, 1, None, {"rate": self._rate}))
        self._taken: dict[str, Any] = {}
        return True

    def step(self) -> dict[str, Any]:
        """Train to the end of an interval."""
        began = time.time()
        steps = self._problem.interval - self._training.steps_done % self._problem.interval
        accuracy = [self._training.step() for _ in range(steps)][-1]
        told = {"accuracy": accuracy, "steps": self._training.steps_done, "trained": steps, "rate": self._rate}
        told |= {"began": began, "ended": time.time(), "taken": self._taken, "pid": os.getpid()}
        self._taken = {}
        return told

    def save(self, *arguments: Any, **options: Any) -> Any:
        """Save, and note how long that took."""
        began = time.perf_counter()
        saved = super().save(*arguments, **options)
        with self._saves.open("a") as lines:
            print(number(self.trial_id), time.time(), time.perf_counter() - began, file=lines)
        return saved

    def restore(self, *arguments: Any, **options: Any) -> None:
        """Restore, and note how long that took."""
        began = time.perf_counter()
        super().restore(*arguments, **options)
        self._taken["seconds"] = time.perf_counter() - began

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Write the whole state."""
        training = self._training
        np.savez(Path(checkpoint_dir, TENSORS), **{spec.name: training.tensor(spec.name) for spec in training.specs()})
        Path(checkpoint_dir, FACTS).write_text(
            json.dumps({"member": number(self.trial_id), "rate": self._rate, "facts": training.facts()})
        )

    def load_checkpoint(self, checkpoint: str) -> None:
        """Take over what another member wrote."""
        told = json.loads(Path(checkpoint, FACTS).read_text())
        with np.load(Path(checkpoint, TENSORS)) as tensors:
            for name in tensors.files:
                self._training.memory(name)[...] = tensors[name]
                self._training.filled(name)
        self._training.restore(told["facts"])
        self._taken |= {"winner": told["member"], "rate": told["rate"], "step": self._training.steps_done}


class Log(tune.Callback):
    """Notes what the members tell."""

    def __init__(self) -> None:
        self._results: list[tuple[int, dict[str, Any]]] = []

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """Note a result."""
        self._results.append((number(trial.trial_id), result))

    def run(self, rates: Sequence[float], saves: np.ndarray) -> PopulationRun:
        """Return what happened.

        Args:
            rates: learning rates at the beginning.
            saves: a row for each save: member, when, how long.
        """
        begun = min(result["began"] for _, result in self._results)
        intervals, exploits, pauses = [], [], []
        ended: dict[int, float] = {}
        for member, result in self._results:
            at, rate = result["ended"] - begun, result["rate"]
            intervals.append(Interval(at, member, result["steps"], result["trained"], rate, result["accuracy"]))
            if taken := result["taken"]:
                away_s, winner = result["began"] - ended[member], taken["winner"]
                if winner == member:
                    pauses.append(Pause(ended[member] - begun, member, away_s))
                else:
                    saved_s = saves[(saves[:, 0] == winner) & (saves[:, 1] < result["began"])][-1, 2]
                    moved_s = float(saved_s) + taken["seconds"]
                    told = (taken["step"], taken["rate"], rate, away_s, moved_s)
                    exploits.append(Exploit(ended[member] - begun, member, winner, *told))
            ended[member] = result["ended"]
        processes = len({result["pid"] for _, result in self._results})
        intervals.sort(key=lambda interval: interval.at)
        held = saves[:, 2].tolist()
        seconds = max(ended.values()) - begun
        return PopulationRun("Ray Tune, files", rates, seconds, intervals, exploits, pauses, held, processes)


def train(problem: Problem, rates: Sequence[float], steps: int) -> PopulationRun:
    """Train a population to its end; arguments as in `Population`."""
    os.environ |= ENVIRONMENT
    logging.getLogger("ray.tune").setLevel(logging.ERROR)
    random.seed(SEED)  # Tune draws from it
    rng = random.Random(SEED)  # noqa: S311  for learning rates
    scheduler = PopulationBasedTraining(
        time_attr="steps",
        metric="accuracy",
        mode="max",
        perturbation_interval=problem.interval,
        quantile_fraction=QUANTILE,
        custom_explore_fn=lambda config: explore(config, rng),
    )
    log = Log()
    with tempfile.TemporaryDirectory() as folder:
        saves = Path(folder, "saves")
        results = tune.Tuner(
            tune.with_resources(
                tune.with_parameters(Tuned, problem=problem, saves=saves),
                {"cpu": 1, f"node:{ray.util.get_node_ip_address()}": 1e-3},
            ),
            param_space={"rate": tune.grid_search(list(rates))},
            tune_config=tune.TuneConfig(scheduler=scheduler, reuse_actors=True),
            run_config=tune.RunConfig(
                name="population", storage_path=folder, stop={"steps": steps}, callbacks=[log], verbose=0
            ),
        ).fit()
        if results.errors:
            raise results.errors[0]
        return log.run(rates, np.loadtxt(saves, ndmin=2))


def number(trial: str) -> int:
    """Return a member's number by its trial's id, which ends with it."""
    return int(trial.rsplit("_", 1)[1])
