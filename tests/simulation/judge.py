"""Judges a world at its end, as a client that was not there before.

Rules
- What was promised is read, listed and numbered; then all is retired, and nothing may be left. Where somebody died,
  shards may take a few looks to find what they left behind.
"""

from __future__ import annotations

import gc
from typing import Any

from tensorvine.actors.rpc.calls import Request
from tensorvine.actors.rpc.catalog_calls import CatalogCalls
from tensorvine.actors.rpc.channel import Channel
from tensorvine.actors.shard.calls import ShardCalls
from tensorvine.store.errors import ModelLostError, ModelNotFoundError, StoreFullError

from .client import TIMEOUT_S, Client
from .cluster import Hosted
from .scheduler import StuckError
from .setting import Setting, context_of

CLOSED_S = 9.0
"""How long a world settles when its clients are gone."""
LOOKED_S = 30.0
"""How long shards may take to find what nobody needs: a few looks of theirs, and one slow manifest."""
LEFT = (
    "tensors",
    "bytes_memory",
    "bytes_allocated",
    "bytes_staged",
    "bytes_replicated",
    "bytes_disk",
)
"""Statistics of a shard that are 0 where nothing is left."""


class Judge(Client):
    """Checks a world at its end."""

    def __init__(self, setting: Setting, clients: list[Client]) -> None:
        process = setting.world.process
        if process is None:
            raise StuckError("expected to run in a process")
        super().__init__(setting, process, -1)
        self._clients, self._signals = clients, 0.0

    def judge(self) -> None:
        """Check everything; then retire everything, and check that nothing is left."""
        self._attempt("connect", self._connect)
        if self.repo is None:
            self._oracle.fail("R8", "nobody can connect")
            return
        for client in self._clients:
            if not client.process.dead:
                client.check_held()
                client.held.clear()
                client.matches.clear()
        gc.collect()
        self._readable()
        self._listed()
        if self._setting.kind.interrupts and not self._setting.troubled:
            self._given_up()
        self._numbers()
        if self._setting.kind.graphs:
            self._let_go_of()
        if not self._oracle.broken:
            self._emptied()

    def _readable(self) -> None:
        for attempt in self._oracle.alive():
            what = f"at the end: load {attempt.ref}"
            arrays = self._attempt(what, lambda attempt=attempt: self._repo().load(str(attempt.ref), timeout=TIMEOUT_S))
            if not isinstance(arrays, BaseException):
                self._oracle.read(what, attempt.ref, attempt.name, arrays, True)
            elif isinstance(arrays, ModelNotFoundError):
                self._oracle.fail("R3", f"{what}: it was never saved or is retired, it says: {arrays}")
            elif isinstance(arrays, ModelLostError) and not attempt.lossy:
                self._oracle.fail("R3", f"{what} (safe: {attempt.safe}): {arrays}")
            elif not isinstance(arrays, ModelLostError | ModelNotFoundError | StoreFullError):
                self._oracle.fail("R8", f"{what}: all is calm: {arrays!r}")
            del arrays
        for name in sorted({a.name for a in self._oracle.alive()}):
            what = f"at the end: load {name!r}"
            arrays = self._attempt(what, lambda name=name: self._repo().load(name, timeout=TIMEOUT_S))
            if not isinstance(arrays, BaseException):
                self._oracle.read(what, None, name, arrays, True)

    def _listed(self) -> None:
        listed = self._attempt("models", lambda: self._repo().models())
        if isinstance(listed, BaseException):
            self._oracle.fail("R8", f"at the end: models: {listed!r}")
            return
        twice = sorted({ref for ref in listed if listed.count(ref) > 1})
        if twice:
            self._oracle.fail("R5", f"listed twice: {twice}")
        for attempt in self._oracle.attempts:
            if attempt.retired and attempt.ref in listed:
                self._oracle.fail("R3", f"{attempt.ref} was retired and is listed")
        for hosted in self._setting.shards():
            self._checked(hosted, ShardCalls.check())
        self._checked(self._setting.catalog(), CatalogCalls.check())
        topology = self._ask(self._setting.catalog(), CatalogCalls.topology())
        if isinstance(topology, BaseException) or topology.leaving:
            self._oracle.fail("R8", f"the change of the shards has no end: {topology!r}")

    def _checked(self, hosted: Hosted, check: Request[None]) -> None:
        result = self._ask(hosted, check)
        if isinstance(result, BaseException):
            self._oracle.fail("R7", f"check of {hosted.ref.name}: {result!r}")

    def _given_up(self) -> None:
        """Check that saves which their callers interrupted came to nothing, unless they existed by then."""
        oracle = self._oracle
        for ref in self._attempt("models", lambda: self._repo().models()):
            arrays = None if ref in oracle.by_ref else self._attempt(f"load {ref}", lambda r=ref: self._repo().load(r))
            if not isinstance(arrays, dict):
                continue
            saves = oracle.failed(ref.name, arrays)
            if saves and all(a.existing is not None and ref not in a.existing for a in saves):
                oracle.fail("R3", f"{ref} appeared after its caller had interrupted its save: {saves[-1].number}")
            del arrays

    def _ask(self, hosted: Hosted, request: Request[Any]) -> Any:
        name = hosted.ref.name
        channel = Channel(self._repo().engine, name, actor=hosted.ref)
        return self._attempt(f"{request.remote.name} of {name}", lambda: channel.call(request, 10.0))

    def _numbers(self) -> None:
        """Save each name once more: its number must be new."""
        for name in sorted({a.name for a in self._oracle.attempts if a.ref is not None}):
            highest = max(a.ref.version for a in self._oracle.attempts if a.name == name and a.ref is not None)
            attempt = self._oracle.begin(name, {"t0": self._oracle.fresh(4)}, False)
            saved = self._attempt(
                f"save {name} again",
                lambda name=name, attempt=attempt: self._repo().save(
                    name, self._oracle.arrays(attempt.table), inherit=None, timeout=TIMEOUT_S
                ),
            )
            if isinstance(saved, BaseException):
                if not isinstance(saved, StoreFullError):
                    self._oracle.fail("R8", f"at the end: save of {name!r}: {saved!r}")
                continue
            self._oracle.committed(attempt, saved.ref)
            if saved.ref.version <= highest:
                self._oracle.fail("R4", f"{saved.ref} comes after {name}@{highest}")

    def _let_go_of(self) -> None:
        """Check that clients that released everything, and live on, keep nothing but memory for one save to come."""
        w, end = self._world, self._world.now + LOOKED_S
        while (kept := self._kept()) and w.now < end:
            w.sleep(1.0)
        for what in kept:
            self._oracle.fail("R7", f"clients that released everything still have: {what}")

    def _kept(self) -> list[str]:
        found: list[str] = []
        clients = {d for client in self._clients for d in client.process.descriptors.values()}
        for hosted in self._setting.shards():
            name, context = hosted.ref.name.rpartition("/")[2], context_of(hosted)
            if context is None or hosted.process is None:
                return [f"{name} does not run"]
            segment_memory = context.segment_memory
            reserved = {client.reserved() for client in self._clients}
            owners = segment_memory._arena.owners()
            found += [f"{name} has memory that is granted to {owner}" for owner in owners if owner not in reserved]
            memory = hosted.process.descriptors[segment_memory.memory.fd].memory
            locks = [lock for lock in memory.locks if lock[3] in clients]
            found += [f"{name} has {len(locks)} parts that clients have locked"] if locks else []
        catalog = context_of(self._setting.catalog())
        if catalog is None:
            return ["the catalog does not run"]
        return found + ([f"the catalog has {len(catalog.state.pins)} pins"] if len(catalog.state.pins) else [])

    def _emptied(self) -> None:
        w = self._world
        for client in self._clients:
            if client.repo is not None and not client.process.dead:
                w.spawn(client.process, "close", client.repo.close)
        gc.collect()
        for ref in self._attempt("models", lambda: self._repo().models()):
            result = self._attempt(f"retire {ref}", lambda ref=ref: self._repo().retire(str(ref)))
            if isinstance(result, BaseException):
                self._oracle.fail("R8", f"at the end: retire of {ref}: {result!r}")
        w.sleep(CLOSED_S)
        end = w.now + LOOKED_S
        while (left := self._left()) and self._oracle.crashes and w.now < end:
            w.sleep(1.0)
        for shard, what in (left or {}).items():
            self._oracle.fail("R7", f"shard {shard}: left at the end: {what}; {self._owners(shard)}")
        end = w.now + LOOKED_S
        while (files := self._segment_files()) and w.now < end:
            w.sleep(1.0)
        if files:
            self._oracle.fail("R7", f"files without owner: {files[:3]} and so on, {len(files)}")

    def _left(self) -> dict[int, dict[str, int]] | None:
        """Say what shards have left; None: they do not tell."""
        stats = self._attempt("stats", lambda: self._repo().stats())
        if isinstance(stats, BaseException):
            self._oracle.fail("R8", f"at the end: stats: {stats!r}")
            return None
        found = {s.shard: {what: getattr(s, what) for what in LEFT if getattr(s, what)} for s in stats.shards}
        catalog = {what: getattr(stats.catalog, what) for what in ("models", "pins") if getattr(stats.catalog, what)}
        return {shard: what for shard, what in (found | {-1: catalog}).items() if what}

    def _owners(self, shard: int) -> str:
        """Say whose a shard's memory is; -1 is the catalog."""
        if shard < 0:
            context = context_of(self._setting.catalog())
            return f"references {len(context.state.references)}" if context is not None else "it does not run"
        hosted = next(h for h in self._setting.shards() if h.ref.name.endswith(f"-{shard}"))
        context = context_of(hosted)
        owners = context.segment_memory._arena.owners() if context is not None else ()
        return f"memory is owned by {sorted(map(str, owners))}"

    def _segment_files(self) -> list[str]:
        """Name the files of segments that there are."""
        return sorted(name for name in self._world.disk.files if name.startswith("segments/"))  # type: ignore[attr-defined]
