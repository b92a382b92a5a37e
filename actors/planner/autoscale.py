"""The automatic mode: the planner follows what its shards carry, and changes their number.

Rules
- What is decided is `planner.scaling`'s; a change is carried out as if a client had asked for it (`resizing`).
- What fails is logged, once for as long as it lasts, and tried again: a repository works with any number of shards.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from ...planner.scaling import ScalePolicy, Scaler, ShardLoad
from ...planner.topology import Topology
from ...store.errors import TensorVineError
from ..engine.engine import Engine
from ..rpc.messages import PEER_TIMEOUT_S
from ..rpc.shard_channels import ShardChannels
from ..shard.calls import ShardCalls
from .resizing import ScaleReport

log = logging.getLogger(__name__)

TICK_S = 1.0
CHANGE_S = 120.0
"""How long a change may take; it is tried again after that."""


class AutoScale:
    """A thread that follows one repository.

    Args:
        engine: runs the shards.
        shards: channels to them.
        policy: when shards join and drain.
        topology: gives the present one.
        scale: changes the number of shards: (how many, seconds it may take).
    """

    def __init__(
        self,
        engine: Engine,
        shards: ShardChannels,
        policy: ScalePolicy,
        topology: Callable[[], Topology],
        scale: Callable[[int, float], ScaleReport],
    ) -> None:
        self._engine = engine
        self._shards = shards
        self._scaler = Scaler(policy)
        self._topology = topology
        self._scale = scale
        self._trouble = ""
        threading.Thread(target=self._follow, name="tensorvine-autoscale", daemon=True).start()

    def _follow(self) -> None:
        pause = threading.Event()
        while not pause.wait(TICK_S):  # runs as long as the process
            try:
                self._once()
                self._trouble = ""
            except TensorVineError as exc:  # a shard is not there yet, or not any more
                if type(exc).__name__ != self._trouble:
                    log.warning("the number of shards stays as it is for now: %s", exc)
                self._trouble = type(exc).__name__
            except Exception:
                log.exception("following the load failed; it goes on in %s s", TICK_S)

    def _once(self) -> None:
        topology = self._topology()
        loads = self._loads(topology)
        count = self._scaler.observe(time.monotonic(), len(self._engine.nodes()), loads)
        if count != len(topology.shards):
            held = sum(load.bytes_held for load in loads.values())
            report = self._scale(count, CHANGE_S)
            log.info(
                "repository %r: %d -> %d shards in %.2f s, as they held %d bytes; %d names, %d bytes of tensors moved",
                topology.repository,
                report.shards_before,
                report.shards_after,
                report.seconds,
                held,
                report.names_moved,
                report.tensor_bytes_moved,
            )

    def _loads(self, topology: Topology) -> dict[int, ShardLoad]:
        asked = {shard: self._shards[shard].send(ShardCalls.stats()) for shard in topology.shards}
        loads: dict[int, ShardLoad] = {}
        for shard, answer in asked.items():
            stats = answer.result(PEER_TIMEOUT_S)
            held = stats.bytes_allocated + stats.bytes_staged + stats.bytes_mirrored
            loads[shard] = ShardLoad(held, stats.capacity, stats.requests)
        return loads
