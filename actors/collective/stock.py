"""Our groups as back ends of `ray.util.collective`: code that is written for it runs on them.

Rules
- Ray knows a back end only in processes that called `register`: each actor of a group, and a driver that calls
  `create_collective_group`.
- A group there is a group here, of its own: groups may overlap, have other orders of the same members, and be made
  anew after `destroy_collective_group`, of other members too. (Ray's own GLOO makes all of them one.)
- All calls wait for their end, as Ray's do. What is not the result is left as it was: `reduce` and `reducescatter`
  work on copies.
- One tensor per member: the calls named `..._multigpu` take lists of one.
- This is Ray's adapter: nothing else of the groups imports Ray, and nothing else is in here.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar, TypeAlias, TypeVar

from ray.util.collective import backend_registry, types
from ray.util.collective.collective_group.base_collective_group import BaseGroup

from .connect import connect
from .group import Group, Op

_T = TypeVar("_T")
_Options: TypeAlias = _T | type[_T]
"""What Ray hands over by default is the class itself, whose attributes are the defaults."""
_OPS: dict[types.ReduceOp, Op] = {
    types.ReduceOp.SUM: "sum",
    types.ReduceOp.PRODUCT: "product",
    types.ReduceOp.MIN: "min",
    types.ReduceOp.MAX: "max",
}


def register() -> None:
    """Make our groups known to `ray.util.collective` in this process; again, it does nothing.

    The back ends' names there are "TENSORVINE" (shared memory on one machine, otherwise Gloo), "TENSORVINE_SHARED",
    "TENSORVINE_GLOO" and "TENSORVINE_NCCL".

    Raises:
        ValueError: another back end has one of these names.

    >>> from ray.util import collective  # doctest: +SKIP
    >>> register()  # doctest: +SKIP
    >>> collective.init_collective_group(2, rank, backend="TENSORVINE", group_name="pair")  # doctest: +SKIP
    >>> collective.allreduce(gradient, group_name="pair")  # doctest: +SKIP
    """
    registry = backend_registry.BackendRegistry()
    for kind in (AutoGroup, SharedGroup, GlooGroup, NcclGroup):
        if not registry.is_registered(kind.backend()):
            backend_registry.register_collective_backend(kind.backend(), kind)
        elif registry.get(kind.backend()) is not kind:
            found = registry.get(kind.backend())
            raise ValueError(f"ray.util.collective: expected no back end {kind.backend()} but ours; found {found}")


class StockGroup(BaseGroup):
    """A group as `ray.util.collective` wants it; its subclasses say what carries the bytes.

    Args:
        world_size: how many members.
        rank: this one.
        group_name: of the group.
    """

    carrier: ClassVar[str]
    """The back end that `connect` is given."""

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        self._group: Group = connect(f"ray.util.collective/{group_name}", rank, world_size, backend=self.carrier)

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

    def allreduce(
        self, tensor: list[object], allreduce_options: _Options[types.AllReduceOptions] = types.AllReduceOptions
    ) -> None:
        """Combine all members' tensors, in place."""
        options = allreduce_options
        self._group.all_reduce(_only(tensor), _OPS[options.reduceOp], timeout=_seconds(options))

    def barrier(self, barrier_options: _Options[types.BarrierOptions] = types.BarrierOptions) -> None:
        """Wait for all members."""
        self._group.barrier(timeout=_seconds(barrier_options))

    def reduce(self, tensor: list[object], reduce_options: _Options[types.ReduceOptions] = types.ReduceOptions) -> None:
        """Combine all members' tensors into the root's."""
        options = reduce_options
        target = _only(tensor)
        if self.rank != options.root_rank:
            target = _copy(target)
        self._group.all_reduce(target, _OPS[options.reduceOp], timeout=_seconds(options))

    def allgather(
        self,
        tensor_list: list[list[object]],
        tensor: list[object],
        allgather_options: _Options[types.AllGatherOptions] = types.AllGatherOptions,
    ) -> None:
        """Send all members' tensors to all members."""
        parts, seconds = self._each(tensor_list), _seconds(allgather_options)
        _fill(parts[self.rank], _only(tensor))
        works = [self._group.ibroadcast(part, root, timeout=seconds) for root, part in enumerate(parts)]
        for work in works:
            work.wait()

    def broadcast(
        self, tensor: list[object], broadcast_options: _Options[types.BroadcastOptions] = types.BroadcastOptions
    ) -> None:
        """Send the root's tensor to all members."""
        self._group.broadcast(_only(tensor), broadcast_options.root_rank, timeout=_seconds(broadcast_options))

    def reducescatter(
        self,
        tensor: list[object],
        tensor_list: list[list[object]],
        reducescatter_options: _Options[types.ReduceScatterOptions] = types.ReduceScatterOptions,
    ) -> None:
        """Combine all members' lists, tensor by tensor; each member gets the one of its rank."""
        options = reducescatter_options
        copies, op = [_copy(part) for part in self._each(tensor_list)], _OPS[options.reduceOp]
        works = [self._group.iall_reduce(copy, op, timeout=_seconds(options)) for copy in copies]
        for work in works:
            work.wait()
        _fill(_only(tensor), copies[self.rank])

    def send(self, tensor: list[object], send_options: types.SendOptions) -> None:
        """Send a tensor."""
        self._group.send(_only(tensor), send_options.dst_rank, timeout=_seconds(send_options))

    def recv(self, tensor: list[object], recv_options: types.RecvOptions) -> None:
        """Receive a tensor."""
        self._group.recv(_only(tensor), recv_options.src_rank, timeout=_seconds(recv_options))

    def _each(self, tensor_list: list[list[object]]) -> list[object]:
        tensors = _only(tensor_list)
        if len(tensors) != self.world_size:
            raise ValueError(f"{self.group_name!r}: expected {self.world_size} tensors; found {len(tensors)}")
        return tensors


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


def _only(given: list[_T]) -> _T:
    if len(given) != 1:
        raise ValueError(f"ray.util.collective: expected one tensor per member; found {len(given)}")
    return given[0]


def _seconds(options: object) -> float | None:
    """Return the time of an option; None: the group's."""
    limit: timedelta = getattr(options, "timeout_ms", types.unset_timeout_ms)
    return None if limit == types.unset_timeout_ms else limit.total_seconds()


def _copy(tensor: Any) -> object:
    return tensor.detach().clone() if hasattr(tensor, "detach") else tensor.copy()


def _fill(target: Any, source: Any) -> None:
    """Copy values into a tensor, of the same or of the other framework."""
    if hasattr(target, "copy_"):
        import torch

        target.copy_(torch.as_tensor(source))
    else:
        target[...] = source
