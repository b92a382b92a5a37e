"""Checking what is stored: `Repository.verify`.

Rules
- Everything is read again: nothing that a client keeps is believed.
- A problem is reported, not raised, so that one damaged file does not hide another. So are the files that a start could
  not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...store.errors import ModelLostError, ModelNotFoundError, MovedError, OperationTimeoutError, TensorVineError
from ...store.refs import ModelRef
from ...store.segments.segment import SegmentId
from ...store.versions.manifest import TensorEntry, decode_body
from ...store.waiting import Backoff, Deadline
from ..rpc.catalog_calls import CatalogCalls
from ..rpc.catalog_messages import Located, UnreadFile
from ..shard.calls import ShardCalls
from .lineage import Lineage
from .session import Session

AGAIN_S = (0.05, 1.0)
"""Shortest and longest pause before the catalog is asked again where segments are."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem with a version, or with a file that the repository stores on disk."""

    ref: ModelRef | None
    """The affected version. None if the problem is in a file whose name does not identify a version."""
    text: str
    """Description of the problem: the file or tensor, the expected value and the value found."""

    def __str__(self) -> str:
        """Return the problem as a sentence.

        >>> str(Problem(ModelRef("m", 1), "tensor 'w' is missing"))
        "m@1: tensor 'w' is missing"
        """
        return f"{self.ref}: {self.text}" if self.ref is not None else self.text


class Verifier:
    """Checks versions of one repository, for one client."""

    def __init__(self, session: Session, lineage: Lineage) -> None:
        self._session = session
        self._lineage = lineage

    def unreadable(self) -> list[UnreadFile]:
        """List the files that no start could read, sorted."""
        return sorted(self._session.ask(CatalogCalls.unreadable()), key=lambda unread: unread.file)

    def unread(self, ref: ModelRef | None = None) -> list[Problem]:
        """Say of a version, or of all files, that a start could not read it."""
        return [Problem(file.ref, file.reason) for file in self.unreadable() if ref is None or file.ref == ref]

    def check(self, ref: ModelRef, timeout: float) -> list[Problem]:
        """Check a version's manifest, owners and tensors; a version that is retired meanwhile has no problems."""
        try:
            texts = self._checked(ref, Deadline.after(timeout))
        except ModelNotFoundError:
            return []
        except TensorVineError as exc:
            texts = [str(exc)]
        return [Problem(ref, text) for text in texts]

    def _checked(self, ref: ModelRef, deadline: Deadline) -> list[str]:
        session, pauses, what = self._session, Backoff(*AGAIN_S), f"verify of {ref}"
        while True:
            left = deadline.left_for(what)
            located = session.ask(CatalogCalls.locate(session.client, ref.name, ref.version, None), left)
            table = decode_body(located.body or b"", ref)
            texts = self._owners(ref, table)
            if session.path is not None:
                texts += session.ask(CatalogCalls.check_manifest(session.client, ref), deadline.left_for(what))
            try:
                return texts + self._tensors(table, located, deadline.left_for(what))
            except (ModelLostError, MovedError) as exc:  # they are elsewhere by now
                if not pauses.wait(deadline):
                    raise OperationTimeoutError(f"{what}: expected its tensors to stay where they are; {exc}") from exc

    def _owners(self, ref: ModelRef, table: Mapping[str, TensorEntry]) -> list[str]:
        """Whoever wrote a tensor must be an ancestor, as far as these can be read."""
        line = set(self._lineage.to_root(ref))
        others = [entry.owner for entry in table.values() if entry.owner is not None and entry.owner not in line]
        if others and line & {file.ref for file in self.unreadable()}:
            return []
        return [
            f"tensor {name!r}: expected an owner in its lineage; found {entry.owner}"
            for name, entry in table.items()
            if entry.owner is not None and entry.owner not in line
        ]

    def _tensors(self, table: Mapping[str, TensorEntry], located: Located, timeout: float) -> list[str]:
        names: dict[int, dict[SegmentId, dict[int, str]]] = {}
        lost: list[str] = []
        for name, entry in table.items():
            if entry.segment not in located.places:
                lost.append(f"tensor {name!r}: expected its bytes in memory or in a file; they are lost")
                continue
            shard, _ = located.places[entry.segment]
            names.setdefault(shard, {}).setdefault(entry.segment, {})[entry.slot] = name
        requests = {shard: ShardCalls.check_tensors(part) for shard, part in names.items()}
        return lost + [text for texts in self._session.call_each(requests, timeout) for text in texts]
