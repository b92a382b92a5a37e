"""The simulated instrument: diffraction patterns of photographs, measured place after place (ptychography).

The objects are made of scikit-learn's two sample images. A pattern depends on the seed and its number only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

Images = NDArray[np.float32]
SIDE, STEP, SKIP = 64, 8, 47
"""Pixels of a side of a pattern and between two places of a scan, and places from one pattern to the next."""
CUTS = (np.s_[20:300, 64:344], np.s_[80:360, 166:446])
"""Parts of the sample images, a pagoda and a dahlia, with 280 x 280 pixels."""
BLUR, DARKEST, PHASE = 3.0, np.float32(0.3), np.float32(np.pi)
"""Blur of the images in pixels, amplitude of a black pixel, and phase in radians between black and white."""
SAMPLES = ((0, 1, 1), (1, 0, -1), (0, 1, -1), (1, 0, 1))
"""The objects in turn: the image of the amplitude, that of the phase, and -1 for negatives."""
WAIST, FLUX, SCALE = 36.0, 400.0, np.float32(20)
"""Radius of the probe in pixels, photons on a pixel in its middle, and the divisor of the patterns for the network."""


@dataclass(frozen=True, slots=True)
class Instrument:
    """Scans one object after another.

    >>> patterns, truth = Instrument(seed=1, scans_per_sample=2).measure(0, 3)
    >>> patterns.shape, truth.shape, patterns.dtype
    ((3, 1, 64, 64), (3, 2, 64, 64), dtype('float32'))
    """

    seed: int
    """Of the photons."""
    scans_per_sample: int
    """Scans until the object is exchanged."""

    @property
    def scan(self) -> int:
        """Number of patterns of one scan."""
        return _along() ** 2

    def sample(self, number: int) -> int:
        """Return the number of the object that a pattern shows."""
        return number // (self.scan * self.scans_per_sample)

    def measure(self, first: int, count: int) -> tuple[Images, Images]:
        """Measure `count` patterns, the first of which has the number `first`.

        Returns:
            The patterns (N, 1, 64, 64): square roots of the photons, divided by `SCALE`. The truth (N, 2, 64, 64):
            amplitudes from 0 to 1, and phases in radians less their mean, which no pattern shows.
        """
        numbers = range(first, first + count)
        truth = np.stack([self._patch(number) for number in numbers])
        photons = zip(numbers, intensity(truth[:, 0], truth[:, 1]), strict=True)
        drawn = np.stack([np.random.default_rng([self.seed, number]).poisson(expected) for number, expected in photons])
        return (np.sqrt(drawn, dtype=np.float32) / SCALE)[:, None], truth

    def _patch(self, number: int) -> Images:
        """Return amplitude and phase where a pattern is measured. Every second line is scanned backwards."""
        row, column = divmod(number * SKIP % self.scan, _along())
        top, left = row * STEP, (_along() - 1 - column if row % 2 else column) * STEP
        place = np.s_[top : top + SIDE, left : left + SIDE]
        amplitude, phase, sign = SAMPLES[self.sample(number) % len(SAMPLES)]
        images = photographs() if sign > 0 else 1 - photographs()
        angles = PHASE * images[phase][place]
        return np.stack([DARKEST + (1 - DARKEST) * images[amplitude][place], angles - angles.mean()])


def intensity(amplitudes: Images, phases: Images) -> NDArray[np.float64]:
    """Return the expected photons at each pixel of the detector, |FFT(probe * object)|^2, of shape (N, 64, 64).

    The probe is a Gaussian out of focus: a pattern is a blurred shadow, from which a small network learns in minutes.
    """
    across = (np.arange(SIDE) - SIDE / 2) ** 2
    squares = across[:, None] + across
    probe = np.exp(-squares / WAIST**2 + 1j * np.pi / SIDE * squares)
    behind = probe * amplitudes * np.exp(1j * phases)
    return FLUX * np.abs(np.fft.fftshift(np.fft.fft2(behind, norm="ortho"), axes=(-2, -1))) ** 2


@cache
def photographs() -> Images:
    """Return the middle of scikit-learn's two sample images in grey, blurred: (2, 280, 280), 0 to 1."""
    from scipy.ndimage import gaussian_filter
    from sklearn.datasets import load_sample_images

    images = zip(load_sample_images().images, CUTS, strict=True)
    grey = np.stack([image[cut].mean(-1, dtype=np.float32) / np.float32(255) for image, cut in images])
    return gaussian_filter(grey, (0, BLUR, BLUR))


def _along() -> int:
    """Return the number of lines of a scan, and of places in a line."""
    return (photographs().shape[-1] - SIDE) // STEP + 1
