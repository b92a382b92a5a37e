"""Updates from a training process to another model, compared with files by Keras and h5py, and with floors.

Every tensor changes in every version. NT3 and PtychoNN have the papers' sizes (Viper, section 5).

Rules
- A party's time begins when the training hands over, and ends when the other model would answer with the new version.
- TensorVine runs in blocks, one way and one repository at a time, because memory has no room for more. In each block
  floors and files run in turn with it; files take part in fewer turns.
- Between two updates everything changes, and the machine comes to rest; neither is timed.
- The first versions of a block, which take memory from the system, do not count; the very first is reported apart.
- Files are read the moment they are written: notifying their reader costs nothing here. Only TensorVine's are synced.
- A block that does not fit into the free memory is left out, with a note.
"""

from __future__ import annotations

import gc
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

from .core.clusters import raylets, repository_on, started_on
from .core.measure import (
    GIB,
    MIB,
    ONE_COPY,
    Tensors,
    buffers_like,
    copying,
    equal,
    expect,
    in_turn,
    progress,
    quiet,
    sample,
    timed,
    total_bytes,
    wait_until,
)
from .core.report import Effort, Goal, Report

SPARE_S = 0.005
"""Part of an update on one node that is not compared with the floor."""
STORE_MODELS = 5
"""Models that a shard has room for: two live, one that is still read, and the room that a reservation needs."""
REPOSITORY, STORE_BYTES, TIMEOUT_S = "updates", 5 * GIB, 120.0
FREED_S, SPARED = 10.0, 0.06
"""How long the memory of ended actors takes to come back; share of memory that stays free for Ray."""
CONVERTED = 2
"""Models that a peer has in memory for a while: the file's content, and a framework's tensors."""
KERAS, H5, LOOPBACK = "Keras HDF5", "h5py", "a raw loopback socket"
DECAY = np.float32(1 - 2**-10)


@dataclass(frozen=True)
class Block:
    """One way of TensorVine, which has a repository to itself."""

    name: str
    holds: int
    """Models that shard, object stores and consumer have in memory at most."""
    transport: str = "auto"
    maps: bool = True
    """The consumer uses the arrays as they come; otherwise it fills the variables of a Keras model."""
    far: bool = False
    """The consumer is on the other raylet."""
    synchronous: bool = False


MAPPED = Block("asynchronous, mapped arrays", 4)
FILLED = Block("asynchronous, into Keras' variables", 6, maps=False)
SYNCHRONOUS = Block("synchronous, into Keras' variables", 5, maps=False, synchronous=True)
FILES = Block("files (PFS)", 6, "files")
SOCKET = Block("two raylets, socket", 6, "socket", far=True)
OBJECTS = Block("two raylets, object store", 11, "object_store", far=True)
BLOCKS, FEWER = (MAPPED, FILLED, SYNCHRONOUS, FILES, SOCKET, OBJECTS), (MAPPED, FILLED, SOCKET)


def nt3(*arguments: int) -> Any:
    """Build NT3 in Keras."""
    from .core.networks import keras_nt3

    return keras_nt3(*arguments)


def ptychonn(width: int) -> Any:
    """Build PtychoNN in Keras."""
    from .core.networks import keras_ptychonn

    return keras_ptychonn(width)


QUICK = {"NT3, 1 MiB": (partial(nt3, 20, 1200, 64), (MAPPED, SOCKET))}
CASES = {
    "NT3.A": (partial(nt3, 200), BLOCKS),
    "NT3.B": (partial(nt3, 600), FEWER),
    "PtychoNN, 1 GiB": (partial(ptychonn, 488), FEWER),
}


@dataclass(frozen=True)
class Parts:
    """One update, part by part, in seconds."""

    total_s: float
    stall_s: float = 0.0
    commit_s: float = 0.0
    """From the end of the stall until the training's process had the commit."""
    exists_s: float = 0.0
    """From the hand-over until the shard published the version."""
    notify_s: float = 0.0
    fetch_s: float = 0.0
    swap_s: float = 0.0


def run(report: Report) -> None:
    """Measure all ways next to files and floors."""
    plan = report.pick(quick=(0, 1, 1, False), normal=(3, 5, 4, True))
    for name, (build, blocks) in report.pick(quick=QUICK, normal=CASES).items():
        gc.collect()  # the network before has cycles
        with raylets(2, STORE_BYTES // (10 if report.effort is Effort.QUICK else 1)) as nodes:
            _Measured(report, name, build, plan, nodes).run(blocks)  # an object store never gives memory back
    report.notes.append("files are not synced, except TensorVine's; notifying the peers' readers costs nothing here")


class Filled:
    """A Keras model whose tensors all change at once, as a training changes them."""

    def __init__(self, name: str, build: Callable[[], Any]) -> None:
        from tensorvine.store.keras_memory import WeightMemory

        self.model = build()
        memory, rng = WeightMemory(self.model), np.random.default_rng(0)
        self.arrays: Tensors = {}
        for tensor in memory.weights:
            array = memory.in_place(tensor)
            if array is None:
                raise RuntimeError(f"{name}: expected tensor {tensor!r} in memory that NumPy can write to")
            rng.random(dtype=np.float32, out=array)
            array -= np.float32(0.5)
            array *= np.float32(np.sqrt(12 / max(1, np.prod(array.shape[:-1]))))
            self.arrays[tensor] = array
        self.nbytes = total_bytes(self.arrays)

    def step(self) -> None:
        """Change everything."""
        for array in self.arrays.values():
            array *= DECAY

    def sample(self) -> Any:
        """Return a batch of one sample."""
        return np.random.default_rng(1).random((1, *self.model.input_shape[1:]), dtype=np.float32)


class Mapped:
    """A model without a framework that uses the arrays as they come; it answers with a value of each tensor."""

    def __init__(self) -> None:
        self._tensors: Mapping[str, Any] = {}

    def assign(self, tensors: Mapping[str, Any]) -> None:
        """Take a version."""
        self._tensors = tensors

    def __call__(self, place: int) -> dict[str, float]:
        """Return the value at a place of each tensor."""
        return values_at(self._tensors, place)


def values_at(tensors: Mapping[str, Any], place: int) -> dict[str, float]:
    """Return the value at a place of each tensor."""
    return {name: float(array.flat[place % array.size]) for name, array in tensors.items()}


def updated(publisher: Any, consumer: Any, model: Any) -> tuple[float, Any, Any]:
    """Publish a model and wait for the consumer; return the time of the hand-over, the version and the delivery."""
    handed = time.time()
    ref = publisher.publish(model).committed(TIMEOUT_S).ref
    consumer.wait_for(ref.version, TIMEOUT_S)
    found: list[Any] = []

    def noted() -> bool:  # the consumer's model may answer a moment before the delivery is noted
        found[:] = [each for each in consumer.status().deliveries if each.ref.version == ref.version]
        return bool(found)

    wait_until(noted, f"a delivery of version {ref.version}", timeout=TIMEOUT_S)
    return handed, ref, found[0]


@contextmanager
def loopback(arrays: Tensors, buffers: Tensors) -> Iterator[Callable[[], None]]:
    """Yield a function that sends arrays through a TCP connection of this machine into buffers, by a thread."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()

    def send() -> None:
        for array in arrays.values():
            sender.sendall(array.reshape(-1).view(np.uint8).data)

    def through() -> None:
        thread = threading.Thread(target=send)
        thread.start()
        for buffer in buffers.values():
            receive(receiver, buffer.reshape(-1).view(np.uint8).data)
        thread.join()

    with sender, receiver:
        yield through


def receive(connection: socket.socket, memory: memoryview) -> None:
    """Fill memory from a connection."""
    while memory:
        count = connection.recv_into(memory)
        if not count:
            raise EOFError(f"raw socket: expected {len(memory)} more bytes; found its end")
        memory = memory[count:]


class _Measured:
    """The measurements with one network."""

    def __init__(
        self, report: Report, name: str, build: Callable[[], Any], plan: tuple[int, int, int, bool], nodes: Any
    ) -> None:
        self._report, self._name, self._build, self._nodes = report, name, build, nodes
        self._warmup, self._rounds, self._every, self._rests = plan
        self._filled = Filled(name, build)
        self._cold: dict[str, Parts] = {}
        self._warm: dict[str, list[Parts]] = {}
        self._published_at = 0.0

    def run(self, blocks: Sequence[Block]) -> None:
        """Measure block by block, then add the rows."""
        filled, size = self._filled, self._filled.nbytes
        done: list[Block] = []
        with tempfile.TemporaryDirectory(prefix="update-") as folder, ExitStack() as stack:
            buffers = buffers_like(filled.arrays)
            copy, send = copying(filled.arrays, buffers), stack.enter_context(loopback(filled.arrays, buffers))
            consumer = self._build()
            common: dict[str, Callable[[], Parts]] = {
                KERAS: partial(self._by_keras, Path(folder, "keras.weights.h5"), consumer),
                H5: partial(self._by_h5py, Path(folder, "plain.h5")),
                ONE_COPY: lambda: Parts(timed(copy)[0]),
                LOOPBACK: lambda: Parts(timed(send)[0]),
            }
            for block in blocks:
                need = (block.holds + CONVERTED) * size + GIB // 2
                if (room := _room(need)) < need:
                    text = f"it needs {need / GIB:.3g} GiB; {room / GIB:.3g} GiB are free"
                    self._report.notes.append(f"{self._name}: {block.name} is left out: {text}")
                    continue
                progress(f"{self._name}, {size / MIB:.0f} MiB: {block.name}")
                with self._ours(block, Path(folder) / "repository") as (update, check):
                    self._alternate({block.name: update, **common})
                    self._filled.step()
                    update()
                    check()
                done.append(block)
            filled.step()
            common[KERAS]()
            weights = zip(consumer.weights, filled.model.weights, strict=True)
            expect(all(np.array_equal(one.numpy(), two.numpy()) for one, two in weights), KERAS, "the same variables")
            send()
            expect(equal(buffers, filled.arrays), LOOPBACK, "the same tensors")
        self._add(done)

    def _alternate(self, parties: Mapping[str, Callable[[], Parts]]) -> None:
        for turn in range(self._warmup + self._rounds):
            playing = [name for name in parties if name not in (KERAS, H5) or turn % self._every == 0]
            for name in in_turn(playing, turn):
                self._filled.step()
                gc.collect()
                if self._rests:
                    quiet(since=self._published_at)
                parts = parties[name]()
                if name not in (KERAS, H5, ONE_COPY, LOOPBACK):
                    self._published_at = time.monotonic()
                if name not in self._cold:
                    self._cold[name], self._warm[name] = parts, []
                elif name in (KERAS, H5) or turn >= self._warmup:
                    self._warm[name].append(parts)

    def _by_keras(self, path: Path, consumer: Any) -> Parts:
        start = time.perf_counter()
        self._filled.model.save_weights(path)
        saved = time.perf_counter()
        consumer.load_weights(path)
        end = time.perf_counter()
        path.unlink()
        return Parts(end - start, stall_s=saved - start, fetch_s=end - saved)

    def _by_h5py(self, path: Path) -> Parts:
        import h5py

        start = time.perf_counter()
        with h5py.File(path, "w") as file:
            for name, array in self._filled.arrays.items():
                file.create_dataset(name, data=array)
        saved = time.perf_counter()
        with h5py.File(path, "r") as file:
            datasets: Any = file
            read = {name: datasets[name][()] for name in self._filled.arrays}
        end = time.perf_counter()
        path.unlink()
        expect(total_bytes(read) == self._filled.nbytes, H5, "all tensors")
        return Parts(end - start, stall_s=saved - start, fetch_s=end - saved)

    @contextmanager
    def _ours(self, block: Block, path: Path) -> Iterator[tuple[Callable[[], Parts], Callable[[], None]]]:
        """Start a repository, a consumer and a publisher; yield the update and a check of the consumer's answers."""
        from tensorvine.actors import Consumer, Publisher

        here, other = self._nodes
        filled, way = self._filled, "files" if block.transport == "files" else "auto"
        build: Callable[[], Any] = Mapped if block.maps else self._build
        node, store = other if block.far else here, STORE_MODELS * filled.nbytes + GIB // 16
        with ExitStack() as stack:
            kept_on = path if way == "files" else None
            repo = stack.enter_context(repository_on(here, REPOSITORY, path=kept_on, store_bytes=store))
            consumer = stack.enter_context(
                started_on(
                    node,
                    lambda: Consumer.start(repo, "net", build, transport=block.transport, node=node),
                    lambda consumer: consumer.actor,
                )
            )
            publisher = stack.enter_context(
                Publisher(repo, "net", 1, transport=way, synchronous=block.synchronous, keep=1)
            )

            def update() -> Parts:
                handed, ref, delivery = updated(publisher, consumer, filled.model)
                made, exists = publisher.report().updates[-1], repo.info(ref).created.timestamp()
                notify = delivery.notified_at - exists
                times = made.stall_s, made.commit_s, exists - handed, notify, delivery.fetch_s, delivery.swap_s
                return Parts(delivery.swapped_at - handed, *times)

            def check() -> None:
                if block.maps:
                    for place in (0, 7, -1):
                        answer = consumer.infer(place, TIMEOUT_S).outputs
                        expect(answer == values_at(filled.arrays, place), block.name, "the training's values")
                    return
                answers = (
                    consumer.infer(filled.sample(), TIMEOUT_S).outputs,
                    filled.model.predict_on_batch(filled.sample()),
                )
                pairs = zip(*(each if isinstance(each, list) else [each] for each in answers), strict=True)
                same = all(np.allclose(one, two, rtol=1e-4, atol=1e-5) for one, two in pairs)
                expect(same, block.name, "the training's answers")

            yield update, check

    def _add(self, done: Sequence[Block]) -> None:
        """Add the table of all parties, and rows of each way next to Keras' and h5py's files."""
        counted = {name: warm or [self._cold[name]] for name, warm in self._warm.items()}
        table = self._report.tables.setdefault("medians of each part; of a file: written, read", [])
        medians: dict[str, dict[str, float]] = {}
        for name, parts in counted.items():
            each = [asdict(one) for one in parts]
            medians[name] = {part: median(one[part] for one in each) for part in each[0]}
            table.append({"network": self._name, "party": name, "cold_s": self._cold[name].total_s, **medians[name]})
        found = {name: sample([each.total_s for each in parts]) for name, parts in counted.items()}
        for block in done:
            ours, floor = found[block.name], LOOPBACK if block.far else ONE_COPY
            factors = {KERAS: 4, H5: None} if block.far else {KERAS: 12, H5: 5}
            for peer, factor in factors.items():
                goals: list[Goal] = []
                if block is not FILES and factor is not None:
                    goals.append(Goal(f"times faster than {peer}", found[peer].median / ours.median, at_least=factor))
                if peer == KERAS and block.far:
                    goals.append(Goal("raw loopback sockets", ours.median / found[floor].median, at_most=2.5))
                elif peer == KERAS and block is not FILES:
                    copies = max(ours.median - SPARE_S, 0.0) / found[floor].median
                    goals.append(Goal("memory copies, beside 5 ms", copies, at_most=1.5 if block.maps else 2.5))
                self._report.add(
                    f"{self._name}: {block.name}",
                    ours,
                    self._filled.nbytes,
                    peer=(peer, found[peer]),
                    floor=(floor, found[floor]),
                    goals=goals,
                    headline=self._name == "NT3.B" and block is MAPPED and peer == KERAS,
                    **medians[block.name],
                )


def _room(need: int) -> int:
    """Return the bytes of memory that may be used; wait for the memory of the block before if they are too few."""
    end, spare = time.monotonic() + FREED_S, int(SPARED * psutil.virtual_memory().total)
    while (room := psutil.virtual_memory().available - spare) < need and time.monotonic() < end:
        time.sleep(0.1)
    return room
