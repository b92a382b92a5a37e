"""What ranks can be asked, declared for those who hold them and for the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...store.refs import ModelRef
from ..client.save.request import Saved
from ..rpc.calls import remote
from .fork.calls import ForkCalls
from .report import RankReport, Recipe


class RankCalls(ForkCalls):
    """Calls of any rank that can be forked: an actor of ours, or the mailbox of another process."""

    @remote("ctl", repeatable=True)
    def describe(self) -> RankReport:
        """Tell what it is and how far it is."""
        ...

    @remote("ctl", repeatable=True)
    def recipe(self, options: Sequence[str]) -> Recipe | None:
        """Return what a rank's training is made of, or None if it is not one of ours.

        Raises:
            ForkError: one of `options` was not given to the training, nor does it or its `build` know it.
        """
        ...


class TrainerCalls(RankCalls):
    """Calls of a rank that is an actor of ours."""

    @remote("watch")
    def start(self) -> None:
        """Join the peers and build the training; raises what that raises."""
        ...

    @remote("ctl")
    def close(self) -> None:
        """Let go of all it holds; a train under way ends at the next boundary, or with its group."""
        ...

    @remote("ctl")
    def announce(self, train: int) -> None:
        """Learn that a train is about to come, its number counted from 1: this rank counts as training from now on.

        Calls may overtake one another; so a change for all ranks could find one that has begun and one that has not.
        """
        ...

    @remote("watch")
    def train(self, steps: int, fork: str | None = None, number: int = 0) -> list[float]:
        """Train so many steps, and return their losses, fewer if it was told to stop.

        Args:
            steps: from 1.
            fork: from the state that this fork brings, of which `adopt` tells; None: as it stands.
            number: by which it was announced; 0: it was not.

        Raises:
            ForkError: the fork failed.
            ValueError: another train is under way, or `steps` is no number from 1.
            PeerLostError: a peer died or left, now or in an earlier train.
            Exception: whatever the training raises.
        """
        ...

    @remote("watch")
    def stop(self) -> None:
        """End the train under way at the next boundary; see `Trainers.stop` for several ranks."""
        ...

    @remote("watch")
    def configure(self, options: Mapping[str, object]) -> None:
        """Change options at the next boundary; see `Trainers.configure` for several ranks.

        Raises:
            ValueError: an option that the training does not have, or a wrong value.
        """
        ...

    @remote("ctl")
    def prepare(self, change: str, method: str, arguments: Sequence[object], step: int | None) -> bool:
        """Prepare a change that `decide` makes, and tell whether its step is still to come.

        Args:
            change: its id.
            method: "configure", "stop" or "restore_from".
            arguments: the method's.
            step: after which it is made; until it is decided, the rank stands still there. If the train ends before
                that step, then at its end. None: at the next boundary.
        """
        ...

    @remote("watch")
    def decide(self, change: str, made: bool) -> object:
        """Make a change that was prepared here, and return what it gives; or drop it, known or not."""
        ...

    @remote("watch")
    def save(self, name: str, quality: float | None = None, metadata: Mapping[str, object] | None = None) -> Saved:
        """Save the whole state between two steps; training waits for one memory copy. Its parent is what was last saved
        or restored here.

        Args:
            name: the model's name.
            quality: as in `Repository.save`.
            metadata: JSON values, to which the facts are added as "training".

        Raises:
            ValueError: this is not rank 0, the run has no repository, or the metadata has a "training".
            TensorVineError: what `Repository.save` raises.
        """
        ...

    @remote("watch")
    def restore_from(self, model: ModelRef | str) -> ModelRef:
        """Go on from a version that `save` made; see `Trainers.restore_from` for several ranks.

        Raises:
            ValueError: the run has no repository, or the version has no facts of a training.
            TensorMismatchError: its tensors are not those of the training; nothing has changed.
            TensorVineError: what `Repository.load` raises.
        """
        ...
