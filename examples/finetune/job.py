"""The job: train, save, find by architecture, fine-tune, retire, and load again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from shared.place import Place
from shared.show import Report, size
from tensorvine.actors import PrefixMatch, Repository
from tensorvine.clusters import draw_lineage, lineage_of
from tensorvine.store import ModelInfo
from tensorvine.store.torch import assign, graph_of
from torch import Tensor, nn
from transformers import ViTForImageClassification
from vit import FIRST, LATER, LAYERS, Task, tasks, train, vit

EPOCHS = 8
"""Of each fine-tuning, and of the training without transfer."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A way to fine-tune."""

    name: str
    learns: tuple[str, ...]
    """Names of the trained parameters begin with one of these."""
    rate: float
    """Learning rate of AdamW."""
    layers: int = LAYERS
    """Transformer layers of the network."""


HEAD = ("vit.layernorm", "classifier")
SECOND = (*HEAD, "vit.layers.1")
ALL = ("",)
FROM_ROOT = (
    Branch("head", HEAD, 1e-2),
    Branch("second", SECOND, 3e-3),
    Branch("all", ALL, 1e-3),
    Branch("all-fast", ALL, 3e-3),
    Branch("head-slow", HEAD, 1e-3),
)
FROM_BRANCHES = (
    Branch("deeper", (*HEAD, "vit.layers.2"), 1e-3, layers=3),
    Branch("polished", (*HEAD, "vit.layers.2"), 3e-4, layers=3),
    Branch("deepest", (*HEAD, "vit.layers.3"), 1e-3, layers=4),
)
RETIRED = 2
"""How many of the worst branches are retired."""


@dataclass(frozen=True, slots=True)
class Version:
    """A saved version."""

    info: ModelInfo
    logits: Tensor
    """Outputs for the test images when it was saved."""
    learned: str

    @property
    def accuracy(self) -> float:
        """On the test images of its task."""
        return self.info.quality or 0.0


def run(*, quick: bool, out: Path, place: Place) -> None:
    """Run the job, and draw the lineage into the folder `out`."""
    torch.set_num_threads(1)  # enough for networks of this size
    report = Report(place.prefix)
    report.title(place.title)
    with place.cluster(), place.open() as repo:
        job = Job(repo, place.prefix, report)
        job.train_root(epochs=5 if quick else 15)
        job.branch(FROM_ROOT[: 3 if quick else None], FROM_BRANCHES[: 2 if quick else None])
        job.train_from_scratch()
        job.compare()
        out.mkdir(parents=True, exist_ok=True)
        picture = draw_lineage(lineage_of(repo, job.versions[0].info.ref), out / "lineage.png")
        job.retire()
        job.verify()
    report.picture(picture)


class Job:
    """The steps, and the versions that they saved."""

    def __init__(self, repo: Repository, prefix: str, report: Report) -> None:
        self.versions: list[Version] = []
        self._repo, self._prefix, self._report = repo, prefix, report
        self._first, self._later = tasks()
        self._before = repo.stats().bytes_memory
        """Bytes that others had stored."""

    def train_root(self, epochs: int) -> None:
        """Train a network for the first task, and save it."""
        self._report.title(f"Train the root: {self._first.name}")
        model = vit(len(FIRST))
        train(model, self._first, 1e-3, epochs)
        self._save("root", model, self._first, "all")

    def branch(self, from_root: Sequence[Branch], from_branches: Sequence[Branch]) -> None:
        """Fine-tune from the root, then from the stored model that is most similar to each further network."""
        self._report.title(f"Find the most similar stored model, and fine-tune from it: {self._later.name}")
        with self._repo.longest_prefix(graph_of(vit(len(LATER)))) as match:
            self._found("the network", match)
            for branch in from_root:
                self._fine_tune(branch, match)
        for branch in from_branches:
            with self._repo.longest_prefix(graph_of(vit(len(LATER), branch.layers))) as match:
                self._found(branch.name, match)
                self._fine_tune(branch, match)

    def train_from_scratch(self) -> None:
        """Train the same network without transfer."""
        model = vit(len(LATER))
        train(model, self._later, 1e-3, EPOCHS)
        self._save("scratch", model, self._later, "all, without transfer")

    def compare(self) -> None:
        """Print accuracy, bytes and owners of all versions, and what the repository answers about them."""
        repo, report, versions = self._repo, self._report, self.versions
        rows = [
            (
                report.short(version.info.ref),
                report.short(version.info.parent),
                version.learned,
                f"{version.accuracy:.1%}",
                size(version.info.bytes_owned),
                size(version.info.bytes_total - version.info.bytes_owned),
            )
            for version in versions
        ]
        best = max(range(1, len(versions)), key=lambda number: versions[number].accuracy)
        columns = ("version", "parent", "trained", "accuracy", "owned", "inherited")
        report.table("Versions", columns, rows, left=3, best=best)
        report.say(
            f"With transfer {versions[best].accuracy:.1%}; without transfer, from the same {len(self._later.train[1])} "
            f"images in as many epochs, {versions[-1].accuracy:.1%}."
        )
        whole = sum(version.info.bytes_total for version in versions)
        stored = repo.stats().bytes_memory - self._before
        report.say(f"Stored: {size(stored)}, {stored / whole:.0%} of the {size(whole)} that separate files would take.")
        refs = {version.info.ref.name.removeprefix(self._prefix): version.info.ref for version in versions}
        owners = repo.contributions(refs["polished"]).items()
        answers = {
            "contributions('polished')": ", ".join(f"{report.short(ref)} ({len(tensors)})" for ref, tensors in owners),
            "lineage('polished')": ", ".join(map(report.short, repo.lineage(refs["polished"]))),
            "descendants('root')": ", ".join(map(report.short, repo.descendants(refs["root"]))),
            "common_ancestor('polished', 'head')": report.short(repo.common_ancestor(refs["polished"], refs["head"])),
            "common_ancestor('polished', 'scratch')": repo.common_ancestor(refs["polished"], refs["scratch"]),
        }
        report.table("Queries", ("question", "answer"), list(answers.items()), left=2)

    def retire(self) -> None:
        """Retire the worst versions of the later task, then the root."""
        root, *others = self.versions
        rows: list[tuple[object, ...]] = []
        for version in (*sorted(others, key=lambda version: version.accuracy)[:RETIRED], root):
            before = self._repo.stats().bytes_memory
            self._repo.retire(version.info.ref)
            freed = before - self._repo.stats().bytes_memory
            owned = version.info.bytes_owned
            rows.append((self._report.short(version.info.ref), size(owned), size(freed), size(owned - freed)))
        self._report.table("Retired versions", ("version", "owned", "freed", "kept for descendants"), rows)

    def verify(self) -> None:
        """Load every live version, and compare its outputs with those of the saved model.

        Raises:
            RuntimeError: if a loaded model predicts something else than the saved one did.
        """
        live = set(self._repo.models(self._prefix))
        left = [version for version in self.versions if version.info.ref in live]
        for version in left:
            model = self._repo.load_model(version.info.ref, factory=ViTForImageClassification)
            if not torch.equal(self._later.logits(model), version.logits):
                raise RuntimeError(f"{version.info.ref}: expected the outputs of the saved model; found others")
        self._report.say(f"Loaded again: all {len(left)} live versions predict the same, bit for bit.")

    def _found(self, what: str, match: PrefixMatch) -> None:
        self._report.say(
            f"longest_prefix({what}) = {self._report.short(match.ref)}: {len(match.layers)} layers with "
            f"{len(match.tensors)} tensors match"
        )

    def _fine_tune(self, branch: Branch, match: PrefixMatch) -> None:
        """Load the matching tensors, train some layers, and save."""
        model = vit(len(LATER), branch.layers)
        stored = self._repo.load(match.ref, layers=list(match.layers.values()))
        assign(model, {mine: stored[theirs] for mine, theirs in match.tensors.items()})
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(branch.learns))
        train(model, self._later, branch.rate, EPOCHS)
        learned = " + ".join(branch.learns) if branch.learns != ALL else "all"
        self._save(branch.name, model, self._later, f"{learned}; rate {branch.rate:g}", match)

    def _save(self, name: str, model: nn.Module, task: Task, learned: str, match: PrefixMatch | None = None) -> None:
        """Save a model. Tensors that are equal to its parent's are shared with the parent."""
        saved = self._repo.save_model(
            self._prefix + name,
            model,
            parent=None if match is None else match.ref,
            quality=task.accuracy(model),
            metadata={"task": task.name, "learned": learned},
        )
        self.versions.append(Version(self._repo.info(saved.ref), task.logits(model), learned))
        self._report.say(f"{name}: {self.versions[-1].accuracy:.1%}, wrote {size(saved.bytes_written)}")
