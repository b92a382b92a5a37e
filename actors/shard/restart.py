"""What a shard that starts again takes back, and what it says of the rest.

Rules
- It goes by the planner's standing, which has heard all others. The disk has been read by then; copies in other
  shards' memory come back now, and what neither has is answered as lost, by name.
- Other shards are told to let go of what an earlier incarnation held there, and of its versions that are gone. They are
  not waited for: they may be starting again as well.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from ...store.refs import ModelRef
from ...store.versions.ledger import Told
from .calls import ShardCalls
from .context import ShardContext
from .disk.history import History
from .disk.persister import Job
from .replicas.restore import Restored, restore

log = logging.getLogger(__name__)


def take_back(context: ShardContext, history: History | None) -> Restored:
    """Take back what an earlier incarnation had, and tell other shards and the planner what is here now.

    Args:
        context: the shard's.
        history: has read the disk, if there is one.

    Returns:
        What came from copies; nothing where the shard had no earlier incarnation.
    """
    state, peers, recovery_info = context.state, context.peers, context.recovery_info
    if recovery_info is None:
        if history is not None:
            peers.tell_planner(state.ledger.told())  # what the disk brought back
        return Restored()
    restored = Restored()
    if context.config.replicas > 1:
        restored = restore(context, recovery_info.home)
        for kept in map(state.kept, restored.refs):
            if history is not None:
                history.persister.add(Job(kept.header, kept.body, urgent=False))
    names = [name for name in state.ledger.names() if recovery_info.home(name) == context.index]
    state.claim(names)
    _let_go_elsewhere(context, recovery_info.ledger, names)
    peers.tell_planner(state.ledger.told())
    used = {ModelRef(name, state.ledger.highest(name)): (None, False) for name in names}
    peers.owe(used | state.version_facts())
    if context.config.replicas == 1:
        log.warning(
            "shard %d restarted: versions that were only in its memory are lost: save them again; to keep versions "
            "when a shard dies, start the repository with path= or replicas=2",
            context.index,
        )
    return restored


def _let_go_elsewhere(context: ShardContext, told: Told, names: Iterable[str]) -> None:
    """Have other shards let go of versions of this home that are no more, and note those that the disk has retired."""
    state, peers = context.state, context.peers
    kept = {*state.models(), *state.unread}
    buried = _buried(context, told, names)
    gone = [ref for ref in dict.fromkeys((*state.version_facts(), *buried)) if ref not in kept]
    if not peers.topology.former:  # else names that are to be at home here may be elsewhere still
        peers.forget_earlier(kept)
    for shard in peers.others if gone else ():  # also where they go by another topology already
        if buried:
            peers.post(shard, ShardCalls.note(dict.fromkeys(buried, (None, False))))
        peers.post(shard, ShardCalls.release_all(gone))


def _buried(context: ShardContext, told: Told, names: Iterable[str]) -> list[ModelRef]:
    """Name the versions that the disk says are retired, and that others know as existing: they were not told."""
    living = (ModelRef(name, version) for name in names if name in told.names for version in told.names[name].living)
    return [ref for ref in living if context.state.ledger.retired(ref)]
