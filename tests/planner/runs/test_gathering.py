"""Who is served together: a state machine, by the clock of the test."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tensorvine.planner.runs.gathering import (
    IDLE_S,
    KEPT,
    MISSES,
    STEADY,
    WINDOW_S,
    Alone,
    Ask,
    Connect,
    Drop,
    End,
    Gathering,
    Seat,
    Step,
    Together,
)


class Scene:
    """A gathering, members that hold what they were invited to, and a clock."""

    def __init__(self, members: str = "abc") -> None:
        self.gathering = Gathering()
        self.members = members
        self.holds: dict[str, set[int]] = {}
        self.now = 0.0
        self.version = 0
        self.serial = 0

    def ask(self, member: str, places: object = None, *, alone: bool = False) -> list[Step]:
        self.serial += 1
        found = places if places is not None else self.version
        ask = Ask(self.serial, member, found, frozenset(self.holds.get(member, ())), alone)
        return self.noted(self.gathering.asked(ask, self.now))

    def pass_time(self, seconds: float = WINDOW_S) -> list[Step]:
        self.now += seconds
        return self.noted(self.gathering.passed(self.now))

    def update(self, members: str | None = None, apart_s: float = 0.001) -> list[Step]:
        """A new version, for which members ask one after another; then the window passes."""
        self.version += 1
        steps: list[Step] = []
        for member in members if members is not None else self.members:
            steps += self.ask(member)
            self.now += apart_s
        return steps + self.pass_time()

    def noted(self, steps: list[Step]) -> list[Step]:
        for member, seat in invitations(steps).items():
            self.holds.setdefault(member, set()).add(seat.epoch)
        return steps

    def live(self, members: str | None = None) -> int:
        """Bring the members into a live epoch; give its number."""
        for _ in range(STEADY):
            self.update(members)
        (connect,) = kinds(self.update(members), Connect)
        assert self.gathering.joined(connect.epoch, self.now) == []
        return connect.epoch


T = TypeVar("T")


def kinds(steps: Iterable[Step], kind: type[T]) -> list[T]:
    return [step for step in steps if isinstance(step, kind)]


def served(steps: Iterable[Step]) -> dict[str, str]:
    """Tell who is served, and how."""
    found = {step.ask.member: "alone" for step in kinds(steps, Alone)}
    return found | {ask.member: "together" for step in kinds(steps, Together) for ask in step.asks}


def invitations(steps: Iterable[Step]) -> dict[str, Seat]:
    """Tell who is invited, and to what."""
    found = [(step.ask.member, step.invited) for step in kinds(steps, Alone)]
    for step in kinds(steps, Together):
        found += zip((ask.member for ask in step.asks), step.invited, strict=True)
    return {member: seat for member, seat in found if seat is not None}


ALONE = dict.fromkeys("abc", "alone")
TOGETHER = dict.fromkeys("abc", "together")


class TestBecomingSteady:
    def test_members_are_served_alone_until_they_have_agreed_and_are_connected(self) -> None:
        scene = Scene()
        for _ in range(STEADY):
            steps = scene.update()
            assert served(steps) == ALONE
            assert not kinds(steps, Connect)
        told = scene.update()
        assert kinds(told, Connect) == [Connect(1, ("a", "b", "c"))]
        assert invitations(told) == {name: Seat(1, rank, 4) for rank, name in enumerate("abc", 1)}
        assert served(scene.update()) == ALONE  # not connected yet
        scene.gathering.joined(1, scene.now)
        assert served(scene.update()) == TOGETHER

    def test_nobody_is_invited_twice(self) -> None:
        scene = Scene()
        steps = [step for _ in range(8) for step in scene.update()]
        assert len([s for s in kinds(steps, Alone) if s.invited is not None]) == 3
        assert len(kinds(steps, Connect)) == 1

    def test_one_alone_is_no_set(self) -> None:
        scene = Scene("a")
        assert not kinds([step for _ in range(20) for step in scene.update()], Connect)

    def test_who_asks_late_is_not_steady(self) -> None:
        scene = Scene("abc")
        for _ in range(STEADY + 3):
            steps = scene.update("ab")
            steps += scene.ask("c")
            for connect in kinds(steps, Connect):
                assert connect.members == ("a", "b")
                break
        assert scene.holds == {"a": {1}, "b": {1}}

    def test_who_wants_something_else_is_not_of_the_set(self) -> None:
        scene = Scene()
        for number in range(STEADY + 1):
            scene.ask("c", f"other {number}")
            steps = scene.update("ab")
        assert kinds(steps, Connect) == [Connect(1, ("a", "b"))]

    def test_two_models_asked_for_in_turn_keep_a_set_together(self) -> None:
        scene = Scene("ab")
        scene.live()
        for number in range(5):
            scene.version = -10 * number
            assert served(scene.update()) == dict.fromkeys("ab", "together")
            scene.version = 1000 + number
            assert served(scene.update()) == dict.fromkeys("ab", "together")

    def test_two_sets_side_by_side(self) -> None:
        scene = Scene()
        for number in range(STEADY + 1):
            steps = [s for member in "ab" for s in scene.ask(member, f"x{number}")]
            steps += [s for member in "cd" for s in scene.ask(member, f"y{number}")]
            scene.pass_time()
        assert {connect.members for connect in kinds(steps, Connect)} == {("a", "b"), ("c", "d")}

    def test_asking_for_the_same_again_makes_nobody_steady(self) -> None:
        scene = Scene("ab")
        for _ in range(10):
            for member in "ab":
                scene.ask(member, "same")
            assert not kinds(scene.pass_time(), Connect)
        assert not kinds(scene.update(), Connect)


class TestGathering:
    def test_all_come_and_are_served_at_once(self) -> None:
        scene = Scene()
        epoch = scene.live()
        scene.version += 1
        assert scene.ask("b") == scene.ask("a") == []
        (together,) = kinds(scene.ask("c"), Together)
        assert (together.epoch, [ask.member for ask in together.asks]) == (epoch, ["a", "b", "c"])

    def test_one_who_does_not_come_is_waited_for_until_the_window_closes(self) -> None:
        scene = Scene()
        scene.live()
        scene.version += 1
        scene.ask("a")
        scene.now += 0.01
        scene.ask("b")
        assert scene.gathering.due == pytest.approx(scene.now + WINDOW_S - 0.01)
        assert scene.pass_time(WINDOW_S - 0.011) == []
        assert served(scene.pass_time(0.002)) == {"a": "alone", "b": "alone"}

    def test_one_who_comes_too_late_does_not_wait(self) -> None:
        scene = Scene()
        scene.live()
        assert served(scene.update("ab")) == {"a": "alone", "b": "alone"}
        assert served(scene.ask("c")) == {"c": "alone"}

    def test_one_who_asks_again_after_a_broadcast_does_not_wait(self) -> None:
        scene = Scene()
        scene.live()
        assert served(scene.update()) == TOGETHER
        assert served(scene.ask("b", alone=True)) == {"b": "alone"}
        assert served(scene.ask("a")) == {"a": "alone"}

    def test_two_versions_at_once_are_gathered_apart(self) -> None:
        scene = Scene("ab")
        scene.live()
        assert scene.ask("a", "new") == scene.ask("b", "old") == []
        assert served(scene.pass_time()) == {"a": "alone", "b": "alone"}

    def test_one_that_did_not_join_yet_is_served_alone_and_so_are_the_others(self) -> None:
        scene = Scene()
        scene.live()
        scene.holds["c"] = set()
        assert served(scene.update()) == ALONE

    def test_one_that_joined_later_is_served_alone_until_the_larger_epoch_is_there(self) -> None:
        scene = Scene("ab")
        first = scene.live()
        for _ in range(STEADY):
            steps = scene.update("abc")
            assert served(steps) == {"a": "together", "b": "together", "c": "alone"}
        steps = scene.update("abc")
        (connect,) = kinds(steps, Connect)
        assert connect.members == ("a", "b", "c")
        assert served(steps) == {"a": "together", "b": "together", "c": "alone"}
        assert invitations(steps) == {name: Seat(2, rank, 4) for rank, name in enumerate("abc", 1)}
        assert kinds(scene.gathering.joined(connect.epoch, scene.now), End) == [
            End(first, f"epoch {connect.epoch} has all its members")
        ]

    def test_a_new_question_replaces_one_that_is_gathered(self) -> None:
        scene = Scene("ab")
        scene.live()
        scene.ask("a", "x")
        steps = scene.ask("a", "y")
        assert [drop.ask.places for drop in kinds(steps, Drop)] == ["x"]
        assert served(scene.ask("b", "y")) == {"a": "together", "b": "together"}
        assert served(scene.pass_time()) == {}


class TestTheEnd:
    """Phase x event."""

    def test_a_member_leaves_while_the_epoch_is_planned(self) -> None:
        scene = Scene()
        for _ in range(STEADY):
            scene.update()
        assert scene.gathering.left("c") == []
        assert not kinds(scene.update("ab"), Connect)

    def test_a_member_leaves_while_it_is_connected(self) -> None:
        scene = Scene()
        for _ in range(STEADY + 1):
            scene.update()
        assert kinds(scene.gathering.left("c"), End) == [End(1, "c left")]
        assert scene.gathering.joined(1, scene.now) == []
        assert not scene.gathering.members(1)

    def test_a_member_leaves_while_others_are_gathered(self) -> None:
        scene = Scene()
        epoch = scene.live()
        scene.version += 1
        scene.ask("a")
        scene.ask("c")
        steps = scene.gathering.left("c")
        assert kinds(steps, End) == [End(epoch, "c left")]
        assert served(steps) == {"a": "alone"}
        assert [drop.ask.member for drop in kinds(steps, Drop)] == ["c"]
        assert served(scene.ask("b")) == {"b": "alone"}

    def test_a_member_leaves_after_it_was_served_and_the_next_set_makes_the_next_epoch(self) -> None:
        scene = Scene()
        epoch = scene.live()
        assert served(scene.update()) == TOGETHER
        assert kinds(scene.gathering.left("c"), End) == [End(epoch, "c left")]
        for _ in range(STEADY):
            assert not kinds(scene.update("ab"), Connect)
        assert kinds(scene.update("ab"), Connect) == [Connect(epoch + 1, ("a", "b"))]

    def test_connecting_fails_and_members_must_be_steady_for_longer(self) -> None:
        scene = Scene("ab")
        for _ in range(STEADY + 1):
            scene.update()
        assert kinds(scene.gathering.failed(1, "no"), End) == [End(1, "no")]
        for _ in range(2 * STEADY):
            assert not kinds(scene.update(), Connect)
        assert kinds(scene.update(), Connect) == [Connect(2, ("a", "b"))]

    def test_a_broadcast_fails_and_who_asks_again_is_served_alone(self) -> None:
        scene = Scene()
        epoch = scene.live()
        scene.update()
        assert kinds(scene.gathering.failed(epoch, "a peer died"), End) == [End(epoch, "a peer died")]
        assert [served(scene.ask(member, alone=True)) for member in "ab"] == [{"a": "alone"}, {"b": "alone"}]
        assert scene.gathering.failed(epoch, "told twice") == []

    def test_a_broadcast_fails_for_a_member_only(self) -> None:
        scene = Scene()
        epoch = scene.live()
        assert served(scene.update()) == TOGETHER
        scene.ask("b", "new")
        scene.holds["a"] = set()
        steps = scene.ask("a", alone=True)
        assert kinds(steps, End) == [End(epoch, "it went wrong for a")]
        assert served(steps) == {"a": "alone", "b": "alone"}

    def test_a_broadcast_that_succeeds_forgives_failures(self) -> None:
        scene = Scene("ab")
        for expected in (1, 2):
            for _ in range(expected * STEADY):
                scene.update()
            (connect,) = kinds(scene.update(), Connect)
            if expected == 1:
                scene.gathering.failed(connect.epoch, "no")
        scene.gathering.joined(2, scene.now)
        scene.update()
        scene.gathering.succeeded(2)
        scene.gathering.failed(2, "no")
        for _ in range(2 * STEADY):
            scene.update()
        assert kinds(scene.update(), Connect)

    def test_somebody_is_missing_again_and_again(self) -> None:
        scene = Scene()
        epoch = scene.live()
        for number in range(MISSES):
            steps = scene.update("ab")
            assert len(kinds(steps, End)) == (number == MISSES - 1)
        assert served(scene.ask("a", "next")) == {"a": "alone"}
        assert scene.gathering.over([epoch, epoch + 1]) == (epoch, epoch + 1)

    def test_nobody_uses_it(self) -> None:
        scene = Scene()
        epoch = scene.live()
        idle_from = scene.gathering.due
        assert idle_from is not None
        assert scene.pass_time(idle_from - scene.now - 0.001) == []
        assert scene.gathering.over([epoch]) == ()
        assert kinds(scene.pass_time(0.002), End) == [End(epoch, f"not used for {IDLE_S:.0f} s")]
        assert scene.gathering.due is None


def test_what_is_remembered_is_bounded() -> None:
    gathering = Gathering()
    for number in range(3 * KEPT):
        gathering.asked(Ask(number, "a", number), now=number * 1e-6)
    assert len(gathering._first) == KEPT
    assert len(gathering._unsettled) <= KEPT


@settings(max_examples=200, deadline=None)
@given(
    apart_s=st.lists(st.floats(0, WINDOW_S / 5), min_size=1, max_size=12),
    members=st.integers(2, 5),
)
def test_any_prompt_members_come_to_be_served_together(apart_s: list[float], members: int) -> None:
    scene = Scene("abcde"[:members])
    ways: list[set[str]] = []
    for number in range(STEADY + 4):
        steps = scene.update(apart_s=apart_s[number % len(apart_s)])
        for connect in kinds(steps, Connect):
            scene.gathering.joined(connect.epoch, scene.now)
        ways.append(set(served(steps).values()))
    assert ways == [{"alone"}] * (STEADY + 1) + [{"together"}] * 3


class Readers(RuleBasedStateMachine):
    """Members that ask, wait, leave and fail in any order: each question is settled once, and by the rules."""

    def __init__(self) -> None:
        super().__init__()
        self.gathering = Gathering()
        self.now = 0.0
        self.serial = 0
        self.open: dict[int, Ask] = {}
        self.at: dict[str, int] = {}
        """Member -> its open question."""
        self.holds: dict[str, set[int]] = {}
        self.connecting: dict[int, tuple[str, ...]] = {}
        self.live: dict[int, tuple[str, ...]] = {}
        self.ended: set[int] = set()
        self.served: set[int] = set()

    def take(self, steps: list[Step]) -> None:
        for step in steps:
            match step:
                case Alone(ask):
                    self.settle(ask)
                case Together(epoch, asks):
                    assert tuple(ask.member for ask in asks) == self.live[epoch]
                    assert len({ask.places for ask in asks}) == 1
                    assert all(epoch in ask.holds and not ask.alone for ask in asks)
                    for ask in asks:
                        self.settle(ask)
                case Connect(epoch, members):
                    assert epoch not in self.connecting | self.live
                    assert epoch not in self.ended
                    assert len(members) > 1
                    assert list(members) == sorted(set(members))
                    self.connecting[epoch] = members
                case End(epoch, why):
                    assert why
                    assert (self.connecting.pop(epoch, None) or self.live.pop(epoch)) is not None
                    self.ended.add(epoch)
                case Drop(ask):
                    self.settle(ask)
        for member, seat in invitations(steps).items():
            assert self.connecting[seat.epoch][seat.rank - 1] == member
            assert seat.size == len(self.connecting[seat.epoch]) + 1
            assert seat.epoch not in self.holds.get(member, set())
            self.holds.setdefault(member, set()).add(seat.epoch)

    def settle(self, ask: Ask) -> None:
        assert self.open.pop(ask.number) == ask
        if self.at.get(ask.member) == ask.number:
            del self.at[ask.member]

    @rule(members=st.lists(st.sampled_from("abcd"), min_size=1, unique=True), old=st.booleans(), alone=st.booleans())
    def ask(self, members: list[str], old: bool, alone: bool) -> None:
        for member in members:
            self.serial += 1
            places = int(self.now * 2) - old
            ask = Ask(self.serial, member, places, frozenset(self.holds.get(member, ())), alone and old)
            self.open[ask.number] = ask
            self.take(self.gathering.asked(ask, self.now))
            if ask.number in self.open:
                assert self.at.get(member) is None
                self.at[member] = ask.number

    @rule(seconds=st.sampled_from([0.0, 0.001, WINDOW_S, 0.5, 0.5, 0.5, IDLE_S]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.gathering.passed(self.now))

    @rule(updates=st.integers(1, 4))
    def update_all(self, updates: int) -> None:
        for _ in range(updates):
            self.now += 0.5
            self.ask(list("abcd"), False, False)
            self.pass_time(WINDOW_S)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def desert(self, data: st.DataObject) -> None:
        epoch = next(iter(self.live))
        self.holds.get(data.draw(st.sampled_from(self.live[epoch])), set()).discard(epoch)

    @precondition(lambda self: self.connecting)
    @rule(works=st.booleans())
    def connect(self, works: bool) -> None:
        epoch, members = next(iter(self.connecting.items()))
        if works:
            del self.connecting[epoch]
            self.live[epoch] = members
            self.take(self.gathering.joined(epoch, self.now))
            assert set(self.gathering.members(epoch)) == set(members)
        else:
            self.take(self.gathering.failed(epoch, "not connected"))

    @precondition(lambda self: self.live)
    @rule(works=st.booleans())
    def broadcast(self, works: bool) -> None:
        epoch = next(iter(self.live))
        if works:
            self.gathering.succeeded(epoch)
        else:
            self.take(self.gathering.failed(epoch, "a peer died"))

    @rule(member=st.sampled_from("abcd"))
    def leave(self, member: str) -> None:
        self.take(self.gathering.left(member))
        self.holds.pop(member, None)
        assert not any(member in members for members in (*self.connecting.values(), *self.live.values()))
        assert member not in self.at

    @invariant()
    def nobody_waits_without_an_end(self) -> None:
        due = self.gathering.due
        assert not self.open or (due is not None and due <= self.now + WINDOW_S)
        assert set(self.open) == set(self.at.values())

    @invariant()
    def what_ended_is_over(self) -> None:
        assert set(self.gathering.over(range(1, 100))) >= self.ended
        assert self.gathering.over([*self.live, *self.connecting]) == ()


TestReaders = Readers.TestCase
TestReaders.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
