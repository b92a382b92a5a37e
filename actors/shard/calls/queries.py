"""What is asked of a shard about its models, and not about their bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ....store.graphs.index import PrefixQuery
from ....store.holders import Lease, Query
from ....store.refs import ModelRef
from ....store.shard import ShardStats, UnreadFile
from ....store.versions.manifest import Header, HeaderRow
from ...rpc.calls import remote
from ...rpc.messages import Matches


class QueryCalls:
    """Answered by `shard.parts.queries`."""

    @remote("ctl", repeatable=True)
    def header(self, client: str, name: str, version: int | None) -> Header:
        """Return what is known of a version without its table."""
        ...

    @remote("ctl", repeatable=True)
    def body(self, client: str, ref: ModelRef) -> bytes:
        """Return a version's table of tensors."""
        ...

    @remote("ctl", repeatable=True)
    def architecture(self, client: str, ref: ModelRef, key: bytes) -> tuple[str, str | None]:
        """Return the graph's JSON text of a version, and the framework's recipe for it."""
        ...

    @remote("ctl", repeatable=True)
    def chain(self, ref: ModelRef) -> list[ModelRef]:
        """Return a version and its ancestors, as far as this shard knows."""
        ...

    @remote("ctl", repeatable=True)
    def qualities(self, name: str, versions: Sequence[int]) -> dict[ModelRef, float]:
        """Return the qualities of versions of a name, retired ones included."""
        ...

    @remote("watch", repeatable=True)
    def wait_newer(self, name: str, after: int, timeout: float) -> ModelRef | None:
        """Answer as soon as `name` has a version above `after`; None when none came in time."""
        ...

    @remote("ctl", repeatable=True)
    def models(self, prefix: str) -> list[ModelRef]:
        """List live versions."""
        ...

    @remote("ctl", repeatable=True)
    def headers(self, prefix: str, after_ns: int) -> list[HeaderRow]:
        """List the headers of live versions that were created after a time (UTC, ns), without metadata."""
        ...

    @remote("ctl", repeatable=True)
    def find(self, pattern: Sequence[Mapping[str, object]], exact: bool) -> list[ModelRef]:
        """List versions whose architecture fits a pattern."""
        ...

    @remote("ctl", repeatable=True)
    def alike(self, query: PrefixQuery) -> list[ModelRef]:
        """List versions of exactly this architecture."""
        ...

    @remote("ctl", repeatable=True)
    def match(self, query: Query, graphs: Sequence[PrefixQuery], places: bool) -> Matches:
        """Answer a prefix query: for each graph a match and its pin, and the graphs, as JSON, of the models found.

        With `places` the answer to the load that follows is given, too, as far as it can be without reading from disk.
        """
        ...

    @remote("ctl", repeatable=True)
    def pin(self, lease: Lease, ref: ModelRef) -> None:
        """Pin a live version again whose pin went with the client's session.

        Raises:
            ModelNotFoundError, ModelLostError: there is no such live version.
        """
        ...

    @remote("ctl", repeatable=True)
    def unpin(self, leases: Sequence[Lease]) -> None:
        """Let pins go."""
        ...

    @remote("ctl", repeatable=True)
    def offspring(self, refs: Sequence[ModelRef]) -> list[tuple[ModelRef, bool]]:
        """Return descendants, as far as this shard knows, and whether each lives."""
        ...

    @remote("ctl", repeatable=True)
    def stats(self) -> ShardStats:
        """Sum up what is here."""
        ...

    @remote("ctl", repeatable=True)
    def unreadable(self) -> list[UnreadFile]:
        """List what could not be read on the path when the shard started, of all homes."""
        ...

    @remote("ctl", repeatable=True)
    def check(self) -> None:
        """Derive all counts anew and compare."""
        ...
