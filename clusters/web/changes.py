"""Changes by viewers: retire a version, and scale. The confirmation of each names the version or the numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...actors.client.repository import Repository
from ...store.errors import OptionError
from ...store.refs import ModelRef

MOST_SHARDS = 10_000


def goes(repository: Repository, ref: ModelRef, consumers: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Return the bytes and tensors that a retirement would free, and the descendants and consumers of the version."""
    info, owners = repository.info(ref), repository.owners(ref)
    return {
        "ref": str(ref),
        "confirm": str(ref),
        "bytes_owned": info.bytes_owned,
        "tensors_owned": sum(owner == ref for owner in owners.values()),
        "descendants": len(repository.descendants(ref)),
        "consumers": [consumer["consumer"] for consumer in consumers if consumer.get("ref") == str(ref)],
    }


def retire(repository: Repository, asked: Mapping[str, object]) -> dict[str, object]:
    """Retire a version.

    Raises:
        OptionError: if the confirmation does not name the version.
        ModelNotFoundError: if the version is not live.
    """
    ref = ModelRef.parse(str(asked.get("ref", "")))
    _confirmed(asked, str(ref))
    repository.retire(ref)
    return {"retired": str(ref)}


def scale(repository: Repository, asked: Mapping[str, object]) -> dict[str, object]:
    """Change the number of shards.

    Raises:
        OptionError: if the number is invalid, or the confirmation does not name the old and the new number.
        TensorVineError: the errors of `Repository.scale`.
    """
    count = asked.get("shards")
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MOST_SHARDS:
        raise OptionError(f"shards: expected a number from 1 to {MOST_SHARDS}; found {count!r:.40}")
    _confirmed(asked, f"scale from {len(repository.shards)} to {count}")
    report = repository.scale(count)
    return {"shards_before": report.shards_before, "shards_after": report.shards_after, "seconds": report.seconds}


def _confirmed(asked: Mapping[str, object], text: str) -> None:
    if asked.get("confirm") != text:
        raise OptionError(f"confirm: expected {text!r}; found {asked.get('confirm')!r:.300}")
