"""Checkpoints of a training that goes on: Check-QZP's variants, Keras, `torch.save` and ours.

A network that was trained before is trained on, and everybody writes its weights and its optimizer's state.

Rules
- The stall is what the training waits for in a checkpoint, the wait for the one before included; the total is from
  its beginning until all is synced. Peers sync one file, ours also what makes the version found again.
- A run is a few checkpoints with a while of training after each. Everybody has a run in turn, each round starting
  one place further along; one run of the round has no checkpoint. The training's speed is the run's time over its
  steps, stalls included.
- The same under a load of random readers and writers in the same file system (`file_load`).
- Of ours, the process that trains sees only the copying; encoding and writing happen in a shard, at low priority,
  so their parts are not told apart here. `python -m benchmarks codec` measures the codecs alone.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.table import Table

from .file_load import FileLoad, file_load
from .measure import (
    GIB,
    MIB,
    ONE_COPY,
    Effort,
    Goal,
    Report,
    Row,
    Sample,
    alternate,
    buffers_like,
    copy_action,
    progress,
    seconds,
    total_bytes,
    wait_until,
)
from .qzp import TIMEOUT_S, State, Timing, Variant, bytes_with_one_scale, variants
from .trained import recipe_of, resumed, trained_weights
from .training import Task, Training

if TYPE_CHECKING:
    from tensorvine.actors import PendingSave, Repository, Saved

BASELINE = "torch.save"
STALL_GOAL = 90.0
"""Percent of the baseline's stall that ours should save."""
PUBLISHED = (
    "Check-QZP as published: checkpoint time -87% (QZP), bytes -75% (Q) and up to -99.8% (QZ), training 1.5% faster"
)
STEPS_FIRST = 3
"""Steps before anything is measured: they fill the optimizer's state and the caches."""


@dataclass(frozen=True)
class Plan:
    """How much is run."""

    models: tuple[Task, ...]
    rounds: int
    checkpoints: int
    """Of one run."""
    interval_s: float
    """Training after each checkpoint, at least one step."""
    quick: bool
    """Narrower networks, a lighter load, and no TensorFlow."""


PLANS = {
    Effort.QUICK: Plan(("resnet",), 1, 1, 0.2, True),
    Effort.NORMAL: Plan(("resnet", "ptychonn"), 2, 2, 0.7, False),
    Effort.FULL: Plan(("resnet", "ptychonn"), 5, 4, 5.0, False),
}


class Ours(Variant):
    """A repository on a path, which writes behind the training; the next checkpoint does not wait for the disk.

    Args:
        repo: whose process writes.
        name: as the tables call it, and the model's name.
        folder: the repository's path.
        inherit: "auto" looks for tensors that did not change, which is the default; None writes all.
    """

    def __init__(self, repo: Repository, name: str, folder: Path, inherit: Literal["auto"] | None = "auto") -> None:
        self.name = name
        self._repo = repo
        self._folder = folder
        self._inherit: Literal["auto"] | None = inherit
        self._model = re.sub(r"\W+", "-", name)
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="committed")
        self._pending: list[tuple[float, float, Future[tuple[Saved, float]]]] = []
        self._newest: Saved | None = None
        self._known: dict[Path, int] = {}

    def checkpoint(self, step: int, state: State) -> None:
        """Begin a save and wait until it is staged."""
        if not self._pending:
            self._known = self._files()
        start = time.perf_counter()
        pending = self._repo.save_async(self._model, state, inherit=self._inherit, timeout=TIMEOUT_S)
        pending.staged(TIMEOUT_S)
        stall_s = time.perf_counter() - start
        self._pending.append((start, stall_s, self._waiter.submit(_on_disk, self._repo, pending)))

    def finish(self) -> list[Timing]:
        """Wait for the commits, take the sizes of the files, and retire all versions but the newest."""
        runs, self._pending = self._pending, []
        ended = [(start, stall_s, *future.result(TIMEOUT_S)) for start, stall_s, future in runs]
        files = self._files()
        nbytes = sum(size for path, size in files.items() if path not in self._known) // max(1, len(ended))
        for _, _, saved, _ in ended:
            if self._newest is not None:
                self._repo.retire(self._newest.ref)
            self._newest = saved
        wait_until(self._only_live_ones, "the memory of older checkpoints to be free")
        return [Timing(stall, end - start, stall, None, None, None, nbytes) for start, stall, _, end in ended]

    def close(self) -> None:
        """End the thread that waits for commits."""
        self._waiter.shutdown()

    def _only_live_ones(self) -> bool:
        if self._newest is None:
            return True
        stats = self._repo.stats()
        return stats.bytes_memory <= stats.models * self._repo.info(self._newest.ref).bytes_total

    def _files(self) -> dict[Path, int]:
        found: dict[Path, int] = {}
        for path in self._folder.rglob("*"):
            try:
                if path.is_file():
                    found[path] = path.stat().st_size
            except FileNotFoundError:
                continue  # a temporary file that has its final name by now
        return found


def _on_disk(repo: Repository, pending: PendingSave) -> tuple[Saved, float]:
    """Wait until a version is on disk; gives when that was."""
    saved = pending.committed(TIMEOUT_S)
    repo.flush(TIMEOUT_S)
    return saved, time.perf_counter()


@dataclass
class Figures:
    """What was measured of one variant, with one model, with or without load."""

    model: str
    condition: str
    variant: str
    timings: list[Timing] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    """Of each run: its time over its steps, stalls included."""

    @property
    def stall(self) -> Sample:
        """What the training waited for."""
        return Sample(tuple(timing.stall_s for timing in self.timings))

    @property
    def total(self) -> Sample:
        """Until all was on disk."""
        return Sample(tuple(timing.total_s for timing in self.timings))

    @property
    def nbytes(self) -> int:
        """Of one checkpoint."""
        return int(self.median_of("nbytes") or 0)

    def median_of(self, name: str) -> float | None:
        """Return the median of a part of the timings, None where it is not known."""
        values = [getattr(timing, name) for timing in self.timings]
        return None if not values or None in values else median(values)

    def as_dict(self) -> dict[str, Any]:
        """Return the medians as JSON values; times in seconds."""
        parts = ("stall_s", "total_s", "snapshot_s", "quantise_s", "compress_s", "write_s", "nbytes")
        return {
            "model": self.model,
            "condition": self.condition,
            "variant": self.variant,
            **{part: self.median_of(part) for part in parts},
            "step_s": median(self.step_s),
        }


@dataclass
class CheckpointReport(Report):
    """Also all variants, one by one, and what the paper says."""

    figures: list[Figures] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the report, and the variants under `variants`."""
        return super().as_dict() | {"variants": [each.as_dict() for each in self.figures], "notes": self.notes}

    def print(self, console: Console) -> None:
        """Print the variants, then the rows."""
        table = Table(title="medians of each variant")
        for heading in ("model", "", "variant"):
            table.add_column(heading, no_wrap=True)
        for heading in ("stall", "total", "snapshot", "quantise", "compress", "write", "MiB", "a step, with stalls"):
            table.add_column(heading, justify="right", no_wrap=True)
        for each in self.figures:
            found = each.as_dict()
            parts = ("stall_s", "total_s", "snapshot_s", "quantise_s", "compress_s", "write_s")
            cells = ["" if found[part] is None else seconds(found[part]) for part in parts]
            size = f"{each.nbytes / MIB:.3g}" if each.timings else ""
            table.add_row(each.model, each.condition, each.variant, *cells, size, seconds(found["step_s"]))
        console.print(table)
        super().print(console)
        for note in self.notes:
            console.print(note, highlight=False)


def run(effort: Effort) -> Report:
    """Measure all variants, idle and under load."""
    plan = PLANS[effort]
    report = CheckpointReport("checkpoint")
    for model in plan.models:
        run = resumed(recipe_of(model, quick=plan.quick), trained_weights(model, quick=plan.quick))
        with tempfile.TemporaryDirectory(prefix="checkpoint-") as folder, _everybody(Path(folder), plan) as everybody:
            loop = _Loop(model, run, everybody, plan)
            for condition in ("idle", "load"):
                progress(f"{model}, {condition}")
                with _load(Path(folder), plan) if condition == "load" else nullcontext() as load:
                    figures = loop.measure(condition)
                _add(report, loop, condition, figures, load)
    report.notes.append(PUBLISHED)
    return report


class _Loop:
    """A training, and those who write its checkpoints."""

    def __init__(self, model: str, run: Training, everybody: Sequence[Variant], plan: Plan) -> None:
        self.model = model
        self._run = run
        self._everybody = everybody
        self._plan = plan
        self._serial = count()
        for _ in range(STEPS_FIRST):
            run.step()
        for variant in everybody:
            variant.checkpoint(next(self._serial), self.state())
            variant.finish()

    def state(self) -> State:
        """Return the tensors of a checkpoint: views of what the training changes."""
        return self._run.weights() | self._run.optimizer_state()

    def measure(self, condition: str) -> list[Figures]:
        """Let everybody have a run, in turn."""
        turns: list[tuple[Variant | None, Figures]] = [(None, Figures(self.model, condition, "no checkpoint"))]
        turns += [(variant, Figures(self.model, condition, variant.name)) for variant in self._everybody]
        for turn in range(self._plan.rounds):
            shift = turn % len(turns)
            for variant, figures in turns[shift:] + turns[:shift]:
                figures.step_s.append(self._train(variant))
                if variant is not None:
                    figures.timings += variant.finish()
        return [figures for _, figures in turns]

    def _train(self, variant: Variant | None) -> float:
        start = time.perf_counter()
        steps = 0
        for _ in range(self._plan.checkpoints):
            if variant is not None:
                variant.checkpoint(next(self._serial), self.state())
            going_on = time.perf_counter()
            while time.perf_counter() < going_on + self._plan.interval_s:
                self._run.step()
                steps += 1
        return (time.perf_counter() - start) / steps


@contextmanager
def _everybody(folder: Path, plan: Plan) -> Iterator[list[Variant]]:
    """Start the repositories and make all variants; end everything."""
    from tensorvine.actors import Repository
    from tensorvine.clusters.local import LocalCluster
    from tensorvine.store import Quantize, Shuffle, Zstd

    codecs = {"plain": None, "lossless": Shuffle() | Zstd(), "quantized": Quantize(8) | Zstd()}
    names = {"plain": "ours", "lossless": "ours, Shuffle | Zstd", "quantized": "ours, Quantize(8) | Zstd"}
    with ExitStack() as stack:
        made = variants(folder, keras=not plan.quick)
        stack.enter_context(LocalCluster(object_store_bytes=2 * GIB))
        for name, codec in codecs.items():
            path = folder / name
            repo = stack.enter_context(Repository.start(name, path=path, codec=codec, store_bytes=GIB))
            made.append(Ours(repo, names[name], path))
            if codec is None:
                made.append(Ours(repo, f"{names[name]}, inherit=None", path, inherit=None))
        for variant in made:
            stack.callback(variant.close)
        yield made


@contextmanager
def _load(folder: Path, plan: Plan) -> Iterator[FileLoad]:
    with file_load(folder, jobs=2, size_bytes=32 * MIB) if plan.quick else file_load(folder) as load:
        yield load


def _add(report: CheckpointReport, loop: _Loop, condition: str, figures: list[Figures], load: FileLoad | None) -> None:
    """Add the rows of ours beside the baseline, and the comparison with the paper."""
    report.figures += figures
    state = loop.state()
    size = total_bytes(dict(state))
    copy_s = alternate({ONE_COPY: copy_action(state, buffers_like(state))}, rounds=3)[ONE_COPY].median
    found = {each.variant: each for each in figures}
    baseline = found[BASELINE]
    case = f"{loop.model}, {condition}"
    at_most = 100 * (1 - copy_s / baseline.stall.median)
    for name, ours in found.items():
        if not name.startswith("ours"):
            continue
        saved = 100 * (1 - ours.stall.median / baseline.stall.median)
        goal = Goal("percent of the stall saved", saved, at_least=STALL_GOAL)
        row = Row(
            *(f"{case}: stall, {name}", ours.stall, size, BASELINE, baseline.stall, ONE_COPY, copy_s, (goal,)),
            facts={"saved_percent": saved, "saved_by_one_copy_percent": at_most},
        )
        report.add(row, headline=report.headline is None and "Quantize" in name)
        report.add(Row(f"{case}: on disk, {name}", ours.total, size, BASELINE, baseline.total))
    report.notes.append(f"{case}: a stall of {ONE_COPY} would save {at_most:.3g}% of {BASELINE}'s")
    report.notes.append(f"{case}: {_beside_the_paper(found, baseline, size, bytes_with_one_scale(state))}")
    if load is not None:
        report.notes.append(f"{case}: {load.about}; {load.operations_per_s:,.0f} operations a second")


def _beside_the_paper(found: dict[str, Figures], baseline: Figures, size: int, one_scale: int) -> str:
    def less(ours: float, theirs: float) -> str:
        return f"{100 * (ours / theirs - 1):+.3g}%"

    ours = found["ours, Quantize(8) | Zstd"]
    trainings = {name: median(found[name].step_s) for name in ("Check-QZP", BASELINE, ours.variant)}
    return (
        f"beside {BASELINE}: stall {less(found['Check-QZP'].stall.median, baseline.stall.median)} (QZP), "
        f"{less(ours.stall.median, baseline.stall.median)} (ours); "
        f"bytes {less(found['Check-Q'].nbytes, size)} (Q), {less(found['Check-QZ'].nbytes, size)} (QZ), "
        f"{less(one_scale, size)} (QZ with one scale for the whole model), {less(ours.nbytes, size)} (ours); "
        f"training {less(trainings['Check-QZP'], trainings[BASELINE])} (QZP), "
        f"{less(trainings[ours.variant], trainings[BASELINE])} (ours)"
    )
