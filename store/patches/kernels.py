"""The hot loops of patches: compiled by Numba where it is installed, NumPy otherwise.

Rules
- Both give the same bits. Finding 5% of changed words takes Numba half of NumPy's time, applying them a third.
- Numba compiles in a thread of its own, for about a second, and NumPy works meanwhile: a first patch must not wait
  longer for the compiler than for the link. Compiled loops release the GIL.
- No value in a patch leads a loop out of bounds.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import lru_cache
from types import ModuleType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..arrays import Array
from .format import Words

log = logging.getLogger(__name__)

Places = NDArray[np.uint32]
SPAN = 1 << 17
"""Words that NumPy compares at once: the result stays in the cache."""
COMPILES_FROM = 1 << 20
"""Fewer words are no reason to load Numba."""


class _Loops(NamedTuple):
    """The compiled loops for words of one size."""

    find: Callable[[Words, Words, Words, Words, Places], int]
    put: dict[int, Callable[[Words, Words, Words, bool], bool]]
    """By the bytes of a gap."""


def changed_words(new: Words, old: Words) -> Places:
    """Return the positions of the words that differ, in rising order.

    Args:
        new: fewer than 2**32 words.
        old: as many words of the same size.

    >>> changed_words(np.array([1, 2, 3], np.uint16), np.array([1, 0, 0], np.uint16)).tolist()
    [1, 2]
    """
    loops = _loops(new)
    if loops is None:
        spans = range(0, len(new), SPAN)
        found = [np.flatnonzero(new[at : at + SPAN] != old[at : at + SPAN]) + at for at in spans]
        return np.concatenate(found).astype(np.uint32) if found else np.empty(0, np.uint32)
    new, old = (each if each.ctypes.data % 8 == 0 else each.copy() for each in (new, old))
    whole = new.nbytes // 8 * 8 // new.itemsize
    eights = new[:whole].view("u8"), old[:whole].view("u8")
    places = np.empty(len(new) + 1, np.uint32)  # each word is noted, and stays noted if it differs
    return places[: loops.find(new, old, *eights, places)].copy()


def put_at_gaps(gaps: Words, values: Words, out: Words, xor: bool) -> bool:
    """Write values at the positions that gaps give.

    Args:
        gaps: before each value, the words to skip.
        values: as many words.
        out: the block.
        xor: combine each value with the word that is there.

    Returns:
        False if the gaps lead beyond the end. Then `out` may be written in part.

    >>> out = np.array([1, 2, 3], np.uint8)
    >>> put_at_gaps(np.array([0, 1], np.uint8), np.array([8, 9], np.uint8), out, False), out.tolist()
    (True, [8, 2, 9])
    """
    loops = _loops(out)
    if loops is not None:
        return loops.put[gaps.itemsize](gaps, values, out, xor)
    places = np.cumsum(gaps.astype(np.int64) + 1) - 1
    if len(places) and int(places[-1]) >= len(out):
        return False
    out[places] = values ^ out[places] if xor else values
    return True


def wait_until_compiled(word: int, timeout: float) -> bool:
    """Wait for the loops for words of `word` bytes, as a benchmark does. Returns False without Numba."""
    return _compiling(word).result(timeout) is not None


def _loops(block: Words) -> _Loops | None:
    """Return the compiled loops if they are there; of long blocks, have them compiled."""
    if len(block) < COMPILES_FROM:
        return None
    future = _compiling(block.itemsize)
    return future.result() if future.done() else None


@lru_cache(maxsize=4)
def _compiling(word: int) -> Future[_Loops | None]:
    future: Future[_Loops | None] = Future()

    def compile_all() -> None:
        try:
            future.set_result(_compiled(word))
        except Exception as exc:  # noqa: BLE001  Numba's errors are its own
            log.warning("patches: expected Numba to compile; %s. NumPy is used, which takes two to three times", exc)
            future.set_result(None)

    threading.Thread(target=compile_all, name="tensorvine-compile", daemon=True).start()
    return future


@lru_cache(maxsize=1)
def _numba() -> ModuleType | None:
    try:
        import numba
    except ImportError as exc:
        log.info("Numba is not available (%s): patches use NumPy, which takes two to three times as long", exc)
        return None
    return numba


def _compiled(word: int) -> _Loops | None:
    numba = _numba()
    if numba is None:
        return None
    types = numba.types

    def array(size: int, written: bool = False) -> object:
        return types.Array(getattr(types, f"uint{8 * size}"), 1, "C", readonly=not written)

    pairs = array(word), array(word), array(8), array(8)
    find = numba.njit(types.int64(*pairs, array(4, True)), nogil=True)(_finder(8 // word))
    put = {
        size: numba.njit(types.boolean(array(size), array(word), array(word, True), types.boolean), nogil=True)(_put)
        for size in (1, 2, 4)
    }
    return _Loops(find, put)


def _finder(per: int) -> Callable[[Array, Array, Array, Array, Array], int]:
    """Return the loop for words of which eight bytes hold `per`. Numba unrolls a loop of known length."""

    def find(new: Array, old: Array, new_eights: Array, old_eights: Array, places: Array) -> int:
        count = 0
        for eight in range(len(new_eights)):
            if new_eights[eight] != old_eights[eight]:
                for each in range(eight * per, eight * per + per):  # without a branch
                    places[count] = each
                    count += 1 if new[each] != old[each] else 0
        for each in range(len(new_eights) * per, len(new)):
            places[count] = each
            count += 1 if new[each] != old[each] else 0
        return count

    return find


def _put(gaps: Array, values: Array, out: Array, xor: bool) -> bool:
    at = np.int64(-1)
    for each in range(len(values)):
        at += np.int64(gaps[each]) + 1
        if at >= len(out):
            return False
        out[at] = out[at] ^ values[each] if xor else values[each]
    return True
