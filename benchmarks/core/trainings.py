"""Networks that are trained: ResNet, PtychoNN and word vectors for codecs and checkpoints, NT3 and TC1 for updates.

Rules
- No data are downloaded: scikit-learn has digits, images and breast cancer data, Python has the topics of `pydoc`.
- Everything follows from seeds; the caller's random state does not change. All run on the CPU.
- Networks are as in their papers, with smaller widths and fewer steps.
- Trained weights are kept in the temporary folder, under a hash of the recipe, this file and PyTorch's version.
- A `Learner` can continue from any state: an iteration depends on its number and on the state before it.
"""

from __future__ import annotations

import copy
import hashlib
import os
import re
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Literal

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from sklearn.datasets import load_breast_cancer, load_digits, load_sample_images
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, l1_loss, logsigmoid
from torch.optim import SGD, Adam, SparseAdam

from .measure import Tensors, progress

Task = Literal["resnet", "ptychonn", "words"]
Net = Literal["nt3", "tc1", "ptychonn"]
STEPS_BETWEEN = 10
"""Batches from one version of a fine-tuning to the next."""
FEATURES, HELD_OUT = 600, 60
"""Of NT3 and TC1: values of a sample. Of all learners: samples of an inference."""
SIDE, PHOTONS = 64, 1e5
"""Of a diffraction pattern: pixels of a side, as in PtychoNN, and expected photons."""
NEGATIVES, LONGEST_GRAM = 5, 6


@dataclass(frozen=True)
class Recipe:
    """Everything that a training follows from: `width` is that of the first convolution, or of a word vector."""

    task: Task
    width: int
    steps: int
    batch: int
    rate: float


FULL: dict[Task, Recipe] = {
    "resnet": Recipe("resnet", width=64, steps=300, batch=32, rate=0.02),
    "ptychonn": Recipe("ptychonn", width=32, steps=200, batch=16, rate=5e-4),
    "words": Recipe("words", width=64, steps=3000, batch=512, rate=5e-3),
}
QUICK: dict[Task, Recipe] = {
    "resnet": Recipe("resnet", width=8, steps=20, batch=16, rate=0.02),
    "ptychonn": Recipe("ptychonn", width=4, steps=10, batch=8, rate=1e-3),
    "words": Recipe("words", width=8, steps=40, batch=128, rate=5e-3),
}


class Training(ABC):
    """A network, its optimizer and an endless stream of batches."""

    frozen: tuple[str, ...]
    """Beginnings of the names of the parameters that fine-tuning does not change."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._still: list[nn.Module] = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = self._network()
        self.optimizer = self._optimizer()
        self._batches = self._stream(np.random.default_rng(0), first=True)

    def step(self) -> float:
        """Train on one batch; return its loss."""
        self.model.train()
        for module in self._still:
            module.eval()  # or its running means would change
        self.optimizer.zero_grad()
        loss = self._loss(next(self._batches))
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def fine_tune(self) -> None:
        """Go on with other data and with the first layers frozen."""
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(not name.startswith(self.frozen))
        self._still = [module for name, module in self.model.named_modules() if name.startswith(self.frozen)]
        self._batches = self._stream(np.random.default_rng(1), first=False)

    def weights(self) -> Tensors:
        """Return the `state_dict` as arrays that share its memory."""
        return {name: value.detach().numpy() for name, value in self.model.state_dict().items()}

    def optimizer_state(self) -> Tensors:
        """Return the optimizer's tensors as arrays that share its memory, named `optimizer/KIND/PARAMETER`."""
        return {
            f"optimizer/{kind}/{name}": value.detach().numpy()
            for name, parameter in self.model.named_parameters()
            for kind, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor)
        }

    @abstractmethod
    def _network(self) -> nn.Module: ...

    @abstractmethod
    def _optimizer(self) -> Any: ...

    @abstractmethod
    def _stream(self, rng: np.random.Generator, *, first: bool) -> Iterator[Any]: ...

    @abstractmethod
    def _loss(self, batch: Any) -> Tensor: ...


class ResNet(Training):
    """A residual network of 18 layers that reads digits on patches of photographs; 11.2 M parameters at width 64.

    He et al., *Deep residual learning* (2016), with the stem for small images: 3x3, no pooling. Momentum is stored next
    to the weights: smoothed gradients, as in Check-QZP's checkpoints.
    """

    frozen = ("stem", "stages.0", "stages.1")

    def _network(self) -> nn.Module:
        widths = [self.recipe.width << stage for stage in range(4)]
        model = nn.Sequential()
        model.add_module("stem", nn.Sequential(_conv(3, widths[0]), nn.BatchNorm2d(widths[0]), nn.ReLU()))
        stages = [
            nn.Sequential(_Block(inside, outside, 1 if inside == outside else 2), _Block(outside, outside, 1))
            for inside, outside in zip([widths[0], *widths], widths, strict=False)
        ]
        model.add_module("stages", nn.Sequential(*stages))
        model.add_module("pool", nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()))
        model.add_module("head", nn.Linear(widths[-1], 10))
        return model

    def _optimizer(self) -> Any:
        return SGD(self.model.parameters(), self.recipe.rate, momentum=0.9, weight_decay=5e-4)

    def _stream(self, rng: np.random.Generator, *, first: bool) -> Iterator[Any]:
        while True:
            yield _digits(rng, self.recipe.batch, least=0 if first else 5)

    def _loss(self, batch: Any) -> Tensor:
        images, labels = batch
        return cross_entropy(self.model(images), labels)


class _Block(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        first = _conv(inside, outside, stride), nn.BatchNorm2d(outside), nn.ReLU()
        self.body = nn.Sequential(*first, _conv(outside, outside), nn.BatchNorm2d(outside))
        self.skip = nn.Sequential()
        if inside != outside:
            self.skip = nn.Sequential(_conv(inside, outside, stride, size=1), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.body(x) + self.skip(x))


def _conv(inside: int, outside: int, stride: int = 1, *, size: int = 3) -> nn.Module:
    return nn.Conv2d(inside, outside, size, stride, padding=size // 2, bias=False)


class PtychoNN(Training):
    """PtychoNN: a diffraction pattern to amplitude and phase; 1,154,210 parameters at width 32.

    Cherukara et al., *AI-enabled high-resolution scanning coherent diffraction imaging* (2020). One sample image is the
    object's amplitude and the other its phase; fine-tuning exchanges them.
    """

    frozen = ("encoder",)

    def _network(self) -> nn.Module:
        return _as_in_keras(_PtychoNet(self.recipe.width))

    def _optimizer(self) -> Any:
        return Adam(self.model.parameters(), self.recipe.rate)

    def _stream(self, rng: np.random.Generator, *, first: bool) -> Iterator[Any]:
        while True:
            yield _diffraction(rng, self.recipe.batch, exchanged=not first)

    def _loss(self, batch: Any) -> Tensor:
        pattern, amplitude, phase = batch
        found = self.model(pattern)
        return l1_loss(found[:, :1], amplitude) + l1_loss(found[:, 1:], phase)


class _PtychoNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()

        def pairs(widths: list[int], after: type[nn.Module], **options: int) -> list[nn.Module]:
            """Return two convolutions per width, and the layer after them."""
            made: list[nn.Module] = []
            for inside, outside in pairwise(widths):
                for channels in (inside, outside):
                    made += [nn.Conv2d(channels, outside, 3, padding=1), nn.ReLU()]
                made.append(after(**options))
            return made

        down, up = [1, width, 2 * width, 4 * width], [4 * width, 4 * width, 2 * width, width]
        self.encoder = nn.Sequential(*pairs(down, nn.MaxPool2d, kernel_size=2))
        self.amplitude, self.phase = (
            nn.Sequential(*pairs(up, nn.Upsample, scale_factor=2), nn.Conv2d(width, 1, 3, padding=1)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        inside = self.encoder(x)
        return torch.cat([self.amplitude(inside).sigmoid(), torch.pi * self.phase(inside).tanh()], 1)


def _as_in_keras(model: nn.Module) -> nn.Module:
    """Initialise a network as Keras does, in which it was written."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.xavier_uniform_(parameter)
        else:
            nn.init.zeros_(parameter)
    return model


class Words(Training):
    """Word vectors from character n-grams: a large table of which a step changes few rows.

    Bojanowski et al., *Enriching word vectors with subword information* (2017): skip-gram with negative samples. The
    training reads nine tenths of the text, fine-tuning the last tenth.
    """

    frozen = ("context",)
    rows = 1 << 17

    def _network(self) -> nn.Module:
        model, width = nn.Module(), self.recipe.width
        model.grams = nn.EmbeddingBag(self.rows, width, mode="mean", sparse=True)
        model.context = nn.Embedding(len(_text()[1]), width, sparse=True)
        nn.init.uniform_(model.grams.weight, -1 / width, 1 / width)
        nn.init.zeros_(model.context.weight)
        return model

    def _optimizer(self) -> Any:
        return SparseAdam(list(self.model.parameters()), self.recipe.rate)

    def _stream(self, rng: np.random.Generator, *, first: bool) -> Iterator[Any]:
        words, vocabulary = _text()
        border = len(words) * 9 // 10
        start, stop = (5, border) if first else (border, len(words) - 5)
        grams = [_grams(word, self.rows) for word in vocabulary]
        while True:
            places = rng.integers(start, stop, self.recipe.batch)
            near = places + rng.integers(1, 5, len(places)) * rng.choice([-1, 1], len(places))
            contexts = words[rng.integers(0, len(words), (len(places), 1 + NEGATIVES))]
            contexts[:, 0] = words[near]
            yield [grams[word] for word in words[places]], contexts

    def _loss(self, batch: Any) -> Tensor:
        grams, contexts = batch
        offsets, model = np.cumsum([0, *(len(rows) for rows in grams[:-1])]), self.model
        vectors = model.grams(torch.from_numpy(np.concatenate(grams)), torch.from_numpy(offsets))
        scores = (model.context(torch.from_numpy(contexts)) @ vectors[:, :, None])[:, :, 0]
        return -(logsigmoid(scores[:, 0]) + logsigmoid(-scores[:, 1:]).sum(1)).mean()


TASKS: dict[Task, type[Training]] = {"resnet": ResNet, "ptychonn": PtychoNN, "words": Words}


# ---- trained weights ----------------------------------------------------------------------------------------


def trained_weights(name: Task, *, quick: bool = False) -> Tensors:
    """Return a trained network's weights, from the cache or by training it (up to a minute and a half).

    Args:
        name: `resnet` (11.2 M parameters), `ptychonn` (1.15 M) or `words` (8.6 M, nearly all in one table).
        quick: Use much narrower networks and fewer steps.

    Returns:
        Tensor name -> array, as PyTorch's `state_dict` has them: float32, counters int64.
    """
    recipe = (QUICK if quick else FULL)[name]
    path = _cached(recipe, "state")
    if not path.exists():
        run = TASKS[name](recipe)
        progress(f"training {name}, width {recipe.width}: {recipe.steps} steps (once; kept in {path.parent})")
        for _ in range(recipe.steps):
            run.step()
        _store(path, run.weights())
    return load_file(path)


def fine_tuning(name: Task, versions: int, *, quick: bool = False) -> list[Tensors]:
    """Return the weights at consecutive versions of a fine-tuning, ten batches apart, oldest first.

    The first is `trained_weights`. The network goes on with other data: `resnet` with five of the ten digits and its
    first half frozen, `words` with another text, which changes few rows of its table.
    """
    paths = [_cached((QUICK if quick else FULL)[name], f"version-{place}") for place in range(1, versions)]
    if not all(path.exists() for path in paths):
        progress(f"fine-tuning {name}: {versions} versions")
        run = resumed(name, quick=quick)
        run.fine_tune()
        for path in paths:
            for _ in range(STEPS_BETWEEN):
                run.step()
            _store(path, run.weights())
    return [trained_weights(name, quick=quick), *map(load_file, paths)]


def resumed(name: Task, *, quick: bool = False) -> Training:
    """Return a training that goes on from the trained weights, with an empty optimizer."""
    run, weights = TASKS[name]((QUICK if quick else FULL)[name]), trained_weights(name, quick=quick)
    run.model.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in weights.items()})
    return run


def _cached(recipe: Recipe, what: str) -> Path:
    key = hashlib.sha256(f"{recipe}{torch.__version__}".encode() + Path(__file__).read_bytes()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / "tensorvine-trained" / f"{recipe.task}-{key}-{what}.safetensors"


def _store(path: Path, tensors: Tensors) -> None:
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, unfinished)
    unfinished.replace(path)


# ---- learners -----------------------------------------------------------------------------------------------


class Learner(ABC):
    """A network, its optimizer and its samples; the samples held out are never trained on."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.model, self._optimizer = model, optimizer

    def step(self, iteration: int) -> float:
        """Train on the batch of an iteration; return its loss."""
        torch.manual_seed(iteration)  # dropout's
        self.model.train()
        self._optimizer.zero_grad()
        loss = self._loss(iteration)
        loss.backward()
        self._optimizer.step()
        return loss.item()

    def state(self) -> Any:
        """Return a copy of everything that training changes."""
        return copy.deepcopy((self.model.state_dict(), self._optimizer.state_dict()))

    def restore(self, state: Any) -> None:
        """Go back to a state."""
        model, optimizer = copy.deepcopy(state)
        self.model.load_state_dict(model)
        self._optimizer.load_state_dict(optimizer)

    def held_out_loss(self) -> float:
        """Return the loss on the samples held out, as a consumer has it: without dropout."""
        self.model.eval()
        with torch.no_grad():
            return self._held_out().item()

    @abstractmethod
    def _held_out(self) -> Tensor: ...

    @abstractmethod
    def _loss(self, iteration: int) -> Tensor: ...


def learner(name: Net) -> Learner:
    """Return a learner, with its initial weights.

    NT3 (tumor or normal tissue) has 1,120 samples and 56 iterations an epoch, TC1 (18 types of tumor) 4,320 and 216,
    PtychoNN of width 8 640 patterns and 40.

    >>> run = learner("nt3")
    >>> sum(parameter.numel() for parameter in run.model.parameters())
    62686
    >>> losses = [run.step(iteration) for iteration in range(3)]
    """
    if name == "ptychonn":
        return _Patterns()
    if name == "nt3":
        return _Expression(*_tumors(1120 + HELD_OUT), rate=0.004)
    return _Expression(*_types(4320 + HELD_OUT, classes=18), rate=0.006)


class _Expression(Learner):
    """A network on gene expression profiles: NT3's, with as many classes as there are labels."""

    def __init__(self, samples: NDArray[np.float32], labels: NDArray[np.int64], *, rate: float) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            convolutions = nn.Conv1d(1, 16, 20), nn.ReLU(), nn.Conv1d(16, 16, 10), nn.ReLU(), nn.MaxPool1d(10)
            dense = nn.Linear(57 * 16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 20), nn.ReLU(), nn.Dropout(0.1)
            last = nn.Linear(20, int(labels.max()) + 1)
            model = _as_in_keras(nn.Sequential(*convolutions, nn.Flatten(), *dense, last))
        super().__init__(model, SGD(model.parameters(), rate))
        self._samples, self._labels = torch.from_numpy(samples[:, None]), torch.from_numpy(labels)
        self._trained, self._batch = len(samples) - HELD_OUT, 20

    def _held_out(self) -> Tensor:
        return cross_entropy(self.model(self._samples[self._trained :]), self._labels[self._trained :])

    def _loss(self, iteration: int) -> Tensor:
        epoch, place = divmod(iteration * self._batch, self._trained)
        order = np.random.default_rng(epoch).permutation(self._trained)
        chosen = torch.from_numpy(order[place : place + self._batch])
        return cross_entropy(self.model(self._samples[chosen]), self._labels[chosen])


class _Patterns(Learner):
    """PtychoNN, whose batches are drawn once."""

    def __init__(self) -> None:
        self._run = PtychoNN(Recipe("ptychonn", width=8, steps=0, batch=16, rate=1e-3))
        self._samples = [next(self._run._batches) for _ in range(40)]
        self._last = next(self._run._batches)
        super().__init__(self._run.model, self._run.optimizer)

    def _held_out(self) -> Tensor:
        return self._run._loss(self._last)

    def _loss(self, iteration: int) -> Tensor:
        return self._run._loss(self._samples[iteration % len(self._samples)])


# ---- data ---------------------------------------------------------------------------------------------------


@cache
def _photographs() -> NDArray[np.float32]:
    """Return scikit-learn's two sample images: (2, 427, 640, 3), 0 to 1."""
    return np.stack(load_sample_images().images).astype(np.float32) / np.float32(255)


@cache
def _handwriting() -> Any:
    """Return scikit-learn's digits: `images` (1797, 8, 8), 0 to 16, and `target`."""
    return load_digits()


def _digits(rng: np.random.Generator, count: int, *, least: int) -> tuple[Tensor, Tensor]:
    """Draw digits, each subtracted from a patch of a photograph: (count, 3, 8, 8) float32, and their labels."""
    found = _handwriting()
    chosen = rng.choice(np.flatnonzero(found.target >= least), count)
    rows, columns = rng.integers(0, 427 - 8, count), rng.integers(0, 640 - 8, count)
    corners = enumerate(zip(rows, columns, strict=True))
    patches = np.stack([_photographs()[place % 2, r : r + 8, c : c + 8] for place, (r, c) in corners])
    digits = (found.images[chosen].astype(np.float32) / 16)[:, :, :, None]
    images = np.abs(digits - 0.5 * patches).transpose(0, 3, 1, 2)
    return torch.from_numpy(np.ascontiguousarray(images)), torch.from_numpy(found.target[chosen])


def _diffraction(rng: np.random.Generator, count: int, *, exchanged: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Scan an object at random places: patterns, amplitudes (0 to 1) and phases (-pi to pi), (count, 1, 64, 64).

    A pattern is the square root of the photons counted: |FFT(probe * object)|^2, with Poisson noise.
    """
    grey = _photographs().mean(-1)
    amplitude, phase = grey[::-1] if exchanged else grey
    across = np.exp(-(np.linspace(-1, 1, SIDE) ** 2) / 0.3)
    corners = rng.integers(0, (427 - SIDE, 640 - SIDE), (count, 2))
    places = [(slice(r, r + SIDE), slice(c, c + SIDE)) for r, c in corners]
    amplitudes = np.stack([amplitude[place] for place in places])
    phases = np.stack([np.pi * (2 * phase[place] - 1) for place in places])
    field = across[:, None] * across * amplitudes * np.exp(1j * phases)
    intensity = np.abs(np.fft.fftshift(np.fft.fft2(field), axes=(1, 2))) ** 2
    counts = rng.poisson(intensity * (PHOTONS / intensity.sum(axis=(1, 2), keepdims=True)))
    arrays = (np.sqrt(counts) / 10, amplitudes, phases)
    pattern, amplitude, phase = (torch.from_numpy(array[:, None].astype(np.float32)) for array in arrays)
    return pattern, amplitude, phase


@cache
def _text() -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Return the words of Python's `pydoc` topics as numbers, and the vocabulary that they count in."""
    words = re.findall(r"[a-z]+", " ".join(topics[name] for name in sorted(topics)).lower())
    vocabulary = tuple(sorted(set(words)))
    number = {word: place for place, word in enumerate(vocabulary)}
    return np.array([number[word] for word in words]), vocabulary


def _grams(word: str, rows: int) -> NDArray[np.int64]:
    """Return the rows of a word and of its pieces of three to six characters."""
    padded = f"<{word}>"
    lengths = range(3, LONGEST_GRAM + 1)
    pieces = {padded[start : start + length] for length in lengths for start in range(len(padded) - length + 1)}
    return np.array(sorted(xxhash.xxh32_intdigest(piece.encode()) % rows for piece in pieces | {padded}))


def _tumors(count: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Draw from the breast cancer data, its 30 features mixed into 600, with noise."""
    found: Any = load_breast_cancer()
    rng = np.random.default_rng(0)
    chosen = rng.integers(0, len(found.target), count)
    features = (found.data - found.data.mean(0)) / found.data.std(0)
    samples = features[chosen] @ _mixing(rng, features.shape[1]) + rng.normal(0, 1.5, (count, FEATURES))
    return _scaled(samples), found.target[chosen]


def _types(count: int, classes: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Draw profiles around one centre per class, with noise."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, classes, count)
    hidden = rng.normal(0, 1, (classes, 12))[labels] + rng.normal(0, 0.7, (count, 12))
    return _scaled(hidden @ _mixing(rng, 12) + rng.normal(0, 1.0, (count, FEATURES))), labels


def _mixing(rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    """Spread features over neighbours, as genes of one pathway vary together: (count, 600)."""
    weights, window = rng.normal(0, 1, (count, FEATURES)), np.hanning(20)
    return np.stack([np.convolve(row, window / np.linalg.norm(window), mode="same") for row in weights])


def _scaled(samples: NDArray[np.float64]) -> NDArray[np.float32]:
    """Scale by the greatest magnitude, as CANDLE does."""
    return (samples / np.abs(samples).max(0)).astype(np.float32)
