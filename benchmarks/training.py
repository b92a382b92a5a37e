"""Three small trainings on data that every machine has: a residual network, PtychoNN and word vectors.

Rules
- Nothing is downloaded: scikit-learn's digits and sample images, and the topics that Python's `pydoc` brings.
- Everything follows from the recipe's seed; the caller's random state is left alone.
- Runs on the CPU, in PyTorch. A network is built as its paper gives it; only widths and steps are smaller.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from .measure import Tensors

if TYPE_CHECKING:
    from torch import Tensor, nn

Task = Literal["resnet", "ptychonn", "words"]

SIDE = 64
"""Pixels along a diffraction pattern, as in PtychoNN."""
PHOTONS = 1e5
"""Expected photons of one diffraction pattern."""
NEGATIVES = 5
LONGEST_GRAM = 6


@dataclass(frozen=True)
class Recipe:
    """All that a training follows from."""

    task: Task
    """Which network, and which data."""
    width: int
    """Channels of the first convolution, or values of a word vector."""
    steps: int
    """Batches that the training takes."""
    batch: int
    """Examples of a batch."""
    rate: float
    """Learning rate."""
    seed: int = 0
    """Where weights and batches are drawn from."""


class Training(ABC):
    """A network, its optimizer and an endless stream of batches."""

    frozen: tuple[str, ...]
    """What the names of the parameters begin with that fine-tuning leaves alone."""

    def __init__(self, recipe: Recipe) -> None:
        import torch

        self.recipe = recipe
        self._still: list[nn.Module] = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            self.model = self._network()
        self.optimizer = self._optimizer()
        self._batches = self._stream(np.random.default_rng(recipe.seed), first=True)

    def step(self) -> float:
        """Train on one batch; gives its loss."""
        self.model.train()
        for module in self._still:
            module.eval()  # or its running means would go on
        self.optimizer.zero_grad()
        loss = self._loss(next(self._batches))
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def fine_tune(self) -> None:
        """Go on with the other half of the data and with the first layers frozen."""
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(not name.startswith(self.frozen))
        self._still = [module for name, module in self.model.named_modules() if name.startswith(self.frozen)]
        self._batches = self._stream(np.random.default_rng(self.recipe.seed + 1), first=False)

    def weights(self) -> Tensors:
        """Return what `state_dict` has as arrays that share its memory."""
        return {name: value.detach().numpy() for name, value in self.model.state_dict().items()}

    def optimizer_state(self) -> Tensors:
        """Return the optimizer's tensors as arrays that share its memory, named `optimizer/KIND/PARAMETER`."""
        import torch

        return {
            f"optimizer/{kind}/{name}": value.detach().numpy()
            for name, parameter in self.model.named_parameters()
            for kind, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor)
        }

    @abstractmethod
    def score(self) -> float:
        """Say how good the network is on data of its own task; larger is better."""

    @abstractmethod
    def _network(self) -> nn.Module: ...

    @abstractmethod
    def _optimizer(self) -> Any: ...

    @abstractmethod
    def _stream(self, rng: np.random.Generator, *, first: bool) -> Iterator[Any]: ...

    @abstractmethod
    def _loss(self, batch: Any) -> Tensor: ...


def training(recipe: Recipe) -> Training:
    """Set a training up; no step is taken yet.

    >>> run = training(Recipe("resnet", width=4, steps=2, batch=8, rate=0.05))
    >>> losses = [run.step() for _ in range(2)]
    >>> run.weights()["stem.0.weight"].shape
    (4, 3, 3, 3)
    """
    return {"resnet": ResNet, "ptychonn": PtychoNN, "words": Words}[recipe.task](recipe)


class ResNet(Training):
    """A residual network of 18 layers that reads digits on patches of photographs; 11.2 M parameters at width 64.

    He et al., *Deep residual learning* (2016), with the stem that small images call for: 3x3, no pooling.
    Momentum is stored beside the weights: it is the gradients that Check-QZP's checkpoints hold, smoothed.
    """

    frozen = ("stem", "stages.0", "stages.1")

    def score(self) -> float:
        """Return the share of digits that are read correctly, all ten of them."""
        import torch

        self.model.eval()
        images, labels = _digits(np.random.default_rng(99), 500, classes=range(10))
        with torch.no_grad():
            return (self.model(images).argmax(1) == labels).float().mean().item()

    def _network(self) -> nn.Module:
        return _residual_network(self.recipe.width)

    def _optimizer(self) -> Any:
        from torch.optim import SGD

        return SGD(self.model.parameters(), self.recipe.rate, momentum=0.9, weight_decay=5e-4)

    def _stream(self, rng: np.random.Generator, *, first: bool) -> Iterator[Any]:
        while True:
            yield _digits(rng, self.recipe.batch, classes=range(10) if first else range(5, 10))

    def _loss(self, batch: Any) -> Tensor:
        from torch.nn.functional import cross_entropy

        images, labels = batch
        return cross_entropy(self.model(images), labels)


class PtychoNN(Training):
    """PtychoNN: a diffraction pattern to amplitude and phase; 1,154,210 parameters at width 32.

    Cherukara et al., *AI-enabled high-resolution scanning coherent diffraction imaging* (2020). One sample
    image is the object's amplitude and the other its phase; fine-tuning exchanges them.
    """

    frozen = ("encoder",)

    def score(self) -> float:
        """Return the negative mean absolute error on the object that is scanned first."""
        import torch

        self.model.eval()
        with torch.no_grad():
            return -self._loss(_diffraction(np.random.default_rng(99), 32, exchanged=False)).item()

    def _network(self) -> nn.Module:
        return _ptychonn(self.recipe.width)

    def _optimizer(self) -> Any:
        from torch.optim import Adam

        return Adam(self.model.parameters(), self.recipe.rate)

    def _stream(self, rng: np.random.Generator, *, first: bool) -> Iterator[Any]:
        while True:
            yield _diffraction(rng, self.recipe.batch, exchanged=not first)

    def _loss(self, batch: Any) -> Tensor:
        from torch.nn.functional import l1_loss

        pattern, amplitude, phase = batch
        found = self.model(pattern)
        return l1_loss(found[:, :1], amplitude) + l1_loss(found[:, 1:], phase)


class Words(Training):
    """Word vectors from character n-grams: a large table of which a step changes few rows.

    Bojanowski et al., *Enriching word vectors with subword information* (2017): skip-gram with negative
    samples. The training reads nine tenths of the text, fine-tuning the last tenth.
    """

    frozen = ("context",)
    rows = 1 << 17
    """Rows that n-grams are hashed to."""

    def score(self) -> float:
        """Return the negative loss on the first part of the text."""
        import torch

        with torch.no_grad():
            return -self._loss(next(self._stream(np.random.default_rng(99), first=True))).item()

    def _network(self) -> nn.Module:
        from torch import nn

        model = nn.Module()
        model.grams = nn.EmbeddingBag(self.rows, self.recipe.width, mode="mean", sparse=True)
        model.context = nn.Embedding(len(_text()[1]), self.recipe.width, sparse=True)
        nn.init.uniform_(model.grams.weight, -1 / self.recipe.width, 1 / self.recipe.width)
        nn.init.zeros_(model.context.weight)
        return model

    def _optimizer(self) -> Any:
        from torch.optim import SparseAdam

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
        import torch
        from torch.nn.functional import logsigmoid

        grams, contexts = batch
        offsets = np.cumsum([0, *(len(rows) for rows in grams[:-1])])
        model: Any = self.model
        vectors = model.grams(torch.from_numpy(np.concatenate(grams)), torch.from_numpy(offsets))
        scores = (model.context(torch.from_numpy(contexts)) @ vectors[:, :, None])[:, :, 0]
        return -(logsigmoid(scores[:, 0]) + logsigmoid(-scores[:, 1:]).sum(1)).mean()


# ---- networks -------------------------------------------------------------------------------------------


def _residual_network(width: int) -> nn.Module:
    from torch import nn

    class Block(nn.Module):
        def __init__(self, inside: int, outside: int, stride: int) -> None:
            super().__init__()
            self.body = nn.Sequential(
                *(_conv(inside, outside, stride), nn.BatchNorm2d(outside), nn.ReLU()),
                *(_conv(outside, outside), nn.BatchNorm2d(outside)),
            )
            self.skip = nn.Sequential()
            if inside != outside:
                self.skip = nn.Sequential(_conv(inside, outside, stride, size=1), nn.BatchNorm2d(outside))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.relu(self.body(x) + self.skip(x))

    widths = [width << stage for stage in range(4)]
    stages = [
        nn.Sequential(Block(inside, outside, stride=1 if inside == outside else 2), Block(outside, outside, 1))
        for inside, outside in zip([width, *widths], widths, strict=False)
    ]
    model = nn.Sequential()
    model.add_module("stem", nn.Sequential(_conv(3, width), nn.BatchNorm2d(width), nn.ReLU()))
    model.add_module("stages", nn.Sequential(*stages))
    model.add_module("pool", nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    model.add_module("head", nn.Linear(widths[-1], 10))
    return model


def _conv(inside: int, outside: int, stride: int = 1, *, size: int = 3) -> nn.Module:
    from torch import nn

    return nn.Conv2d(inside, outside, size, stride, padding=size // 2, bias=False)


def _ptychonn(width: int) -> nn.Module:
    import torch
    from torch import nn

    def pairs(widths: list[int], after: type[nn.Module], options: dict[str, int]) -> list[nn.Module]:
        """Make two convolutions per width, and what follows them."""
        made: list[nn.Module] = []
        for inside, outside in pairwise(widths):
            for channels in (inside, outside):
                made += [nn.Conv2d(channels, outside, 3, padding=1), nn.ReLU()]
            made.append(after(**options))
        return made

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(*pairs([1, width, 2 * width, 4 * width], nn.MaxPool2d, {"kernel_size": 2}))
            self.amplitude, self.phase = (
                nn.Sequential(
                    *pairs([4 * width, 4 * width, 2 * width, width], nn.Upsample, {"scale_factor": 2}),
                    nn.Conv2d(width, 1, 3, padding=1),
                )
                for _ in range(2)
            )

        def forward(self, x: Tensor) -> Tensor:
            inside = self.encoder(x)
            return torch.cat([self.amplitude(inside).sigmoid(), torch.pi * self.phase(inside).tanh()], 1)

    made = Net()
    for parameter in made.parameters():  # as in Keras, which PtychoNN was written in
        if parameter.ndim > 1:
            nn.init.xavier_uniform_(parameter)
        else:
            nn.init.zeros_(parameter)
    return made


# ---- data -----------------------------------------------------------------------------------------------


@cache
def _photographs() -> NDArray[np.float32]:
    """Return scikit-learn's two sample images: (2, 427, 640, 3), 0 to 1."""
    from sklearn.datasets import load_sample_images

    return np.stack(load_sample_images().images).astype(np.float32) / np.float32(255)


@cache
def _handwriting() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return scikit-learn's digits: (1797, 8, 8), 0 to 1, and their labels."""
    from sklearn.datasets import load_digits

    found: Any = load_digits()
    return found.images.astype(np.float32) / 16, found.target


def _digits(rng: np.random.Generator, count: int, *, classes: range) -> tuple[Tensor, Tensor]:
    """Draw digits, each subtracted from a patch of a photograph: (count, 3, 8, 8) float32, and their labels."""
    import torch

    pictures, labels = _handwriting()
    chosen = rng.choice(np.flatnonzero((labels >= classes.start) & (labels < classes.stop)), count)
    photographs = _photographs()
    rows, columns = rng.integers(0, 427 - 8, count), rng.integers(0, 640 - 8, count)
    patches = np.stack(
        [photographs[place % 2, r : r + 8, c : c + 8] for place, (r, c) in enumerate(zip(rows, columns, strict=True))]
    )
    digits = pictures[chosen, :, :, None]
    images = np.abs(digits - 0.5 * patches).transpose(0, 3, 1, 2)
    return torch.from_numpy(np.ascontiguousarray(images)), torch.from_numpy(labels[chosen])


def _diffraction(rng: np.random.Generator, count: int, *, exchanged: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Scan an object at random places: patterns, amplitudes (0 to 1) and phases (-pi to pi), (count, 1, 64, 64).

    A pattern is the square root of the photons counted: |FFT(probe * object)|^2, with Poisson noise.
    """
    import torch

    grey = _photographs().mean(-1)
    amplitude, phase = grey[::-1] if exchanged else grey
    across = np.linspace(-1, 1, SIDE)
    probe = np.exp(-(across**2) / 0.3)[:, None] * np.exp(-(across**2) / 0.3)
    places = [
        (slice(r, r + SIDE), slice(c, c + SIDE)) for r, c in rng.integers(0, (427 - SIDE, 640 - SIDE), (count, 2))
    ]
    amplitudes = np.stack([amplitude[place] for place in places])
    phases = np.stack([np.pi * (2 * phase[place] - 1) for place in places])
    intensity = np.abs(np.fft.fftshift(np.fft.fft2(probe * amplitudes * np.exp(1j * phases)), axes=(1, 2))) ** 2
    counts = rng.poisson(intensity * (PHOTONS / intensity.sum(axis=(1, 2), keepdims=True)))
    patterns = np.sqrt(counts) / 10
    pattern, amplitude, phase = (
        torch.from_numpy(array[:, None].astype(np.float32)) for array in (patterns, amplitudes, phases)
    )
    return pattern, amplitude, phase


@cache
def _text() -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Return the words of Python's `pydoc` topics as numbers, and the vocabulary that they count in."""
    import re
    from pydoc_data.topics import topics

    words = re.findall(r"[a-z]+", " ".join(topics[name] for name in sorted(topics)).lower())
    vocabulary = tuple(sorted(Counter(words)))
    number = {word: place for place, word in enumerate(vocabulary)}
    return np.array([number[word] for word in words]), vocabulary


def _grams(word: str, rows: int) -> NDArray[np.int64]:
    """Return the rows of a word and of its pieces of three to six characters."""
    import xxhash

    padded = f"<{word}>"
    pieces = {padded} | {
        padded[start : start + length]
        for length in range(3, LONGEST_GRAM + 1)
        for start in range(len(padded) - length + 1)
    }
    return np.array(sorted(xxhash.xxh32_intdigest(piece.encode()) % rows for piece in pieces))
