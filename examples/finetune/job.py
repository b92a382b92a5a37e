"""The job itself: train, save, find by architecture, transfer, fine-tune, retire, and load again."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np
from digits import SEED, TRUNK
from interrupt import Interrupts
from online.place import Place
from report import Report, Retired, Version
from subject import Subject, Task
from tensorvine.actors import PrefixMatch, Repository
from tensorvine.clusters import draw_lineage, lineage_of
from tensorvine.store import ModelRef
from tensorvine.store.keras import assign, graph_of

DROPOUT = 0.25
EPOCHS = 4
"""Of each fine-tuning, and of the training from scratch."""


@dataclass(frozen=True, slots=True)
class Branch:
    """One way to fine-tune."""

    name: str
    rate: float
    """Learning rate of Adam."""
    extra: tuple[int, ...] = ()
    """Widths of the dense layers that the candidate's head has more."""
    learns: tuple[str, ...] = ("head",)
    """Layers that learn although their tensors may be transferred; all others that match are frozen."""

    def candidate(self, subject: Subject) -> keras.Model:
        """Build the candidate with fresh weights."""
        keras.utils.set_random_seed(SEED)
        return subject.network(self.extra, DROPOUT)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to do."""

    root_epochs: int
    from_root: tuple[Branch, ...]
    from_branches: tuple[Branch, ...]
    """Candidates that are looked for when the first branches are stored."""
    retire: int
    """How many of the worst versions go."""


HEAD = Branch("head", 3e-2)
EXTRA = Branch("extra", 1e-2, extra=(64,))
FEATURES = Branch("features", 1e-3, learns=("features", "head"))
UNFROZEN = Branch("unfrozen", 1e-3, learns=(*TRUNK, "head"))
DEEPER = Branch("deeper", 1e-2, extra=(64, 32))
POLISHED = Branch("polished", 3e-4)
QUICK = Plan(
    root_epochs=2,
    from_root=(HEAD, EXTRA, FEATURES),
    from_branches=(DEEPER,),
    retire=2,
)
FULL = Plan(
    root_epochs=10,
    from_root=(
        HEAD,
        Branch("head-slow", 1e-3),
        Branch("head-fast", 1e-1),
        EXTRA,
        Branch("extra-wide", 1e-2, extra=(256,)),
        FEATURES,
        UNFROZEN,
    ),
    from_branches=(DEEPER, Branch("deeper-slow", 1e-3, extra=(64, 32)), POLISHED),
    retire=3,
)


def run(subject: Subject, *, quick: bool, out: Path, place: Place) -> None:
    """Run the whole job and draw its picture into the directory `out`."""
    plan = QUICK if quick else FULL
    report = Report(place.prefix)
    report.title(place.title)
    with (
        Interrupts().handled() as interrupts,
        place.cluster(),
        place.open() as repo,
        tempfile.TemporaryDirectory() as files,
        interrupts.deferred(),
    ):
        job = Job(repo, place.prefix, subject, plan, report, Path(files), interrupts.check)
        job.train_root()
        job.branch_from_root()
        job.branch_from_branches()
        job.train_from_scratch()
        report.accuracies(job.versions)
        report.bytes_stored(job.versions, job.stored())
        report.owners(job.versions, {v.ref: repo.contributions(v.ref) for v in job.versions})
        job.ask()
        out.mkdir(parents=True, exist_ok=True)
        picture = draw_lineage(lineage_of(repo, job.versions[0].ref), out / "lineage.png")
        job.retire_worst()
        report.lineage(job.versions, repo.models(place.prefix))
        job.verify()
    report.picture(picture)


class Job:
    """The steps, and what they saved."""

    def __init__(
        self,
        repo: Repository,
        prefix: str,
        subject: Subject,
        plan: Plan,
        report: Report,
        files: Path,
        check: Callable[[], None],
    ) -> None:
        self.versions: list[Version] = []
        """In the order in which they were saved."""
        self._repo = repo
        self._prefix = prefix
        """Of the names of models."""
        self._before = repo.stats().bytes_memory
        """What others had stored."""
        self._subject = subject
        self._plan = plan
        self._report = report
        self._files = files
        self._check = check
        """Raises KeyboardInterrupt if Ctrl-C came; called between what TensorFlow does."""

    # ---- saving ---------------------------------------------------------------------------------------------

    def train_root(self) -> None:
        """Train a model for the first task and save it."""
        self._report.title(f"{_begun(self._subject.first)}: train and save")
        keras.utils.set_random_seed(SEED)
        model = self._subject.root()
        self._train("root", model, self._subject.first, 1e-3, self._plan.root_epochs)
        self._save("root", model, self._subject.first, "all layers; rate 0.001")

    def branch_from_root(self) -> None:
        """Find the stored model by the architecture of a candidate, and fine-tune from it in several ways."""
        task = _begun(self._subject.later)
        self._report.title(f"{task}: find the stored model most like the candidate, and branch from it")
        with self._repo.longest_prefix(graph_of(HEAD.candidate(self._subject))) as match:
            self._report.found("candidate", match)
            for branch in self._plan.from_root:
                self._fine_tune(branch, match)

    def branch_from_branches(self) -> None:
        """Let each further candidate find its own parent: the branches are stored models too."""
        self._report.title("Further candidates: each finds the stored model most like itself")
        for branch in self._plan.from_branches:
            with self._repo.longest_prefix(graph_of(branch.candidate(self._subject))) as match:
                self._report.found(branch.name, match)
                self._fine_tune(branch, match)

    def train_from_scratch(self) -> None:
        """Train the candidate without transfer, to compare with."""
        self._report.title("The same candidate from scratch")
        model = HEAD.candidate(self._subject)
        self._train("scratch", model, self._subject.later, 1e-3, EPOCHS)
        self._save("scratch", model, self._subject.later, "all layers; rate 0.001")

    def _fine_tune(self, branch: Branch, match: PrefixMatch) -> None:
        """Transfer the tensors that match, freeze their layers, train the others, save what is new.

        What was found for one branch serves others, too: of its layers, those that this branch has.
        """
        model = branch.candidate(self._subject)
        graph, found = graph_of(model), self._repo.graph(match.ref)
        layers = {
            m: theirs for m, theirs in match.layers.items() if graph.fingerprints.get(m) == found.fingerprints[theirs]
        }
        stored = self._repo.load(match.ref, layers=list(layers.values()))
        assign(model, {name: stored[match.tensors[name]] for mine in layers for name in graph.by_name[mine].tensors})
        frozen = {mine: theirs for mine, theirs in layers.items() if mine not in branch.learns}
        for layer in model.layers:
            layer.trainable = layer.name not in frozen
        self._train(branch.name, model, self._subject.later, branch.rate, EPOCHS)
        self._save(
            branch.name, model, self._subject.later, f"{self._learning(model)}; rate {branch.rate:g}", match.ref, frozen
        )

    def _train(self, name: str, model: keras.Model, task: Task, rate: float, epochs: int) -> None:
        self._check()
        with self._report.progress(name, epochs) as each_epoch:
            self._subject.train(model, task, rate, epochs, self._check, each_epoch)

    def _save(
        self,
        name: str,
        model: keras.Model,
        task: Task,
        learned: str,
        parent: ModelRef | None = None,
        inherit: Mapping[str, str] | None = None,
    ) -> None:
        self._check()
        predictions = self._subject.predict(model, task)
        accuracy = task.accuracy(predictions)
        saved = self._repo.save_model(
            self._prefix + name,
            model,
            parent=parent,
            inherit=inherit or None,
            quality=accuracy,
            metadata={"task": task.name, "learned": learned},
        )
        info = self._repo.info(saved.ref)
        self.versions.append(Version(info, predictions, _file_bytes(model, self._files / f"{name}.weights.h5")))

    # ---- asking, retiring, loading again --------------------------------------------------------------------

    def ask(self) -> None:
        """Ask what is stored: by a pattern of layers, and by lineage."""
        repo = self._repo
        refs = {version.ref.name.removeprefix(self._prefix): version.ref for version in self.versions}
        pattern = [{"units": [32, 64]}, {"class": "Dropout"}]
        self._report.answers(
            {
                f"find({pattern})": repo.find(pattern),
                "descendants('root')": repo.descendants(refs["root"]),
                "lineage('deeper')": repo.lineage(refs["deeper"]),
                "common_ancestor('deeper', 'extra')": repo.common_ancestor(refs["deeper"], refs["extra"]),
                "common_ancestor('deeper', 'head')": repo.common_ancestor(refs["deeper"], refs["head"]),
                "common_ancestor('deeper', 'scratch')": repo.common_ancestor(refs["deeper"], refs["scratch"]),
            }
        )

    def retire_worst(self) -> None:
        """Retire the worst versions for the later task, and then the root."""
        root, *others = self.versions
        worst = sorted(others, key=lambda version: version.accuracy)[: self._plan.retire]
        retired: list[Retired] = []
        for version in (*worst, root):
            before = self._repo.stats().bytes_memory
            self._repo.retire(version.ref)
            retired.append(Retired(version.info, freed=before - self._repo.stats().bytes_memory))
        left = self._left()
        contributions = {version.ref: self._repo.contributions(version.ref) for version in left}
        heir = max(left, key=lambda version: len(contributions[version.ref].get(root.ref, ()))).ref
        self._report.retired(retired, heir, self._repo.lineage(heir), contributions[heir])
        self._report.bytes_stored(left, self.stored())

    def verify(self) -> None:
        """Load every version that is left, built from the repository alone, and compare what it predicts.

        Raises:
            RuntimeError: a loaded model predicts something else than the saved one did.
        """
        for version in self._left():
            loaded = self._subject.predict(self._repo.load_model(version.ref), self._subject.later)
            self._check()
            if not np.array_equal(loaded, version.predictions):
                raise RuntimeError(f"{version.ref}: expected the predictions of the model that was saved; they differ")
        self._report.verified(self._left())

    def stored(self) -> int:
        """Return the bytes that the repository has more than before the job; what others save meanwhile counts, too."""
        return self._repo.stats().bytes_memory - self._before

    def _left(self) -> list[Version]:
        live = set(self._repo.models(self._prefix))
        return [version for version in self.versions if version.ref in live]

    def _learning(self, model: keras.Model) -> str:
        """Name the layers that learn."""
        names = [layer.name for layer in model.layers if layer.trainable_weights]
        return "all layers" if {*self._subject.trunk} < {*names} else " + ".join(names)


def _begun(task: Task) -> str:
    """Return a task's name as it begins a line."""
    return task.name[0].upper() + task.name[1:]


def _file_bytes(model: keras.Model, path: Path) -> int:
    """Write the weights to a file of their own, without the optimizer's state, and give its size."""
    bare = type(model).from_config(model.get_config())
    bare.set_weights(model.get_weights())
    bare.save_weights(path)
    return path.stat().st_size
