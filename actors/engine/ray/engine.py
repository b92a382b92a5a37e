"""Ray behind the engine seam.

Rules (each measured or read in Ray's source, see docs/design/engine.md)
- Actors are named in the namespace `tensorvine`, and take no CPU slot unless their `Lifetime` says so. Where a node is
  named they ask for one byte of its memory: without any demand, Ray 2.60 puts 3 to 7 of 10 elsewhere in spite of
  their affinity.
- Services are detached and restart for ever; others live as their `Lifetime` says. Calls are not retried: what may be
  repeated is the caller's to know.
- Memory is reserved by a placement group that is bound to a node by its label: an actor that asked for it itself could
  not be started again on a node that has less left. Ray removes a group when its creator has ended or starts again.
- An object dies with the process that put it, so only shards put what lasts.
- Ray carries no call of ours but the one that asks an actor for its address (`hosted`).
- Errors that Ray wraps are unwrapped here; foreign ones are mapped to the one tree.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from functools import cache
from typing import Any, NoReturn, cast

import ray
import ray.exceptions
import ray.util
from ray._private.state import state  # as Ray Serve and Ray Data learn which nodes drain
from ray.experimental import internal_kv
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from ....store import errors
from ....store.errors import (
    EngineStoppedError,
    ModelLostError,
    OperationTimeoutError,
    ShardUnavailableError,
    TensorVineError,
)
from ....store.waiting import Backoff, Deadline
from ..engine import SERVICE, Actor, Handle, Lifetime, Node
from ..opened import Opened
from ..sockets.framing import SocketAddress
from . import control_service
from .hosted import hosted

NAMESPACE = "tensorvine"

log = logging.getLogger(__name__)

_DIED = (ray.exceptions.RayActorError, ray.exceptions.NodeDiedError, ray.exceptions.RaySystemError)
_ASK_S = 2.0
"""How long an actor may take to return its address before it is asked again. A call that was sent before Ray knew that
the actor is being restarted waits until it has started; a later one fails at once."""
_FREED_S = 10
"""How long it may take until memory that was let go is known to be free."""
_MADE_S = 60
"""How long it may take until memory that is free is set aside, on the busiest machine."""
_NEXT_LOOK_MS = 500
"""How far away the next look for room is at least when a placement group that waits for it is removed."""
_SPARE_BYTES = 1 << 20
"""Of a node's memory, left for actors that ask for a byte of it: without, they would wait for ever."""
_LOST = (ray.exceptions.ObjectLostError, ray.exceptions.ObjectFreedError)


class RayEngine:
    """The engine on Ray; Ray must be initialised in this process (see `embedded`)."""

    def nodes(self) -> list[Node]:
        """List living nodes, the driver's own first."""
        here = self.this_node()
        with _head_asked("nodes"):
            known = cast("list[dict[str, Any]]", ray.nodes())
            draining = state.get_draining_nodes()
            free = _memory_free()
        alive = [
            Node(
                row["NodeID"],
                free.get(row["NodeID"], int(row["Resources"].get("memory", 0))),  # a new one has all that it has
                row["Resources"],
                row.get("Labels", {}),
                row["NodeID"] in draining,
                row["NodeManagerAddress"],
            )
            for row in known
            if row["Alive"]
        ]
        return sorted(alive, key=lambda node: (node.id != here, node.id))

    def this_node(self) -> str:
        """Return the id of this process's node."""
        return ray.get_runtime_context().get_node_id()

    def address(self) -> str:
        """Return the IP address of this process's node."""
        return cast(str, ray.util.get_node_ip_address())

    def spawn(
        self,
        cls: type,
        name: str,
        arguments: Mapping[str, object],
        node: str | None = None,
        lifetime: Lifetime = SERVICE,
    ) -> Actor:
        """Start or find a named actor."""
        placed: dict[str, Any] = {"num_cpus": lifetime.cpus, "num_gpus": lifetime.gpus}
        if lifetime.bundle is not None:
            group, index = lifetime.bundle
            placed["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, index)
        elif node is not None:
            placed |= {"memory": 1, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=True)}
        elif lifetime.spread:
            placed["scheduling_strategy"] = "SPREAD"
        restarts = -1 if lifetime.restarts else 0
        kept = "detached" if lifetime.outlives else None
        options = dict(name=name, namespace=NAMESPACE, lifetime=kept, get_if_exists=True, **placed)
        with _head_asked(name):
            return _actor_class(cls).options(max_restarts=restarts, **options).remote(**arguments)

    def find(self, name: str) -> Actor:
        """Find a named actor."""
        try:
            with _head_asked(name):
                return cast(Actor, ray.get_actor(name, namespace=NAMESPACE))
        except ValueError as exc:
            raise LookupError(f"no actor named {name!r} in namespace {NAMESPACE!r}") from exc

    def actors(self) -> dict[str, str | None]:
        """List the named actors; a head that has ended is told at once: Ray would try to reach it for a minute."""
        _check_running("actors")
        try:
            control_service.connection(cast("Any", ray.get_runtime_context()).gcs_address).close()
        except ConnectionError as exc:
            raise ShardUnavailableError(f"actors: expected an answer from the cluster's head; {exc}") from exc
        with _head_asked("actors"):
            named: Any = ray.util.list_named_actors(all_namespaces=True)  # its annotation leaves this form out
            living = cast("dict[str, dict[str, Any]]", state.actor_table(None, actor_state_name="ALIVE"))
        nodes = {row["Name"]: cast("str", row["Address"]["NodeID"]) for row in living.values()}
        return {row["name"]: nodes.get(row["name"]) for row in named if row["namespace"] == NAMESPACE}

    def kill(self, name: str) -> None:
        """End a named actor for good."""
        if not ray.is_initialized():
            return
        try:
            with _head_asked(name):
                ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
        except ValueError:
            return

    def reserve(self, name: str, node: str, nbytes: int, *, wait: bool = True) -> bool:
        """Reserve memory by a placement group of one bundle."""
        pauses, deadline = Backoff(0.05, 0.5), Deadline.after(_FREED_S if wait else 0.0)
        with _head_asked(name):
            totals = cast("dict[str, dict[str, float]] | None", state.total_resources_per_node()) or {}
            total = totals.get(node)  # None: it is so new that the head does not know yet
            if total is not None and nbytes > total.get("memory", 0):
                return False
            while _memory_free().get(node, 0) < nbytes + _SPARE_BYTES:
                if not pauses.wait(deadline):
                    return False
            label = {"ray.io/node-id": node}
            made = ray.util.placement_group([{"memory": max(nbytes, 1)}], name=name, bundle_label_selector=[label])
            if _is_made(made) and _memory_free().get(node, 0) >= _SPARE_BYTES:
                return True
            ray.util.remove_placement_group(made)  # another one took the rest at the same moment
            return False

    def unreserve(self, name: str) -> None:
        """Remove a placement group."""
        for group in _groups(name):
            if group["name"] == name:
                with _head_asked(name):
                    made = PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group["placement_group_id"])))
                    ray.util.remove_placement_group(made)

    def reserved(self, prefix: str) -> dict[str, str | None]:
        """List placement groups, and where they are."""
        return {
            group["name"]: group["bundles_to_node_id"].get(0) if group["state"] == "CREATED" else None
            for group in _groups(prefix)
        }

    def restarted(self) -> bool:
        """Tell whether this actor was restarted."""
        own = ray.get_runtime_context().get_actor_id()
        return own is not None and bool(cast("dict[str, Any]", state.actor_table(own)).get("NumRestarts"))

    def keep(self, name: str, value: bytes | None) -> None:
        """Keep bytes in the key-value store of Ray's head, without which no actor of the cluster lives."""
        with _head_asked(name):
            if value is None:
                internal_kv._internal_kv_del(name, namespace=NAMESPACE)
            else:
                internal_kv._internal_kv_put(name, value, overwrite=True, namespace=NAMESPACE)

    def keep_absent(self, name: str, value: bytes) -> bool:
        """Keep bytes there, unless the name is kept."""
        with _head_asked(name):
            return not internal_kv._internal_kv_put(name, value, overwrite=False, namespace=NAMESPACE)

    def kept(self, prefix: str) -> dict[str, bytes]:
        """Return what is kept there."""
        with _head_asked(prefix):
            names = internal_kv._internal_kv_list(prefix, namespace=NAMESPACE)
            found: list[bytes | None] = [internal_kv._internal_kv_get(name, namespace=NAMESPACE) for name in names]
        return {name.decode(): value for name, value in zip(names, found, strict=True) if value is not None}

    def reach(self, actor: Any, timeout: float, who: str) -> Sequence[SocketAddress]:
        """Ask an actor for its address, again and again: Ray may keep a call that it would refuse now.

        The thread waits outside of Ray: if the process ends, Ray would crash in its call, or raise `SystemExit` in it.
        """
        deadline = Deadline.after(timeout)
        while True:
            _check_running(who)
            asked: ray.ObjectRef[SocketAddress] = actor.tensorvine_reach.remote(self.this_node(), os.geteuid())
            try:
                return [asked.future().result(deadline.left(_ASK_S))]
            except TimeoutError as exc:
                if deadline.passed:
                    _translate(exc, timeout, who)
            except ray.exceptions.RayError as exc:
                _translate(exc, timeout, who)

    def put(self, block: object) -> Handle:
        """Store a block in shared memory."""
        return RayBlock(ray.put(block))

    def get(self, handles: Sequence[object], timeout: float, who: str) -> list[Any]:
        """Map blocks."""
        _check_running(who)
        refs = [handle.ref for handle in cast("Sequence[RayBlock]", handles)]
        try:
            return ray.get(refs, timeout=max(timeout, 0.0))
        except ray.exceptions.RayError as exc:
            _translate(exc, timeout, who)

    def show(self, gauges: Mapping[str, float], labels: Mapping[str, str]) -> None:
        """Set gauges that Ray exports with its own metrics."""
        for name, value in gauges.items():
            _gauge(name, tuple(labels)).set(value, dict(labels))

    def leave(self) -> None:
        """Leave the Ray of this process; one that was started in it ends. Does nothing in a forked child."""
        if not _used().inherited:
            ray.shutdown()


class RayBlock:
    """A block of the object store, as a handle that our sockets can carry.

    Pickling an `ObjectRef` outside of Ray's calls would keep its object until the process ends.
    """

    def __init__(self, ref: ray.ObjectRef[Any]) -> None:
        self.ref = ref

    def __reduce__(self) -> tuple[object, tuple[bytes, bytes, bytes]]:
        ref, owner, status = _core().serialize_object_ref(self.ref)
        return _borrowed, (ref.binary(), owner, status)


def _borrowed(ref: bytes, owner: bytes, status: bytes) -> RayBlock:
    """Return the handle of a block of another process, which may free it after a while."""
    made: Any = ray.ObjectRef
    block = RayBlock(made(ref, owner))
    _core().deserialize_and_register_object_ref(ref, made.nil(), owner, status)
    return block


def _core() -> Any:
    return cast("Any", ray)._private.worker.global_worker.core_worker


def _groups(prefix: str) -> list[dict[str, Any]]:
    """List the placement groups whose names begin so; Ray itself finds names of one namespace only."""
    with _head_asked(prefix):
        groups = cast("dict[str, dict[str, Any]]", ray.util.placement_group_table())
    return [g for g in groups.values() if g["name"].startswith(prefix) and g["state"] != "REMOVED"]


def _is_made(group: PlacementGroup) -> bool:
    """Wait until a placement group is made, or the head found no room for it and is not about to look again.

    Ray 2.60 loses the memory of a group that is removed while it is being made (ray-project/ray#64693). So one that
    waits for room is given up right after a look in vain, when there is time until the next one.
    """
    looks, late, pauses = -1, Deadline.after(_MADE_S), Backoff(0.005, 0.05)
    while True:
        told = cast("dict[str, Any]", ray.util.placement_group_table(group))
        if told["state"] == "CREATED":
            return True
        stats = told["stats"]
        looked = looks not in (-1, stats["scheduling_attempt"]) and stats["highest_retry_delay_ms"] >= _NEXT_LOOK_MS
        if stats["scheduling_state"] == "INFEASIBLE" or (looked and stats["scheduling_state"] == "NO_RESOURCES"):
            return False
        looks = stats["scheduling_attempt"]
        if not pauses.wait(late):
            return False


def _memory_free() -> dict[str, int]:
    """Return the memory that nobody has reserved, by node.

    What the head knows of nodes lags behind: of two that reserve at the same moment each could find there still what
    the other one took. What it has given to placement groups it knows at once.
    """
    available = cast("dict[str, dict[str, float]] | None", state.available_resources_per_node()) or {}
    totals = cast("dict[str, dict[str, float]] | None", state.total_resources_per_node()) or {}
    taken = Counter[str]()
    for group in cast("dict[str, dict[str, Any]]", ray.util.placement_group_table()).values():
        if group["state"] == "CREATED":
            for bundle, node in group["bundles_to_node_id"].items():
                taken[node] += int(group["bundles"][bundle].get("memory", 0))
    return {
        node: min(int(available.get(node, total).get("memory", 0)), int(total.get("memory", 0)) - taken[node])
        for node, total in totals.items()
    }


@contextlib.contextmanager
def _head_asked(what: str) -> Generator[None]:
    """Raise an error of the tree where the head of the cluster does not answer in Ray's time, or there is none."""
    _check_running(what)
    try:
        yield
    except (ray.exceptions.RayError, RuntimeError) as exc:
        raise ShardUnavailableError(f"{what}: expected an answer from the cluster's head; {exc}") from exc


@cache
def _gauge(name: str, labels: tuple[str, ...]) -> Any:
    from ray.util.metrics import Gauge  # a third of a second, which no client needs

    return Gauge(name, tag_keys=labels)


@cache
def _actor_class(cls: type) -> Any:
    """Make a class one of Ray's, once: Ray takes it apart and exports it anew for each that is made."""
    make: Any = ray.remote
    return make(hosted(cls))


def _check_running(what: str) -> None:
    """Refuse what would otherwise start a Ray: its calls do so by themselves where none is initialised."""
    if not ray.is_initialized():
        raise EngineStoppedError(f"{what}: expected the Ray that it was started on; Ray was shut down in this process")
    _used().check_process()


@cache
def _used() -> Opened:
    """Return which process used this engine first: Ray's calls would wait for ever in a forked child of it."""
    return Opened("Ray")


def _translate(exc: BaseException, timeout: float, who: str) -> NoReturn:
    """Raise what a Ray error means in the one tree; what a method raised is raised as it was, and where, is logged."""
    if isinstance(exc, ray.exceptions.RayTaskError):
        cause = cast(object, exc.cause)
        if not isinstance(cause, Exception):
            raise exc
        if not isinstance(cause, TensorVineError):
            log.info("%s: %s", who, exc)  # with the remote traceback
        raise cause from None
    if isinstance(exc, (ray.exceptions.GetTimeoutError, TimeoutError)):
        raise OperationTimeoutError(f"{who}: expected an answer within {timeout:.1f} s; the call timed out") from exc
    if isinstance(exc, _LOST):
        raise ModelLostError(f"{who}: expected bytes in its memory; they were lost when it died ({exc})") from exc
    if isinstance(exc, _DIED):
        gist = _gist(exc)
        raised = _raised(gist) if getattr(exc, "actor_init_failed", False) else None
        if raised is not None:
            raise raised from exc
        raise ShardUnavailableError(f"{who}: expected an answer; it died or is being restarted ({gist})") from exc
    raise exc


def _raised(line: str) -> TensorVineError | None:
    """Return the error that a constructor raised, of which Ray keeps the last line of the traceback; None: of no kind.

    >>> _raised("tensorvine.store.errors.StorageError: /path: expected a directory")
    StorageError('/path: expected a directory')
    """
    kind, _, text = line.partition(": ")
    module, _, name = kind.rpartition(".")
    found = getattr(errors, name, None) if module == errors.__name__ else None
    return found(text) if isinstance(found, type) and issubclass(found, TensorVineError) else None


def _gist(exc: BaseException) -> str:
    """Return one line of what Ray says of an actor's death, without its table of facts and the traceback."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip() and not line.startswith("\t")]
    return lines[-1] if getattr(exc, "actor_init_failed", False) else " ".join(lines)
