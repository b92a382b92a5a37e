"""What a catalog knows, in a form that two of them can be compared in."""

from __future__ import annotations

from tensorvine.store.catalog.records import Answers, Began, End, Placed, Record, Written, decoded
from tensorvine.store.catalog.state import CatalogState


def facts(state: CatalogState) -> tuple[int, set[Record | tuple[object, ...]], list[str]]:
    """Return all that a snapshot says, without the order in which it says it, but for that of the write queue."""
    found: set[Record | tuple[object, ...]] = set()
    for one in state.snapshot(b""):
        record = decoded(one) if isinstance(one, bytes) else one
        match record:
            case Placed(segments):
                found.update(segments)
            case Written(refs):
                found.update(("written", ref) for ref in refs)
            case Answers(answers):
                found.update(answers)
            case Began() | End():
                pass
            case _:
                found.add(record)
    return state.sequence, found, list(map(str, state.unwritten))
