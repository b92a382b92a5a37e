"""The instrument: diffraction patterns of photographs, measured place after place (ptychography).

Rules
- Nothing is downloaded: the objects are made of scikit-learn's two sample images.
- Everything follows from the seed and the number of the pattern: whoever asks for pattern 1234 gets the same one, in
  whatever process and however often.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

SIDE = 64
"""Pixels along a pattern, and along the patch of the object that it shows."""
STEP = 8
"""Pixels from one place of a scan to the next, along lines and between them."""
SKIP = 47
"""Places from one pattern to the next, in an interlaced scan: 16 patterns already see all of the object, coarsely."""
CUTS = (np.s_[20:300, 64:344], np.s_[80:360, 166:446])
"""Where in the sample images, a pagoda and a dahlia, there is something to see: 280 x 280 pixels."""
BLUR = 3.0
"""Of the images, in pixels: nothing in an object is finer than what the light can show."""
DARKEST = np.float32(0.3)
"""Amplitude behind a black pixel; behind a white one it is 1."""
PHASE = np.float32(np.pi)
"""Phase, in radians, between a black pixel and a white one."""
SAMPLES = ((0, 1, 1), (1, 0, -1), (0, 1, -1), (1, 0, 1))
"""The objects in turn: which image is the amplitude, which the phase; -1: a negative, where black is white."""
WAIST = 36.0
"""Pixels from the middle of the probe to where its amplitude is 1/e."""
FLUX = 400.0
"""Photons that fall on a pixel in the middle of the probe while one pattern is measured."""
SCALE = np.float32(20)
"""The square root of the photons counted is divided by this, for the network."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Patterns, and what lay there in truth: three arrays (N, 64, 64, 1) float32."""

    patterns: NDArray[np.float32]
    """Square roots of the photons counted, over SCALE; light that went straight on is in the middle."""
    amplitudes: NDArray[np.float32]
    """0 to 1."""
    phases: NDArray[np.float32]
    """In radians, less their mean over the patch: no pattern tells what that mean is."""


@dataclass(frozen=True, slots=True)
class Instrument:
    """Scans one object after another.

    >>> found = Instrument(seed=1, scans_per_sample=2).measure(0, 3)
    >>> found.patterns.shape, found.patterns.dtype
    ((3, 64, 64, 1), dtype('float32'))
    """

    seed: int
    """Where the photons are drawn from."""
    scans_per_sample: int
    """Scans until the object is exchanged for the next one: then the data drift."""

    @property
    def scan(self) -> int:
        """Return how many patterns one scan of an object has."""
        return _along() ** 2

    def sample(self, number: int) -> int:
        """Return which object pattern `number` is of: 0 for the first, counting up at each exchange."""
        return number // (self.scan * self.scans_per_sample)

    def measure(self, first: int, count: int) -> Measured:
        """Measure patterns `first` to `first + count - 1`."""
        numbers = range(first, first + count)
        amplitudes, phases = (np.stack(patches) for patches in zip(*map(self._patch, numbers), strict=True))
        expected = intensity(amplitudes, phases)
        drawn = [
            np.random.default_rng([self.seed, n]).poisson(photons) for n, photons in zip(numbers, expected, strict=True)
        ]
        patterns = np.sqrt(np.stack(drawn), dtype=np.float32) / SCALE
        return Measured(patterns[..., None], amplitudes[..., None], phases[..., None])

    def _patch(self, number: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return amplitude and phase where pattern `number` is measured. Every second line is scanned backwards."""
        row, column = divmod(number * SKIP % self.scan, _along())
        top, left = row * STEP, (_along() - 1 - column if row % 2 else column) * STEP
        place = np.s_[top : top + SIDE, left : left + SIDE]
        amplitude, phase, sign = SAMPLES[self.sample(number) % len(SAMPLES)]
        images = photographs() if sign > 0 else 1 - photographs()
        angles = PHASE * images[phase][place]
        return DARKEST + (1 - DARKEST) * images[amplitude][place], angles - angles.mean()


def probe() -> NDArray[np.complex128]:
    """Return the light that falls on the object: (64, 64), a Gaussian of amplitude 1 in the middle.

    It is out of focus: its wave front is bent so far that light of the patch's edge falls on the detector's edge.
    So a pattern is a blurred shadow with fringes, from which a small network learns in minutes.
    """
    across = (np.arange(SIDE) - SIDE / 2) ** 2
    squares = across[:, None] + across
    return np.exp(-squares / WAIST**2 + 1j * np.pi / SIDE * squares)


def intensity(amplitudes: NDArray[np.float32], phases: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the photons to expect at each pixel of the detector: |FFT(probe * object)|^2, (N, 64, 64).

    In all they are as many as leave the object: the transform keeps energy.

    Args:
        amplitudes: (N, 64, 64).
        phases: (N, 64, 64), in radians.
    """
    behind = probe() * amplitudes * np.exp(1j * phases)
    return FLUX * np.abs(np.fft.fftshift(np.fft.fft2(behind, norm="ortho"), axes=(-2, -1))) ** 2


@cache
def photographs() -> NDArray[np.float32]:
    """Return the middle of scikit-learn's two sample images in grey, blurred: (2, 280, 280), 0 to 1."""
    from scipy.ndimage import gaussian_filter
    from sklearn.datasets import load_sample_images

    images = zip(load_sample_images().images, CUTS, strict=True)
    grey = np.stack([image[cut].mean(-1, dtype=np.float32) / np.float32(255) for image, cut in images])
    return gaussian_filter(grey, (0, BLUR, BLUR))


def _along() -> int:
    """Return how many places a line of the scan has, and how many lines there are."""
    return (photographs().shape[-1] - SIDE) // STEP + 1
