"""Who of a shard's readers is served together, by one broadcast, and who by itself (docs/design/online.md).

Rules
- Members that ask for the same things, in the same order and promptly after one another, `STEADY` times in a row are a
  steady set. They are invited to a group of their own, an epoch, by the answers to what they ask next.
- Once its group is connected, questions of its members for the same things are gathered: until all have asked, or for
  `WINDOW_S` after the first. If all have come, they are served together; else each of them by itself, and so is who
  comes later.
- An epoch ends when a member left it, when connecting or a broadcast failed, when `MISSES` gatherings in a row were not
  complete, when nobody used it for `IDLE_S`, and when one that has all its members, and more, is connected. Whoever is
  being gathered then is served by itself at once.
- After an epoch that failed, or was not complete, its members must be steady for twice as long as before, until a
  broadcast succeeds.
- Events in, decisions out: nothing here waits, sends, or knows the time. An event that comes too late changes nothing.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from .gathered import Alone, Ask, Connect, Drop, End, Seat, Step, Together

STEADY = 2
"""Questions in a row in which members must agree."""
WINDOW_S = 0.02
"""How long members are waited for."""
MISSES = 3
"""Gatherings in a row that may lack somebody, less one."""
IDLE_S = 300.0
"""How long an epoch is kept without use."""
MOST_TROUBLES = 6
"""Failures in a row after which members need not be steady for any longer."""
KEPT = 256
"""Things asked for that are remembered."""


@dataclass(slots=True)
class _Member:
    recent: deque[Hashable] = field(default_factory=lambda: deque[Hashable](maxlen=STEADY))
    """What it asked for, the newest last."""
    prompt: int = 0
    """Questions in a row that came promptly."""
    troubles: int = 0
    """Its epochs that failed in a row."""

    def is_steady(self) -> bool:
        return self.prompt >= STEADY << min(self.troubles, MOST_TROUBLES)


@dataclass(slots=True)
class _Round:
    closes: float
    asks: dict[str, Ask]


@dataclass(slots=True)
class _Epoch:
    number: int
    members: tuple[str, ...]
    state: Literal["planned", "connecting", "live"] = "planned"
    untold: set[str] = field(default_factory=set[str])
    joined: set[str] = field(default_factory=set[str])
    """Members that were seen to hold it."""
    rounds: dict[Hashable, _Round] = field(default_factory=dict[Hashable, _Round])
    """What is asked for -> who has asked for it."""
    closed: deque[Hashable] = field(default_factory=lambda: deque[Hashable](maxlen=KEPT))
    """What was gathered."""
    missed: int = 0
    used: float = 0.0


class Gathering:
    """Decides for one shard and one kind of group.

    Args:
        window_s: how long members are waited for.

    >>> gathering, names = Gathering(), ("a", "b")
    >>> for number, places in enumerate(("v1", "v2", "v3")):
    ...     steps = [s for name in names for s in gathering.asked(Ask(number, name, places), now=float(number))]
    ...     steps += gathering.passed(number + 0.5)
    >>> steps[:2]
    [Connect(epoch=1, members=('a', 'b')), Alone(ask=Ask(number=2, member='a', places='v3', holds=frozenset(), \
alone=False), invited=Seat(epoch=1, rank=1, size=3))]
    >>> gathering.joined(1, now=3.6)
    []
    >>> gathering.asked(Ask(8, "a", "v4", frozenset([1])), now=4.0)  # waits for the other
    []
    >>> [together] = gathering.asked(Ask(9, "b", "v4", frozenset([1])), now=4.001)
    >>> together.epoch, [ask.member for ask in together.asks]
    (1, ['a', 'b'])
    """

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self.window_s = window_s
        self._members: dict[str, _Member] = {}
        self._epochs: dict[int, _Epoch] = {}
        self._serial = 0
        self._first: OrderedDict[Hashable, float] = OrderedDict()
        """What was asked for -> when for the first time."""
        self._unsettled: dict[Hashable, float] = {}
        """What was asked for -> when it is known who asked for it promptly."""

    # ---- events -----------------------------------------------------------------------------------------

    def asked(self, ask: Ask, now: float) -> list[Step]:
        """Take a question; its answer may be among what a later event brings."""
        steps = [*self.passed(now), *self._dropped(ask.member)]
        if not ask.alone:
            self._remember(ask, now)
        steps += self._connects(ask.member)
        steps += self._deserted(ask)
        epoch = self._live(ask)
        if epoch is None or ask.places in epoch.closed:
            return [*steps, self._alone(ask)]
        epoch.used = now
        gathered = epoch.rounds.setdefault(ask.places, _Round(now + self.window_s, {}))
        gathered.asks[ask.member] = ask
        if len(gathered.asks) == len(epoch.members):
            del epoch.rounds[ask.places]
            epoch.closed.append(ask.places)
            asks = tuple(gathered.asks[member] for member in epoch.members)
            steps.append(Together(epoch.number, asks, tuple(map(self._invited, epoch.members))))
        return steps

    def passed(self, now: float) -> list[Step]:
        """Take notice of the time."""
        for places in [places for places, at in self._unsettled.items() if at <= now]:
            del self._unsettled[places]
            self._settle(places)
        steps: list[Step] = []
        for epoch in list(self._epochs.values()):
            for places in [places for places, gathered in epoch.rounds.items() if gathered.closes <= now]:
                steps += map(self._alone, epoch.rounds.pop(places).asks.values())
                epoch.closed.append(places)
                epoch.missed += 1
            if epoch.missed >= MISSES:
                steps += self._troubled(epoch, f"{epoch.missed} times in a row not all came in time")
            elif epoch.state == "live" and not epoch.rounds and epoch.used + IDLE_S <= now:
                steps += self._end(epoch, f"not used for {IDLE_S:.0f} s")
        return steps

    def joined(self, epoch: int, now: float) -> list[Step]:
        """Learn that a group is connected."""
        found = self._epochs.get(epoch)
        if found is None or found.state != "connecting":
            return []
        found.state, found.used = "live", now
        smaller = [other for other in self._epochs.values() if set(other.members) < set(found.members)]
        return [step for other in smaller for step in self._end(other, f"epoch {epoch} has all its members")]

    def succeeded(self, epoch: int) -> None:
        """Learn that a broadcast brought all to all."""
        found = self._epochs.get(epoch)
        if found is not None:
            found.missed = 0
            for member in found.members:
                self._members[member].troubles = 0

    def failed(self, epoch: int, why: str) -> list[Step]:
        """Learn that connecting, or a broadcast, failed."""
        found = self._epochs.get(epoch)
        return self._troubled(found, why) if found is not None else []

    def left(self, member: str) -> list[Step]:
        """Learn that a member is gone."""
        steps = [
            step
            for epoch in list(self._epochs.values())
            if member in epoch.members
            for step in self._end(epoch, f"{member} left")
        ]
        self._members.pop(member, None)
        return [Drop(s.ask) if isinstance(s, Alone) and s.ask.member == member else s for s in steps]

    # ---- questions --------------------------------------------------------------------------------------

    @property
    def due(self) -> float | None:
        """When `passed` has to be called at the latest; None: not before the next event."""
        times = list(self._unsettled.values())
        for epoch in self._epochs.values():
            times += [gathered.closes for gathered in epoch.rounds.values()]
            times += [epoch.used + IDLE_S] if epoch.state == "live" else []
        return min(times, default=None)

    def over(self, epochs: Iterable[int]) -> tuple[int, ...]:
        """Return those of the epochs that have ended."""
        return tuple(epoch for epoch in epochs if epoch not in self._epochs)

    def members(self, epoch: int) -> Sequence[str]:
        """Return who is in an epoch, by rank from 1 on; nobody if it has ended."""
        found = self._epochs.get(epoch)
        return found.members if found is not None else ()

    @property
    def known(self) -> tuple[str, ...]:
        """Those who have asked and not left."""
        return tuple(self._members)

    # ---- who is steady ----------------------------------------------------------------------------------

    def _remember(self, ask: Ask, now: float) -> None:
        member = self._members.setdefault(ask.member, _Member())
        if member.recent and member.recent[-1] == ask.places:
            return
        if ask.places not in self._first:
            self._first[ask.places] = now
            self._unsettled[ask.places] = now + self.window_s
            while len(self._first) > KEPT:
                oldest, _ = self._first.popitem(last=False)
                self._unsettled.pop(oldest, None)
        member.recent.append(ask.places)
        member.prompt = member.prompt + 1 if now < self._first[ask.places] + self.window_s else 0

    def _settle(self, places: Hashable) -> None:
        """Find the steady sets among those who asked for `places` last."""
        sets: dict[tuple[Hashable, ...], list[str]] = {}
        for name, member in self._members.items():
            if member.is_steady() and member.recent[-1] == places:
                sets.setdefault(tuple(member.recent), []).append(name)
        for names in sets.values():
            if len(names) > 1:
                self._plan(tuple(sorted(names)))

    def _plan(self, members: tuple[str, ...]) -> None:
        """Plan an epoch, unless its members have a better one, or must yet leave another."""
        near = [epoch for epoch in self._epochs.values() if not set(epoch.members).isdisjoint(members)]
        for epoch in near:
            larger = set(epoch.members) >= set(members)
            if (
                larger
                or epoch.state == "connecting"
                or (epoch.state == "live" and not set(epoch.members) < set(members))
            ):
                return
        for epoch in near:
            if epoch.state == "planned":
                del self._epochs[epoch.number]
        self._serial += 1
        self._epochs[self._serial] = _Epoch(self._serial, members, untold=set(members))

    # ---- within -----------------------------------------------------------------------------------------

    def _dropped(self, member: str) -> list[Step]:
        """Gather no more what a member asked before."""
        rounds = [gathered for epoch in self._epochs.values() for gathered in epoch.rounds.values()]
        return [Drop(gathered.asks.pop(member)) for gathered in rounds if member in gathered.asks]

    def _live(self, ask: Ask) -> _Epoch | None:
        """Return the epoch with which to serve a question."""
        if ask.alone:
            return None
        held = [epoch for number in ask.holds if (epoch := self._epochs.get(number)) is not None]
        fitting = [epoch for epoch in held if epoch.state == "live" and ask.member in epoch.members]
        return max(fitting, key=lambda epoch: epoch.number, default=None)

    def _connects(self, member: str) -> list[Step]:
        """Begin with the epochs of which a member is about to be told."""
        planned = [e for e in self._epochs.values() if e.state == "planned" and member in e.members]
        for epoch in planned:
            epoch.state = "connecting"
        return [Connect(epoch.number, epoch.members) for epoch in planned]

    def _deserted(self, ask: Ask) -> list[Step]:
        """End the epochs that a member had joined and holds no more."""
        steps: list[Step] = []
        for epoch in list(self._epochs.values()):
            if epoch.number in ask.holds and ask.member in epoch.members:
                epoch.joined.add(ask.member)
            elif ask.member in epoch.joined:
                steps += self._troubled(epoch, f"it went wrong for {ask.member}")
        return steps

    def _alone(self, ask: Ask) -> Alone:
        return Alone(ask, self._invited(ask.member))

    def _invited(self, member: str) -> Seat | None:
        """Return the place of which a member is to be told now."""
        for epoch in self._epochs.values():
            if epoch.state == "connecting" and member in epoch.untold:
                epoch.untold.discard(member)
                return Seat(epoch.number, epoch.members.index(member) + 1, len(epoch.members) + 1)
        return None

    def _troubled(self, epoch: _Epoch, why: str) -> list[Step]:
        for name in epoch.members:
            self._members[name].troubles += 1
        return self._end(epoch, why)

    def _end(self, epoch: _Epoch, why: str) -> list[Step]:
        del self._epochs[epoch.number]
        for name in epoch.members:
            self._members[name].prompt = 0
        waiting = [ask for gathered in epoch.rounds.values() for ask in gathered.asks.values()]
        told = [End(epoch.number, why)] if epoch.state != "planned" else []
        return [*told, *map(self._alone, waiting)]
