"""A snapshot of the current state of a repository, for all viewers.

Rules
- Viewers share a snapshot. It is made on request, and at most every `TICK_S`.
- The cluster is asked for its actors and nodes every `PLACES_S` only, because that is a question to its head.
- If a part is not available, the snapshot contains the reason and all other parts.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from typing import TypeVar

import numpy as np

from ...actors.client.repository import Repository
from ...actors.planner.streams import Fitted, TrainingStatus
from ...actors.rpc.catalog_messages import CatalogStats
from ...actors.updates.follower import ConsumerStatus
from ...actors.updates.watching import ConsumerWatch
from ...planner.curves.forms import FORMS
from ...store.errors import TensorVineError
from ...store.refs import ModelRef
from ..nodes import Machine, check_there, machines
from ..pulse import Beat, Pulse
from .source import Source
from .versions import Listing, Versions, load_of, rows

TICK_S = 0.5
PLACES_S = 5.0
ANSWER_S = 2.0
"""How long shards and consumers may take to answer."""
POINTS = 120
"""Of a drawn curve."""
PLANNED = 64
"""Planned updates that are shown."""
SAID = 300
"""Characters of an error that are shown."""
_T = TypeVar("_T")


class Now:
    """Makes snapshots of one repository. Threads may share it.

    Args:
        source: the connection.
        versions: the versions, which other pages also use.
    """

    def __init__(self, source: Source, versions: Versions) -> None:
        self._source = source
        self._versions = versions
        self._lock = threading.Lock()
        self._made = -TICK_S
        self._snapshot: dict[str, object] = {}
        self._look: _Look | None = None

    def snapshot(self) -> dict[str, object]:
        """Return a snapshot that is at most `TICK_S` old."""
        with self._lock:
            if time.monotonic() - self._made >= TICK_S:
                self._snapshot = self._fresh()
                self._made = time.monotonic()
            return self._snapshot

    def consumers(self) -> list[dict[str, object]]:
        """Return the consumers of the last snapshot."""
        return list(self.snapshot().get("consumers", []))  # pyright: ignore[reportArgumentType, reportUnknownArgumentType, reportUnknownVariableType]

    def close(self) -> None:
        """End the connections to consumers."""
        with self._lock:
            self._forget()

    def _fresh(self) -> dict[str, object]:
        about: dict[str, object] = {"repository": self._source.name, "time": datetime.now(UTC).isoformat()}
        try:
            return about | {"state": "ok", "trouble": "", **self._source.ask(self._looked)}
        except TensorVineError as exc:
            self._forget()
            self._source.forget()
            return about | {"state": "away", "trouble": _said(exc)}

    def _looked(self, repository: Repository) -> dict[str, object]:
        if self._look is None or self._look.repository is not repository:
            self._forget()
            self._look = _Look(repository, self._versions)
        facts = self._look.facts()
        if self._look.is_silent:  # perhaps another repository of this name runs by now: connect again
            self._forget()
            self._source.forget(repository)
        return facts

    def _forget(self) -> None:
        look, self._look = self._look, None
        if look is not None:
            look.close()
            self._versions.forget()


class _Look:
    """Looks at a repository by one connection."""

    def __init__(self, repository: Repository, versions: Versions) -> None:
        self.repository = repository
        self._versions = versions
        self._engine = repository.engine
        self._pulse = Pulse(
            lambda: repository.stats_by_shard(ANSWER_S),
            self._where,
            lambda: check_there(repository.engine, repository.name),
        )
        self._watch = ConsumerWatch(repository.engine, repository.name)
        self._asked = -PLACES_S
        self._actors: dict[str, str | None] = {}
        self._machines: list[Machine] = []
        self._answered: dict[str, tuple[float, int]] = {}
        self._trouble: dict[str, str] = {}
        self._listing = Listing({}, 0)
        self.is_silent = False
        """No shard has answered."""

    def facts(self) -> dict[str, object]:
        """Ask all, and return it as the page shows it."""
        self._trouble = {}
        self._tried("cluster", self._places, None)
        beats = self._pulse.look()
        known = [beat.stats for beat in beats if beat.stats is not None]
        self.is_silent = not known
        catalog = self._catalog()
        if catalog is not None:
            ask = partial(self._versions.listing, self.repository, load_of(catalog))
            self._listing = self._tried("versions", ask, self._listing)
        listing = self._listing
        trainings = self._tried(
            "training runs", partial(self.repository.trainings, ANSWER_S), dict[str, TrainingStatus]()
        )
        consumers = self._watch.statuses(self._actors, ANSWER_S)
        shown = [self._consumer(name, told, listing) for name, told in sorted(consumers.items())]
        return {
            "totals": _totals(beats, catalog),
            "shards": [_shard(beat) for beat in beats],
            "nodes": self._nodes(beats),
            "trainings": [training(name, told) for name, told in sorted(trainings.items())],
            "consumers": shown,
            "traffic": _traffic(consumers),
            "runs": [{"run": run, "ranks": ranks} for run, ranks in sorted(self._runs().items())],
            "newest": rows(listing.newest),
            "missing": self._trouble,
        }

    def close(self) -> None:
        """End the connections to consumers."""
        self._watch.close()

    def _tried(self, what: str, ask: Callable[[], _T], otherwise: _T) -> _T:
        try:
            return ask()
        except TensorVineError as exc:
            self._trouble[what] = _said(exc)
            return otherwise

    def _catalog(self) -> CatalogStats | None:
        return self._tried("catalog", partial(self.repository.catalog_stats, ANSWER_S), None)

    def _places(self) -> None:
        if time.monotonic() - self._asked >= PLACES_S:
            self._actors, self._machines = self._engine.actors(), machines(self._engine)
            self._asked = time.monotonic()

    def _where(self) -> dict[int, str]:
        self._asked = -PLACES_S
        self._tried("cluster", self._places, None)
        addresses, prefix = {machine.id: machine.address for machine in self._machines}, self._prefix
        shards = {actor: node for actor, node in self._actors.items() if actor.startswith(prefix)}
        return {int(actor.removeprefix(prefix)): addresses.get(node or "", "-") for actor, node in shards.items()}

    @property
    def _prefix(self) -> str:
        return f"{self.repository.name}/shard-"

    def _nodes(self, beats: list[Beat]) -> list[dict[str, object]]:
        here = {
            beat.shard: self._actors.get(f"{self._prefix}{beat.shard}") for beat in beats
        }  # its node, if it is running
        return [
            {
                "address": machine.address,
                "id": machine.id,
                "cpus": machine.cpus,
                "gpus": machine.gpus,
                "memory_bytes": machine.memory_bytes,
                "shards": [shard for shard, node in here.items() if node == machine.id],
            }
            for machine in self._machines
        ]

    def _runs(self) -> Counter[str]:
        """Return the training runs of ranks -> how many ranks run; clones of a fork are runs, too."""
        split = (actor.rpartition("/rank-") for actor in self._actors)
        return Counter(run for run, sign, _ in split if sign)

    def _consumer(self, name: str, told: ConsumerStatus | TensorVineError, listing: Listing) -> dict[str, object]:
        model = name.rpartition("-")[0]
        shown: dict[str, object] = {"consumer": name, "model": model, "trouble": ""}
        if isinstance(told, TensorVineError):
            return shown | {"trouble": _said(told)}
        now, before = time.monotonic(), self._answered.get(name)
        self._answered[name] = (now, told.answered)
        rate = (told.answered - before[1]) / (now - before[0]) if before and told.answered >= before[1] else None
        last = told.deliveries[-1] if told.deliveries else None
        return shown | {
            "ref": str(told.ref) if told.ref else None,
            **_lag(model, told.ref, listing),
            "answered": told.answered,
            "answers_per_s": rate,
            "skipped": told.skipped,
            "refused": [{"ref": str(ref), "why": why[:SAID]} for ref, why in told.refused.items()][-3:],
            "refusals": len(told.refused),
            "transport": last.transport if last else None,
            "delivery_s": last.fetch_s + last.swap_s if last else None,
            "delivered": datetime.fromtimestamp(last.swapped_at, UTC).isoformat() if last else None,
        }


def training(name: str, told: TrainingStatus) -> dict[str, object]:
    """Return a training run as JSON has it."""
    planned = told.schedule.iterations if told.schedule is not None else ()
    ahead = [iteration for iteration in planned if iteration > told.iteration][:PLANNED]
    curve = (
        drawn(told.curve, told.losses[0][0], max([told.iteration, *ahead[:8]])) if told.curve and told.losses else []
    )
    return {
        "model": name,
        "iteration": told.iteration,
        "losses": told.losses,
        "curve": {"form": told.curve.form, "mse": told.curve.mse, "points": curve} if told.curve else None,
        "planned": ahead,
        "published": told.updates,
        "costs": asdict(told.costs) if told.costs else None,
        "why": told.why,
    }


def drawn(curve: Fitted, first: int, last: int) -> list[tuple[int, float]]:
    """Return points (iteration, loss) of a fitted curve.

    >>> drawn(Fitted("last1", {"a": 0.5}, 0, 0.0), 0, 2)
    [(0, 0.5), (1, 0.5), (2, 0.5)]
    """
    form = FORMS.get(curve.form)
    if form is None:
        return []
    at = np.unique(np.linspace(first, last, POINTS).astype(np.int64))
    x = np.maximum(at - curve.origin, form.first).astype(np.float64)
    with np.errstate(all="ignore"):
        losses = np.broadcast_to(form.function(x, *curve.params.values()), x.shape)
    return list(zip(at.tolist(), losses.tolist(), strict=True))


def _lag(model: str, ref: ModelRef | None, listing: Listing) -> dict[str, object]:
    """Return how many versions a consumer is behind, and since when."""
    known = listing.of_names.get(model, ())
    newer = [info for info in known if ref is None or info.ref.version > ref.version]
    since = min((info.created for info in newer), default=None)
    return {
        "lag_versions": len(newer),
        "lag_s": max((datetime.now(UTC) - since).total_seconds(), 0.0) if since is not None else 0.0,
    }


def _totals(beats: list[Beat], catalog: CatalogStats | None) -> dict[str, object]:
    known = [(beat, beat.stats) for beat in beats if beat.stats is not None]
    rates = {
        name: sum(value for beat, _ in known if (value := getattr(beat, name)) is not None)
        for name in ("requests_per_s", "saved_per_s", "sent_per_s")
    }
    sums = ("tensors", "bytes_disk", "capacity", "waiting_for_memory", "waiting_for_disk")
    told = ("models", "pins", "versions_unwritten", "bytes_unwritten", "replicas_missing")
    return {
        **{name: sum(getattr(stats, name) for _, stats in known) for name in sums},
        **{name: getattr(catalog, name) if catalog is not None else None for name in told},
        "bytes_used": sum(beat.bytes_used for beat, _ in known),
        **rates,
    }


def _shard(beat: Beat) -> dict[str, object]:
    shown = beat.as_dict()
    shown["trouble"] = str(shown["trouble"])[:SAID]
    return shown


def _traffic(consumers: Mapping[str, ConsumerStatus | TensorVineError]) -> list[dict[str, object]]:
    """Sum up the last deliveries of the consumers by transport."""
    count, nbytes = Counter[str](), Counter[str]()
    for told in consumers.values():
        for delivery in told.deliveries if isinstance(told, ConsumerStatus) else ():
            count[delivery.transport] += 1
            nbytes[delivery.transport] += delivery.nbytes
    return [{"transport": way, "deliveries": count[way], "bytes": nbytes[way]} for way in sorted(count)]


def _said(error: object) -> str:
    return " ".join(str(error).split())[:SAID]
