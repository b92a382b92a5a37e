"""The rule for sizes that come from outside: from a file, from another machine, from Redis.

Rules
- What is read may take `FACTOR` times the bytes that it is read from, and `SPARE_BYTES` beside. Where a size is known
  from elsewhere, such as the manifest, the stated one is compared with that before anything is made of it.
- A stated size is compared as a Python integer, before memory is asked for: nobody sees a bare MemoryError.
- What is beyond is a `CorruptDataError`, which says what was stated, and what there is.
"""

from __future__ import annotations

from ..errors import CorruptDataError

FACTOR = 10
SPARE_BYTES = 64 << 20


def allowed(nbytes: int) -> int:
    """Return how many bytes of memory may come of so many bytes that are read.

    >>> allowed(0) == SPARE_BYTES, allowed(100) - allowed(0)
    (True, 1000)
    """
    return FACTOR * nbytes + SPARE_BYTES


def within(found: int, limit: int, what: str) -> int:
    """Return a stated number of bytes, if it is from 0 to a limit.

    Raises:
        CorruptDataError: it is not.

    >>> within(1 << 40, allowed(100), "m.arrow: its columns")
    Traceback (most recent call last):
    tensorvine.store.errors.CorruptDataError: m.arrow: its columns: expected at most 67109864 bytes; found 1099511627776
    """
    if not 0 <= found <= limit:
        raise CorruptDataError(f"{what}: expected at most {limit} bytes; found {found}")
    return found
