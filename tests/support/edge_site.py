"""A repository as it looks from outside the cluster, for tests: of one shard, and its tensors say which version it is.

`Asking` asks one of its consumers all the time.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from tensorvine.actors.catalog.redis_index import Live, RedisIndex
from tensorvine.actors.edge.consumer import EdgeConsumer
from tensorvine.actors.rpc.redis_connection import enter_start
from tensorvine.actors.transport.frames import Served
from tensorvine.actors.transport.tcp_server import TcpServer
from tensorvine.store import ModelGraph, ModelRef
from tensorvine.store.errors import ModelLostError, TensorMismatchError
from tensorvine.store.segments.segment import SegmentId, layout
from tensorvine.store.versions.manifest import Header, TensorEntry, digest_of, encode_body

from tests.support.redis_server import RedisServer
from tests.support.waiting import PATIENCE_S, eventually

NO_GRAPH = ModelGraph(())
SHAPES = {"a": (300, 7), "b": (5,), "c": ()}


def tagged(tag: int) -> dict[str, np.ndarray]:
    """A version of which every element says which one it is."""
    return {name: np.full(shape, tag, np.float32) for name, shape in SHAPES.items()}


class Tagged:
    """Answers with all the tags that its tensors have."""

    def __init__(self) -> None:
        self.tensors: dict[str, np.ndarray] = {}

    def assign(self, tensors: Mapping[str, np.ndarray]) -> None:
        if {name: array.shape for name, array in tensors.items()} != SHAPES:
            raise TensorMismatchError(f"expected {SHAPES}; found {sorted(tensors)}")
        for name in SHAPES:  # one after the other, with a chance for whoever answers in between
            self.tensors[name] = tensors[name]
            threading.Event().wait(0.001)

    def __call__(self, batch: Any) -> set[int]:
        return {int(value) for array in self.tensors.values() for value in np.unique(array)}


class Site:
    """A repository of one shard as it looks from outside: what it posts in Redis, and its TCP server."""

    def __init__(self, server: RedisServer, start: str = "s1") -> None:
        enter_start(server.url, "repo", start)
        self._graphs: dict[bytes, ModelGraph] = {}
        self._live: dict[ModelRef, Live] = {}
        self.board = RedisIndex(
            server.url,
            "repo",
            start,
            live=self._live.get,
            refs=lambda: list(self._live),
            graph_of=lambda key: self._graphs[key].to_json(),
        )
        self.held: dict[SegmentId, tuple[np.ndarray, dict[int, tuple[int, int]], list[str]]] = {}
        self._versions: dict[str, int] = {}
        self._serial = itertools.count(1)
        self.listen()

    def listen(self) -> None:
        """Serve, at a place that was never used before."""
        self.wire = TcpServer(self._answer, "127.0.0.1")
        self.board.shard_at(0, (*self.wire.address, self.wire.token))

    def save(self, name: str, tensors: Mapping[str, np.ndarray], graph: ModelGraph = NO_GRAPH) -> ModelRef:
        segment = (0, next(self._serial))
        arrays = [np.ascontiguousarray(array).reshape(array.shape) for array in tensors.values()]
        offsets, length = layout([array.nbytes for array in arrays])
        block = np.zeros(length, np.uint8)
        slots: dict[int, tuple[int, int]] = {}
        for slot, (offset, array) in enumerate(zip(offsets, arrays, strict=True)):
            block[offset : offset + array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)
            slots[slot] = (offset, array.nbytes)
        digests = [digest_of(block[offset : offset + nbytes]) for offset, nbytes in slots.values()]
        self.held[segment] = (block, slots, digests)
        entries = {
            tensor: TensorEntry(str(array.dtype), array.shape, array.nbytes, None, segment, slot)
            for slot, (tensor, array) in enumerate(tensors.items())
        }
        self._graphs[graph.fingerprint] = graph
        ref = ModelRef(name, self._versions.get(name, 0) + 1)
        self._versions[name] = ref.version
        header = Header(
            ref=ref,
            parent=None,
            quality=0.25,
            metadata='{"epoch": 2}',
            created_ns=time.time_ns(),
            graph_key=graph.fingerprint,
            bytes_owned=length,
            bytes_total=length,
        )
        self._live[ref] = header, encode_body(entries), {segment: 0}
        self.board.changed([ref])
        return ref

    def retire(self, ref: ModelRef) -> None:
        del self._live[ref]
        self.board.changed([ref])

    def close(self) -> None:
        self.wire.close()
        self.board.close()

    def _answer(self, wanted: Any, timeout: float, digests: bool) -> Any:
        gone = [segment for segment in wanted if segment not in self.held]
        if gone:
            raise ModelLostError(f"segments {gone} are gone")
        served: dict[SegmentId, Served] = {}
        for segment, numbers in wanted.items():
            block, slots, _ = self.held[segment]
            served[segment] = Served(block, {slot: slots[slot] for slot in numbers})
        return served, lambda: {
            segment: [self.held[segment][2][slot] for slot in wanted[segment]] for segment in wanted
        }


class Asking:
    """Asks a consumer all the time, and keeps what it answered."""

    def __init__(self, consumer: EdgeConsumer) -> None:
        self._consumer = consumer
        self._closing = threading.Event()
        self.answers = 0
        self.versions: list[int] = []
        self.wrong: list[object] = []
        self._thread = threading.Thread(target=self._ask)

    def more(self) -> None:
        """Wait for answers that began after this was called."""
        before = self.answers
        eventually(lambda: self.answers > before + 2, "more answers")

    def __enter__(self) -> Asking:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join(PATIENCE_S)

    def _ask(self) -> None:
        while not self._closing.is_set():
            try:
                answer = self._consumer.infer(None)
            except Exception as exc:  # noqa: BLE001  the test shows it
                self.wrong.append(exc)
                return
            if answer.outputs != {answer.ref.version}:
                self.wrong.append(answer)
            if not self.versions or self.versions[-1] != answer.ref.version:
                self.versions.append(answer.ref.version)
            self.answers += 1
