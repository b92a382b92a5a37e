"""What the catalog of a repository can be asked, declared for clients, shards, the planner and the catalog.

Rules
- A catalog without its lease answers none of these: they raise `ShardUnavailableError`, and callers repeat them.
- Calls that make a decision answer when it is in the journal, and never before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...planner.topology import Topology
from ...store.catalog.reports import Answered, Report, Sender
from ...store.graphs.index import PrefixQuery
from ...store.holders import Lease, Request
from ...store.refs import ModelRef, Which
from ...store.segments.segment import File, SegmentId
from ...store.versions.manifest import Header, HeaderRow
from .calls import remote
from .catalog_messages import (
    Beginning,
    Begun,
    CatalogStats,
    Committed,
    Declared,
    Located,
    Matches,
    Proposal,
    Refused,
    Renewed,
    Term,
    UnreadFile,
    Welcome,
)


class ClientCalls:
    """Calls of clients. Answered by `catalog.parts.clients` and `catalog.parts.versions`."""

    # ---- sessions and pins ----------------------------------------------------------------------------

    @remote("ctl", repeatable=True)
    def hello(self, client: str, node: str) -> Welcome:
        """Introduce a client."""
        ...

    @remote("ctl", repeatable=True)
    def renew(self, client: str, declared: Declared) -> Renewed:
        """Keep a client's session, and drop the pins of all requests that are over."""
        ...

    @remote("ctl", repeatable=True)
    def goodbye(self, client: str) -> None:
        """End a client's session; the shards with its memory are told."""
        ...

    @remote("ctl", repeatable=True)
    def pin(self, pins: Mapping[Lease, ModelRef]) -> dict[Lease, str]:
        """Pin versions again whose pins went with a term or a session; return why some cannot be."""
        ...

    @remote("ctl", repeatable=True)
    def unpin(self, leases: Sequence[Lease]) -> None:
        """Remove pins; unknown ones are no error."""
        ...

    @remote("ctl", repeatable=True)
    def abort(self, request: Request) -> Committed | None:
        """End a request: its pins go, and it is refused from now on; return the version if it was committed."""
        ...

    # ---- versions -------------------------------------------------------------------------------------

    @remote("ctl", repeatable=True)
    def begin(self, asked: Beginning) -> Begun:
        """Start a save: pin the parent, unless it is optional and there is none.

        Raises:
            ModelNotFoundError, ModelLostError, StorageError, CorruptDataError: the parent is not there.
            OperationTimeoutError: the save is over.
        """
        ...

    @remote("ctl", repeatable=True)
    def locate(self, client: str, name: str, version: Which, known: ModelRef | None) -> Located:
        """Return a version's table, unless it is `known`, and where its segments are.

        Raises:
            ModelNotFoundError, ModelLostError, StorageError, CorruptDataError: it is not there.
        """
        ...

    @remote("ctl", repeatable=True)
    def match(self, query: Request, graphs: Sequence[PrefixQuery], places: bool) -> Matches:
        """Find for each graph the model with the longest common prefix, and pin it.

        Raises:
            OperationTimeoutError: the query is over.
        """
        ...

    @remote("ctl", repeatable=True)
    def retire(self, request: Request, name: str, version: Which) -> ModelRef:
        """Make a version cease to exist. A request that is repeated gets the answer of the first one.

        Raises:
            ModelNotFoundError, ModelLostError, StorageError, CorruptDataError: it is not there.
            OptionError: an alias names it.
        """
        ...

    @remote("ctl", repeatable=True)
    def alias(self, request: Request, name: str, alias: str, version: Which, ends: bool) -> ModelRef | None:
        """Have an alias name a version, or `ends` it; return the version that it names, or named.

        A request that is repeated gets the answer of the first one.

        Raises:
            ModelNotFoundError, ModelLostError, StorageError, CorruptDataError: the version is not there.
            StorageError: the path does not take the alias.
            StoreFullError: there is no memory for another alias.
        """
        ...

    @remote("ctl", repeatable=True)
    def aliases(self, prefix: str) -> dict[str, dict[str, int]]:
        """Return the aliases of the names that begin with a prefix: name -> alias -> version."""
        ...

    @remote("ctl", repeatable=True)
    def header(self, client: str, name: str, version: Which) -> Header:
        """Return what is known of a version without its table; errors as in `locate`."""
        ...

    @remote("ctl", repeatable=True)
    def architecture(self, client: str, ref: ModelRef, key: bytes) -> tuple[str, str | None]:
        """Return a graph's JSON text and the framework's recipe for it; `ref` has or had it."""
        ...

    @remote("ctl", repeatable=True)
    def chain(self, ref: ModelRef) -> list[ModelRef]:
        """Return a version, its parent, and so on to the root, retired ones included."""
        ...

    @remote("ctl", repeatable=True)
    def offspring(self, ref: ModelRef) -> list[ModelRef]:
        """Return all live versions that derive from one, sorted."""
        ...

    @remote("ctl", repeatable=True)
    def qualities(self, refs: Sequence[ModelRef]) -> dict[ModelRef, float]:
        """Return the qualities of those that had one, retired ones included."""
        ...

    @remote("ctl", repeatable=True)
    def models(self, prefix: str) -> list[ModelRef]:
        """List live versions, sorted."""
        ...

    @remote("ctl", repeatable=True)
    def headers(self, prefix: str, after_ns: int) -> list[HeaderRow]:
        """List the headers of live versions that were created after a time (UTC, ns), without metadata."""
        ...

    @remote("ctl", repeatable=True)
    def find(self, pattern: Sequence[Mapping[str, object]], exact: bool) -> list[ModelRef]:
        """List live versions whose architecture fits a pattern, sorted."""
        ...

    @remote("ctl", repeatable=True)
    def alike(self, query: PrefixQuery) -> list[ModelRef]:
        """List live versions of exactly this architecture, sorted."""
        ...

    # ---- the whole ------------------------------------------------------------------------------------

    @remote("watch", repeatable=True)
    def flush(self, timeout: float) -> None:
        """Wait until the manifests of all versions that exist now are on the path.

        Raises:
            StorageError: the path refuses them, or there is none; names versions.
            OperationTimeoutError: it takes longer.
        """
        ...

    @remote("ctl", repeatable=True)
    def stats(self) -> CatalogStats:
        """Return the catalog in figures."""
        ...

    @remote("ctl", repeatable=True)
    def unreadable(self) -> list[UnreadFile]:
        """List the files of the path that could not be read at the start, and cannot be now."""
        ...

    @remote("data", repeatable=True)
    def check_manifest(self, client: str, ref: ModelRef) -> list[str]:
        """Compare a version's manifest on disk with its record; return what differs."""
        ...

    @remote("ctl", repeatable=True)
    def check(self) -> None:
        """Derive all counts from the records and compare.

        Raises:
            CorruptDataError: they differ.
        """
        ...


class KeeperCalls:
    """Calls of shards. Answered by `catalog.parts.shards`."""

    @remote("ctl", repeatable=True)
    def present(self, shard: int, incarnation: int) -> Term:
        """Return the term that a shard is to report to.

        Raises:
            ShardUnavailableError: a later incarnation of the shard has reported, or it has left.
        """
        ...

    @remote("ctl", repeatable=True)
    def report(self, report: Report) -> Answered:
        """Take what changed at a shard; see `store.catalog.reports`.

        Raises:
            ShardUnavailableError: this is another term, or a later incarnation of the shard has reported.
        """
        ...

    @remote("ctl", repeatable=True)
    def commit(self, sender: Sender, proposal: Proposal) -> Committed | Refused:
        """Make a version exist. A save that is repeated gets its version, also after that was retired.

        Raises:
            ShardUnavailableError: this is another term, or the shard has not reported to it yet.
            OperationTimeoutError: the save is over, or a durable one was not on the path in time.
            StoreFullError: there is no memory for the record.
            StorageError: the journal, or of a durable one the path, cannot be written.
        """
        ...

    @remote("ctl", repeatable=True)
    def watch(self, sender: Sender, names: Sequence[str]) -> list[Located]:
        """Have new versions of these names and aliases, and of no others, pushed to a shard; return those in use now.

        A shard repeats this every 15 s, and after each new term, while clients wait there.
        """
        ...

    @remote("ctl", repeatable=True)
    def files(self, segments: Sequence[SegmentId]) -> dict[SegmentId, File]:
        """Return the files of segments that other shards keep: tensors here are encoded against them."""
        ...

    @remote("ctl", repeatable=True)
    def ended(self, sender: Sender, clients: Sequence[str]) -> None:
        """End the sessions of clients whose processes died, or which said goodbye to the shard."""
        ...


class DeployCalls:
    """Calls of the planner and of who starts or stops a repository. Answered by `catalog.parts.deploy`."""

    @remote("ctl", repeatable=True)
    def topology(self) -> Topology:
        """Return the shape of the repository."""
        ...

    @remote("ctl")
    def grow(self, count: int) -> Topology:
        """Decide on new numbers of shards: the caller starts them, and they report."""
        ...

    @remote("ctl", repeatable=True)
    def drain(self, shards: Sequence[int]) -> Topology:
        """Begin to drain shards: they grant nothing, and what they have is copied to others.

        Raises:
            ValueError: none would be left.
        """
        ...

    @remote("ctl", repeatable=True)
    def stay(self, shards: Sequence[int]) -> Topology:
        """Give drains up that have not ended."""
        ...

    @remote("watch", repeatable=True)
    def drained(self, shards: Sequence[int], timeout: float) -> list[int]:
        """Wait until shards have left, or the time is over; return those that have. The caller ends their processes."""
        ...

    @remote("ctl", repeatable=True)
    def forget(self, shards: Sequence[int]) -> Topology:
        """Take shards out that could not be started, or whose processes were ended for good."""
        ...

    @remote("ctl", repeatable=True)
    def end(self) -> None:
        """Hold no lease from now on: the repository is stopped."""
        ...


class CatalogCalls(ClientCalls, KeeperCalls, DeployCalls):
    """All calls of a catalog."""
