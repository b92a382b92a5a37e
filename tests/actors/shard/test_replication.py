"""The rules of replicas, without any engine: what is kept, what is not heard, who keeps it, what comes back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tensorvine.actors.rpc.calls import Request
from tensorvine.actors.shard.admission import Admission
from tensorvine.actors.shard.calls import ShardCalls
from tensorvine.actors.shard.calls.copies import Original
from tensorvine.actors.shard.calls.replicas import ReplicaOf
from tensorvine.actors.shard.copying import Copying
from tensorvine.actors.shard.local_clients import LocalClients
from tensorvine.actors.shard.replicas.replica_store import ReplicaStore
from tensorvine.actors.shard.replicas.replication import Replication
from tensorvine.actors.shard.replicas.restore import Restored, restore
from tensorvine.planner.backups import backups_of
from tensorvine.planner.topology import Topology
from tensorvine.store import ModelRef
from tensorvine.store.errors import OperationTimeoutError, ShardUnavailableError, StoreFullError
from tensorvine.store.graphs.graph import ModelGraph
from tensorvine.store.holders import Save
from tensorvine.store.segments.segment import SegmentId
from tensorvine.store.shard import ShardState
from tensorvine.store.versions.manifest import Header, encode_body
from tensorvine.store.versions.replica import NEVER, Copy, Kept, Replica
from tensorvine.store.versions.version import Draft

from tests.support.contexts import context_of
from tests.support.waiting import eventually

PATIENCE_S = 60.0


def kept(ref: ModelRef) -> Kept:
    return Kept(
        Header(
            ref=ref,
            parent=None,
            quality=None,
            metadata="{}",
            created_ns=1,
            graph_key=b"k",
            bytes_owned=4,
            bytes_total=4,
        ),
        b"body",
        b"graph",
    )


def copy_of(serial: int) -> Copy:
    return Copy((4,), (0,), f"block {serial}")


class TestReplicaSet:
    @given(
        st.dictionaries(st.integers(0, 9), st.sampled_from("abcd"), min_size=1),
        st.integers(1, 4),
    )
    def test_they_are_others_on_nodes_of_their_own_as_far_as_there_are_some(
        self, nodes: dict[int, str], copies: int
    ) -> None:
        for shard in nodes:
            chosen = backups_of(shard, nodes, copies)
            assert shard not in chosen
            assert len(set(chosen)) == len(chosen) == min(copies, len(nodes) - 1)
            apart = {nodes[s] for s in (shard, *chosen)}
            assert len(apart) == min(copies + 1, len(set(nodes.values())))

    def test_each_of_a_ring_keeps_as_many_as_it_has_kept(self) -> None:
        nodes = {shard: str(shard) for shard in range(5)}
        chosen = [backups_of(shard, nodes, 2) for shard in nodes]
        assert sorted(b for pair in chosen for b in pair) == sorted(list(range(5)) * 2)

    def test_an_unknown_shard_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"backups of shard 3: expected it among the shards; found \[0, 1\]"):
            backups_of(3, {0: "a", 1: "b"}, 1)


class TestLives:
    def test_a_life_that_is_over_is_not_heard(self) -> None:
        replica = Replica(1)
        replica.open(1)
        replica.put(1, {(1, 7): copy_of(7)}, {ModelRef("m", 1): kept(ModelRef("m", 1))})
        replica.complete_at(1, (1, 4))
        assert replica.open(2) == 2
        stale = r"replica of shard 1: expected its incarnation 2; found a message of incarnation 1"
        for late in (
            lambda: replica.put(1, {(1, 8): copy_of(8)}, {}),
            lambda: replica.drop(1, [(1, 7)], [ModelRef("m", 1)]),
            lambda: replica.sync(1, set(), set()),
            lambda: replica.complete_at(1, (9, 9)),
            lambda: replica.clear(1),
        ):
            with pytest.raises(ShardUnavailableError, match=stale):
                late()
        assert list(replica.copies) == [(1, 7)]
        assert list(replica.records) == [ModelRef("m", 1)]
        assert replica.complete == (1, 4)
        assert replica.freed == ["block 8"]  # what was fetched for the late message has no owner

    def test_the_answer_tells_an_earlier_life_that_it_is_one(self) -> None:
        replica = Replica(1)
        replica.open(5)
        assert replica.open(3) == 5

    def test_what_a_life_opens_keeps_the_rank_of_its_content(self) -> None:
        replica = Replica(1)
        replica.open(1)
        replica.complete_at(1, (1, 4))
        replica.complete_at(1, (1, 2))
        replica.open(2)
        assert replica.complete == (1, 4)
        replica.clear(2)
        assert replica.complete == NEVER

    def test_a_copy_that_was_on_its_way_when_the_replica_was_let_go_of_is_not_kept(self) -> None:
        replica = Replica(1)
        replica.open(2)
        replica.put(2, {(1, 7): copy_of(7)}, {})
        for _ in range(2):
            replica.clear(2)
        with pytest.raises(ShardUnavailableError, match="replica of shard 1: expected it to be open; it was closed"):
            replica.put(2, {(1, 8): copy_of(8)}, {ModelRef("m", 1): kept(ModelRef("m", 1))})
        assert (replica.copies, replica.records, replica.nbytes) == ({}, {}, 0)
        assert replica.freed == ["block 7", "block 8"]
        assert replica.open(1) == 2  # an incarnation that is over does not open it
        with pytest.raises(ShardUnavailableError):
            replica.put(2, {(1, 8): copy_of(8)}, {})
        replica.open(2)
        replica.put(2, {(1, 8): copy_of(8)}, {})
        assert list(replica.copies) == [(1, 8)]


class Replicated(RuleBasedStateMachine):
    """A shard and its backup: messages come once, twice, late or never; a sync makes the replica right."""

    def __init__(self) -> None:
        super().__init__()
        self.incarnation, self.serial = 1, 0
        self.segments: set[SegmentId] = set()
        self.refs: set[ModelRef] = set()
        self.put: dict[SegmentId, str] = {}
        self.replica = Replica(1)
        self.replica.open(1)
        self.handles: list[str] = []

    def told(self, incarnation: int, serial: int) -> None:
        """A message that puts a segment and the version of that number."""
        self.handles.append(f"block {serial}.{len(self.handles)}")
        copies = {(1, serial): Copy((4,), (0,), self.handles[-1])}
        ref = ModelRef("m", serial)
        try:
            self.replica.put(incarnation, copies, {ref: kept(ref)})
        except ShardUnavailableError:
            assert incarnation < self.incarnation

    @rule()
    def commit(self) -> None:
        self.serial += 1
        self.segments.add((1, self.serial))
        self.refs.add(ModelRef("m", self.serial))
        self.told(self.incarnation, self.serial)

    @precondition(lambda self: self.segments)
    @rule(data=st.data())
    def message_comes_again(self, data: st.DataObject) -> None:
        self.told(self.incarnation, data.draw(st.sampled_from(sorted(self.segments)))[1])

    @precondition(lambda self: self.serial)
    @rule(data=st.data())
    def message_of_an_earlier_life(self, data: st.DataObject) -> None:
        if self.incarnation > 1:
            self.told(data.draw(st.integers(1, self.incarnation - 1)), data.draw(st.integers(1, self.serial)))

    @precondition(lambda self: self.segments)
    @rule(data=st.data(), heard=st.booleans())
    def retire(self, data: st.DataObject, heard: bool) -> None:
        segment = data.draw(st.sampled_from(sorted(self.segments)))
        ref = ModelRef("m", segment[1])
        self.segments.discard(segment)
        self.refs.discard(ref)
        if heard:
            for _ in range(2):
                self.replica.drop(self.incarnation, [segment], [ref])

    @rule()
    def start_again(self) -> None:
        """All that was committed comes back from the replica."""
        assert self.replica.copies.keys() >= self.segments
        assert self.replica.records.keys() >= self.refs
        self.incarnation += 1
        assert self.replica.open(self.incarnation) == self.incarnation
        self.segments, self.refs = set(self.replica.copies), set(self.replica.records)

    @rule()
    def lose_the_backup(self) -> None:
        self.replica = Replica(1)
        self.handles = []
        self.replica.open(self.incarnation)
        segments, refs = self.replica.sync(self.incarnation, self.segments, self.refs)
        assert (segments, refs) == (self.segments, self.refs)
        for _, serial in segments:
            self.told(self.incarnation, serial)

    @rule()
    def sync(self) -> None:
        assert self.replica.sync(self.incarnation, self.segments, self.refs) == (set(), set())
        assert (self.replica.copies.keys(), self.replica.records.keys()) == (self.segments, self.refs)

    @invariant()
    def every_block_is_kept_or_free_once(self) -> None:
        held = [copy.handle for copy in self.replica.copies.values()]
        assert sorted(held + self.replica.freed) == sorted(self.handles)
        assert self.replica.nbytes == sum(copy.length for copy in self.replica.copies.values())


class ReplicaStores:
    """The replica stores of shards 1 and 2, of which some do not answer; it stands for `Peers` of shard 0."""

    def __init__(self) -> None:
        self.topology = Topology("r", (0, 1, 2), "node")
        self.others = [1, 2]
        self.silent: set[int] = set()
        self.full = False
        self.refused = 0
        self.replica_stores = {shard: self.replica_store(shard) for shard in self.others}

    def replica_store(self, shard: int) -> ReplicaStore:
        context = context_of(ShardState(shard, lambda _: 0))
        return ReplicaStore(context, Copying(context, Admission(context, LocalClients(), None)), lambda: None)

    def call(self, shard: int, request: Request[Any], timeout: float) -> Any:
        if shard in self.silent:
            raise OperationTimeoutError(f"shard {shard} is silent")
        if self.full and request.remote is ShardCalls.sync_replica:
            self.refused += 1
            raise StoreFullError(f"save replica/0.{self.refused}: expected room")
        if request.remote is ShardCalls.node:
            return f"node {shard}"
        return asyncio.run(getattr(self.replica_stores[shard], request.remote.name)(*request.arguments))

    def told(self, shard: int, *requests: Request[Any]) -> None:
        for request in requests:
            self.call(shard, request, 1.0)

    def replica(self, shard: int) -> Replica:
        return self.replica_stores[shard]._replicas[0]

    def begin(self, monkeypatch: pytest.MonkeyPatch) -> tuple[Restored, Replication]:
        """Shard 0 starts again, on node 0."""
        monkeypatch.setattr("tensorvine.actors.shard.replicas.restore.SILENT_S", 0.0)
        self.state = state = ShardState(0, lambda _: 0)
        context = context_of(state, self, replicas=2)
        self.tenure: Any = context.tenure
        restored = restore(context, {"mine": 0, "theirs": 1}.__getitem__)
        return restored, Replication(context, restored, None)


@pytest.fixture
def replica_stores(monkeypatch: pytest.MonkeyPatch) -> Iterator[ReplicaStores]:
    monkeypatch.setattr("tensorvine.actors.shard.replicas.replication.TICK_S", 0.01)
    monkeypatch.setattr("tensorvine.actors.shard.replicas.replication.MARK_S", 0.01)
    monkeypatch.setattr("tensorvine.actors.shard.replicas.replication.LOOK_S", 0.01)
    monkeypatch.setattr("tensorvine.actors.shard.replicas.replica_set.PATIENCE_S", 0.0)
    replica_stores = ReplicaStores()
    yield replica_stores
    replica_stores.topology = Topology("r", (1, 2), "node")  # shard 0 has drained: its thread tells nobody any more


class TestAShardThatWasSilentWhenAnotherStartedAgain:
    def test_lets_go_of_its_replica_when_it_answers(
        self, replica_stores: ReplicaStores, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        replica_store = replica_stores.replica_stores[2].name
        block = {(0, 1): Original((4,), (0,), b"abcd")}
        replica_stores.told(
            2,
            ShardCalls.open_replica(0, 5),
            ShardCalls.put_in_replica(ReplicaOf(0, 5, replica_store), block, {}, None, 1.0),
        )
        assert replica_stores.replica(2).nbytes
        replica_stores.silent = {2}
        restored, replicas = replica_stores.begin(monkeypatch)
        assert (restored.incarnation, restored.unheard) == (1, {2})
        eventually(lambda: not replicas.behind, "the backup to have all", pause=0.001)
        replica_stores.silent = set()
        eventually(lambda: not replica_stores.replica(2).nbytes, "shard 2 to let go", pause=0.001)
        assert replica_stores.replica(2).closed
        eventually(
            lambda: replica_stores.replica(1).incarnation == replica_stores.replica(2).incarnation > 5,
            "an incarnation above all",
            pause=0.001,
        )
        eventually(lambda: not replicas.behind, "the backup to have all", pause=0.001)

    def test_does_not_end_a_life_that_others_go_by(
        self, replica_stores: ReplicaStores, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        restored, replicas = replica_stores.begin(monkeypatch)
        assert (restored.incarnation, restored.unheard) == (1, set())
        eventually(lambda: not replicas.behind, "the backup to have all", pause=0.001)
        replica_stores.told(1, ShardCalls.open_replica(0, 2))  # another process is shard 0 now
        eventually(lambda: "2 runs elsewhere" in replicas._late().args[0], "it to be refused", pause=0.001)
        assert replica_stores.replica(1).incarnation == 2


class TestAProcessThatWasGivenUp:
    """A node that did not answer comes back, and what ran there tells others what it kept, until it hears its end."""

    @pytest.mark.parametrize("starts_again", [False, True], ids=["as it was", "started again"])
    def test_leaves_nothing_where_its_successor_keeps_no_copy(
        self, replica_stores: ReplicaStores, monkeypatch: pytest.MonkeyPatch, starts_again: bool
    ) -> None:
        replica_stores.told(1, ShardCalls.open_replica(0, 1))
        restored, replicas = replica_stores.begin(monkeypatch)
        assert restored.incarnation == 2
        eventually(lambda: not replicas.behind, "the backup to have all", pause=0.001)
        assert [backup.shard for backup in replicas._replica_set.backups] == [1]
        if starts_again:
            eventually(lambda: replica_stores.replica(2).incarnation == 2, "the other to hear", pause=0.001)
            replica_stores.replica_stores[2] = replica_stores.replica_store(2)
        block = {(0, 1): Original((4,), (0,), b"abcd")}
        of = ReplicaOf(0, 1, replica_stores.replica_stores[2].name)
        with contextlib.suppress(ShardUnavailableError):  # the other has heard already
            replica_stores.told(2, ShardCalls.open_replica(0, 1), ShardCalls.put_in_replica(of, block, {}, None, 1.0))
        eventually(lambda: replica_stores.replica(2).incarnation == 2, "the other to hear", pause=0.001)
        eventually(lambda: not replica_stores.replica(2).nbytes, "the other to let go of it", pause=0.001)
        with pytest.raises(ShardUnavailableError, match="expected its incarnation 2"):
            replica_stores.told(2, ShardCalls.put_in_replica(of, block, {}, None, 1.0))
        assert not replicas.behind

    def test_has_no_copy_let_go_of_without_a_lease(
        self, replica_stores: ReplicaStores, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tensorvine.actors.shard.replicas.replication.TICK_S", 3600.0)
        restored, replicas = replica_stores.begin(monkeypatch)
        replicas._tick()
        assert not replicas.behind
        block = {(0, 1): Original((4,), (0,), b"abcd")}
        of = ReplicaOf(0, restored.incarnation, replica_stores.replica_stores[2].name)
        replica_stores.told(
            2,
            ShardCalls.open_replica(0, restored.incarnation),
            ShardCalls.put_in_replica(of, block, {}, None, 1.0),
        )
        replicas._replica_set.former.add(2)
        replica_stores.tenure.holds = False
        replicas._tick()
        assert replica_stores.replica(2).nbytes  # its successor may be about to ask for it
        replica_stores.tenure.holds = True
        replicas._tick()
        assert not replica_stores.replica(2).nbytes


def draft_of(name: str) -> Draft:
    graph = ModelGraph(()).to_json()
    return Draft(
        name=name,
        save=Save("client", 1),
        parent=None,
        quality=None,
        metadata="{}",
        graph_key=b"key",
        architecture=(graph, None),
        body=encode_body({}),
        holds={},
        bytes_owned=0,
        bytes_total=0,
    )


def committed(*names: str) -> ShardState:
    """A shard with a version of each of these names, without tensors."""
    state = ShardState(0, lambda _: 0)
    state.open("client", now=0.0)
    for draft in map(draft_of, names):
        state.publish(state.begin_commit(draft), draft, created_ns=1)
    return state


class TestNamesThatMove:
    refs = tuple(ModelRef(name, 1) for name in ("mine", "theirs"))

    @pytest.fixture
    def begun(self, replica_stores: ReplicaStores, monkeypatch: pytest.MonkeyPatch) -> tuple[Restored, Replication]:
        """Shard 0 starts again; its replica has versions of two names, of which one has arrived elsewhere."""
        before, replica_store = committed("mine", "theirs"), replica_stores.replica_stores[1].name
        of, records = ReplicaOf(0, 1, replica_store), {ref: before.kept(ref) for ref in self.refs}
        replica_stores.told(
            1,
            ShardCalls.open_replica(0, 1),
            ShardCalls.put_in_replica(of, {}, records, None, 1.0),
            ShardCalls.mark_replica(of, (1, 1)),
        )
        return replica_stores.begin(monkeypatch)

    def test_what_has_gone_with_its_name_does_not_come_back(
        self, replica_stores: ReplicaStores, begun: tuple[Restored, Replication]
    ) -> None:
        restored, replicas = begun
        assert restored.refs == [self.refs[0]]
        assert replica_stores.state.live == {self.refs[0]}
        eventually(lambda: not replicas.behind, "the backup to have all", pause=0.001)
        assert set(replica_stores.replica(1).records) == {self.refs[0]}

    def test_a_version_on_its_way_is_kept_until_it_has_arrived(
        self, replica_stores: ReplicaStores, begun: tuple[Restored, Replication]
    ) -> None:
        _, replicas = begun
        eventually(lambda: not replicas.behind, "the backup to have all", pause=0.001)
        replica_stores.state.hand_over(["mine"])
        for _ in range(2):  # what it was told last tells all that went before
            told = replicas._marks
            eventually(lambda told=told: replicas._marks > told + 1, "the backup to be told", pause=0.001)
            assert set(replica_stores.replica(1).records) == {self.refs[0]}
        replica_stores.state.departing = frozenset()
        eventually(lambda: not replica_stores.replica(1).records, "the backup to let go", pause=0.001)


class TestABuddyThatStartsAgain:
    def test_has_nothing_of_a_commit_on_its_way_before_it_is_told(
        self, replica_stores: ReplicaStores, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _, replicas = replica_stores.begin(monkeypatch)
        eventually(lambda: not replicas.behind, "the backup to have all", pause=0.001)
        replica_stores.state.open("client", now=0.0)
        ref, backup = replica_stores.state.begin_commit(draft_of("mine")), replicas._replica_set.backups[0]
        backup.records.add(ref)  # it was told, and then started again
        assert replicas.have(ref)
        replica_stores.replica_stores[backup.shard] = replica_stores.replica_store(backup.shard)
        eventually(
            lambda: replica_stores.replica_stores[backup.shard]._replicas, "the new incarnation to be told", pause=0.001
        )
        eventually(
            lambda: not replicas.behind and backup.replica_store == replica_stores.replica_stores[backup.shard].name,
            "all",
            pause=0.001,
        )
        assert not replicas.have(ref)


class TestABuddyWithoutRoom:
    def test_is_tried_once_each_time_whatever_its_error_says(
        self, replica_stores: ReplicaStores, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("tensorvine.actors.shard.replicas.replication.TICK_S", 60.0)
        replica_stores.full = True
        _, replicas = replica_stores.begin(monkeypatch)
        for number in range(1, 31):
            replicas.news()
            eventually(lambda least=number: replica_stores.refused >= least, "the next try", pause=0.001)
        assert replica_stores.refused == 30
        assert len([record for record in caplog.records if "is behind" in record.message]) == 1
        replica_stores.full = False
        replicas.news()
        eventually(lambda: not replicas.behind, "the backup to have all", pause=0.001)


Replicated.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestReplicated = Replicated.TestCase
