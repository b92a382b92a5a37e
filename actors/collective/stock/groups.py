"""Our groups as back ends of `ray.util.collective`: code that is written for it runs on them.

Rules
- Ray knows a back end only in processes that called `register`: each actor of a group, and a driver that calls
  `create_collective_group`.
- A group there is a group here, of its own: groups may overlap, have other orders of the same members, and be made
  anew after `destroy_collective_group`, of other members too. (Ray's own GLOO makes all of them one.)
- All calls wait for their end, as Ray's do. What is not the result is left as it was: `reduce` and `reducescatter`
  work on copies.
- One tensor per member: the calls named `..._multigpu` take lists of one. Which GPU of a peer has it says nothing.
- Before anything is sent or written, all is checked that this member knows. Nothing is broadcast, cast or cut. What the
  others bring is compared by the groups, before anything is written: the call, too (`part_of`).
- Errors are those of the groups, and `RuntimeError` besides, as Ray's back ends raise.
- A read-only array is refused where it is to be written to, unless `register` was told otherwise.
- This is Ray's adapter: nothing else of the groups imports Ray, and nothing else is in here.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import ClassVar, Literal, TypeAlias, TypeVar, cast

from ray.util.collective import backend_registry, types
from ray.util.collective.collective_group.base_collective_group import BaseGroup

from ....store.arrays import Array
from ....store.errors import CollectiveError, TensorMismatchError
from ..connect import connect
from ..group import Group, Op
from .errors import raised_as_rays
from .operands import apart_from, check_alike, check_apart, copy, fill, first
from .read_only import is_read_only, replace_memory

_T = TypeVar("_T")
_Options: TypeAlias = _T | type[_T] | None
"""Ray hands over an instance or, for `allreduce`, the class itself, with the operation of the last call in it."""
_OPS: dict[types.ReduceOp, Op] = {
    types.ReduceOp.SUM: "sum",
    types.ReduceOp.PRODUCT: "product",
    types.ReduceOp.MIN: "min",
    types.ReduceOp.MAX: "max",
}


def register(*, read_only: Literal["refuse", "replace"] | None = None) -> None:
    """Add the back ends of this package to `ray.util.collective` in this process.

    They are named "TENSORVINE" (shared memory on one machine, otherwise Gloo), "TENSORVINE_SHARED", "TENSORVINE_GLOO"
    and "TENSORVINE_NCCL". Call this function in each actor of a group, and in a driver that calls
    `create_collective_group`. Later calls only change the option.

    Calls raise `CollectiveError`, and additionally `ValueError` for a wrong argument, `TensorMismatchError` for a
    tensor that does not fit, `PeerLostError` for a member that died or left, and `OperationTimeoutError` for a member
    that does not answer within 30 s.

    Args:
        read_only: How calls treat a read-only array to which they write, such as an argument of an actor's method,
            whose memory other processes share. `"refuse"` raises `TensorMismatchError`. `"replace"` gives the array
            object its own memory with a copy of its values, and writes there. It still raises if another array uses the
            same memory, or if the array was made read-only in another way. None keeps the setting, initially
            `"refuse"`. The setting applies to all groups of this process.

    Raises:
        ValueError: if another back end has one of these names, or the option is invalid.

    >>> from ray.util import collective  # doctest: +SKIP
    >>> register()  # doctest: +SKIP
    >>> collective.init_collective_group(2, rank, backend="TENSORVINE", group_name="pair")  # doctest: +SKIP
    >>> collective.allreduce(gradient, group_name="pair")  # doctest: +SKIP
    """
    if read_only not in ("refuse", "replace", None):
        raise ValueError(f"register: read_only: expected 'refuse' or 'replace'; found {read_only!r}")
    registry = backend_registry.BackendRegistry()
    for kind in (AutoGroup, SharedGroup, GlooGroup, NcclGroup):
        if not registry.is_registered(kind.backend()):
            backend_registry.register_collective_backend(kind.backend(), kind)
        elif registry.get(kind.backend()) is not kind:
            found = registry.get(kind.backend())
            raise ValueError(f"ray.util.collective: expected the name {kind.backend()} to be free; found {found}")
    if read_only is not None:
        StockGroup.replaces = read_only == "replace"


class StockGroup(BaseGroup):
    """A group as `ray.util.collective` wants it; its subclasses say what carries the bytes.

    Args:
        world_size: how many members.
        rank: this one.
        group_name: of the group.
    """

    carrier: ClassVar[str]
    """The back end that `connect` is given."""
    replaces: ClassVar[bool] = False
    """Whether read-only arrays are given other memory; of this process."""

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        with raised_as_rays():
            try:
                self._group: Group = connect(
                    f"ray.util.collective/{group_name}", rank, world_size, backend=self.carrier
                )
            except (ImportError, ValueError) as exc:  # a ValueError, Ray takes for a group that was never declared
                raise CollectiveError(str(exc)) from exc

    @classmethod
    def backend(cls) -> str:
        """Return the name that Ray knows it by."""
        return f"TENSORVINE_{cls.carrier.upper()}"

    @classmethod
    def check_backend_availability(cls) -> bool:
        """Say that it is there; what it lacks is told by the error when a group is made."""
        return True

    def destroy_group(self) -> None:
        """Leave."""
        self._group.close()

    # ---- the calls; Ray hands over each tensor in a list ----------------------------------------------

    def allreduce(self, tensor: list[object], allreduce_options: _Options[types.AllReduceOptions] = None) -> None:
        """Combine all members' tensors, in place."""
        options = allreduce_options
        with raised_as_rays():
            target = self._output(_only(tensor), "allreduce")
            self._group.all_reduce(target, self._op(options), timeout=_seconds(options))

    def barrier(self, barrier_options: _Options[types.BarrierOptions] = None) -> None:
        """Wait for all members."""
        with raised_as_rays():
            self._group.barrier(timeout=_seconds(barrier_options))

    def reduce(self, tensor: list[object], reduce_options: _Options[types.ReduceOptions] = None) -> None:
        """Combine all members' tensors into the root's."""
        options = reduce_options
        with raised_as_rays():
            root, op, target = self._root(options, "reduce"), self._op(options), _only(tensor)
            if self.rank == root:
                target = self._output(target, "reduce")
            else:
                target = copy(target) if hasattr(target, "detach") or hasattr(target, "copy") else target
                self._group.check(target, "reduce", writes=False)
            self._group.all_reduce(target, op, timeout=_seconds(options), part_of=f"reduce to rank {root}")

    def allgather(
        self,
        tensor_list: list[list[object]],
        tensor: list[object],
        allgather_options: _Options[types.AllGatherOptions] = None,
    ) -> None:
        """Send all members' tensors to all members."""
        with raised_as_rays():
            own, parts = _only(tensor), self._alike("allgather", tensor, tensor_list)
            for part in parts.values():
                self._output(part, "allgather")
            check_apart(parts, f"{self._label}: allgather")
            seconds, outputs = _seconds(allgather_options), list(parts.values())
            source = apart_from(outputs, self.rank, own)
            tensors = [source if root == self.rank else output for root, output in enumerate(outputs)]
            works = [
                self._group.ibroadcast(one, root, timeout=seconds, part_of="allgather")
                for root, one in enumerate(tensors)
            ]
            for work in works:
                work.wait()
            fill(outputs[self.rank], source)  # not before all are known to have called this

    def broadcast(self, tensor: list[object], broadcast_options: _Options[types.BroadcastOptions] = None) -> None:
        """Send the root's tensor to all members."""
        with raised_as_rays():
            root, target = self._root(broadcast_options, "broadcast"), _only(tensor)
            if self.rank != root:
                target = self._output(target, "broadcast")
            self._group.broadcast(target, root, timeout=_seconds(broadcast_options))

    def reducescatter(
        self,
        tensor: list[object],
        tensor_list: list[list[object]],
        reducescatter_options: _Options[types.ReduceScatterOptions] = None,
    ) -> None:
        """Combine all members' lists, tensor by tensor; each member gets the one of its rank."""
        options = reducescatter_options
        with raised_as_rays():
            op, parts = self._op(options), self._alike("reducescatter", tensor, tensor_list)
            target = self._output(_only(tensor), "reducescatter")
            copies = [copy(part) for part in parts.values()]
            works = [
                self._group.iall_reduce(one, op, timeout=_seconds(options), part_of="reducescatter") for one in copies
            ]
            for work in works:
                work.wait()
            fill(target, copies[self.rank])

    def send(self, tensor: list[object], send_options: types.SendOptions) -> None:
        """Send a tensor."""
        with raised_as_rays():
            source, count = _only(tensor), send_options.n_elements
            self._group.check(source, "send", writes=False)
            source = first(source, count, f"{self._label}: send")
            self._group.send(source, send_options.dst_rank, timeout=_seconds(send_options))

    def recv(self, tensor: list[object], recv_options: types.RecvOptions) -> None:
        """Receive a tensor."""
        with raised_as_rays():
            target = first(self._output(_only(tensor), "recv"), recv_options.n_elements, f"{self._label}: recv")
            self._group.recv(target, recv_options.src_rank, timeout=_seconds(recv_options))

    # ---- what is checked first ------------------------------------------------------------------------

    @property
    def _label(self) -> str:
        return f"group {self.group_name!r}"

    def _alike(self, what: str, tensor: list[object], tensor_list: list[list[object]]) -> dict[str, object]:
        """Check a list, a tensor per member, against the one tensor; gives it, each tensor by its name."""
        tensors = _only(tensor_list)
        if len(tensors) != self.world_size:
            expected = f"expected {self.world_size} tensors in tensor_list, one per member"
            raise ValueError(f"{self._label}: {what}: {expected}; found {len(tensors)}")
        parts = {f"tensor_list[{place}]": part for place, part in enumerate(tensors)}
        check_alike({"tensor": _only(tensor), **parts}, f"{self._label}: {what}")
        return parts

    def _output(self, tensor: object, what: str) -> object:
        """Check what is to be written to; gives it."""
        if is_read_only(tensor):
            where = f"{self._label}: {what}"
            if not self.replaces:
                expected = f"{where}: expected a writable array"
                ways = "copy it, or register(read_only='replace')"
                raise TensorMismatchError(f"{expected}; found a read-only one, such as an actor's argument: {ways}")
            replace_memory(cast(Array, tensor), where)
        self._group.check(tensor, what, writes=True)
        return tensor

    def _root(self, options: object, what: str) -> int:
        root: int = getattr(options, "root_rank", 0)
        if not 0 <= root < self.world_size:
            expected = f"expected a rank from 0 to {self.world_size - 1}"
            raise ValueError(f"{self._label}: {what}: {expected}; found {root}")
        return root

    def _op(self, options: object) -> Op:
        asked = types.ReduceOp.SUM if options is None else getattr(options, "reduceOp", None)
        if not isinstance(asked, types.ReduceOp):
            raise ValueError(f"{self._label}: op: expected a ray.util.collective.ReduceOp; found {asked!r}")
        return _OPS[asked]


class AutoGroup(StockGroup):
    """Shared memory on one machine, otherwise Gloo."""

    carrier = "auto"

    @classmethod
    def backend(cls) -> str:
        """Return the name that Ray knows it by."""
        return "TENSORVINE"


class SharedGroup(StockGroup):
    """Shared memory."""

    carrier = "shared"


class GlooGroup(StockGroup):
    """Gloo."""

    carrier = "gloo"


class NcclGroup(StockGroup):
    """NCCL."""

    carrier = "nccl"


def _only(given: Sequence[_T]) -> _T:
    if len(given) != 1:
        raise ValueError(f"ray.util.collective: expected one tensor per member; found {len(given)}")
    return given[0]


def _seconds(options: object) -> float | None:
    """Return the time of an option; None: the group's."""
    limit: timedelta = getattr(options, "timeout_ms", types.unset_timeout_ms)
    return None if limit == types.unset_timeout_ms else limit.total_seconds()
