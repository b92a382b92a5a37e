"""Gradients of a data-parallel PyTorch training: averaged over the ranks while the backward pass goes on.

Rules
- A parameter that has no gradient on a rank takes part with zeros. After the backward pass the ranks agree, by one more
  number for each parameter beside the last gradients, which ones have a gradient anywhere; the others keep none, as in
  a training of one rank.
- One thread follows the gradients in the order in which they came here, and hands each on when it is the mean.
- A step that fails in its middle ends it: the ranks are out of step.
"""

# pyright: reportMissingTypeStubs=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import torch
from torch import nn

from ....store.arrays import as_numpy
from ...collective.group import Group
from ..reducer import Reducer

BACKWARD_S = 600.0
"""How long a backward pass may take, from one gradient to the others of its bucket."""

Final = Callable[[nn.Parameter], None]


class Gradients:
    """Averages the gradients of one rank.

    Args:
        group: the ranks'.
        names: names of the parameters, in the order of the backward pass, the same on all ranks.
        parameters: as many.
    """

    def __init__(self, group: Group, names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
        self._names, self._parameters = list(names), list(parameters)
        self._index = {id(parameter): place for place, parameter in enumerate(parameters)}
        last = parameters[-1].dtype if parameters else torch.float32
        self._used = torch.zeros(len(parameters), dtype=last)
        """Parameter -> whether it has a gradient."""
        like = [*parameters, self._used]
        sizes = [item.numel() * item.element_size() for item in like]
        dtypes = [str(item.dtype).removeprefix("torch.") for item in like]
        self._reducer = Reducer(group, sizes, dtypes=dtypes, names=[*names, "flags of used gradients"])
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tensorvine-update")
        self._came: SimpleQueue[int | None] = SimpleQueue()
        self._means: dict[int, torch.Tensor] = {}
        """What is being reduced: the gradient, or a copy where that is on a GPU or not contiguous."""
        self._following: Future[None] | None = None

    def begin(self, final: Final) -> None:
        """Begin a step.

        Args:
            final: called with each parameter whose gradient is the mean, in one thread.

        Raises:
            PeerLostError: an earlier step failed.
        """
        self._reducer.begin()
        self._used.zero_()
        self._came, self._means = SimpleQueue(), {}
        self._following = self._thread.submit(self._follow, self._came, final)

    def came(self, parameter: nn.Parameter) -> None:
        """Tell that a parameter has its gradient; returns at once.

        Raises:
            ValueError: it has it for the second time in this step, or it is sparse.
        """
        place = self._index[id(parameter)]
        gradient = parameter.grad
        if gradient is None or gradient.is_sparse:
            raise ValueError(f"gradient of {self._names[place]!r}: expected a dense gradient; found a sparse one")
        self._used[place] = 1
        self._hand_over(place, gradient)
        self._came.put(place)

    def finish(self) -> None:
        """Tell that the backward pass has ended, and wait until `final` was called for all; raises what that raised.

        Raises:
            PeerLostError, OperationTimeoutError: a peer is gone, or does not come; names it.
        """
        missing = [place for place in range(len(self._parameters)) if place not in self._means]
        for place in missing:
            self._hand_over(place, torch.zeros_like(self._parameters[place]))
        self._reducer.ready(len(self._parameters), as_numpy(self._used, "flags of used gradients"))
        self._came.put(None)
        if self._following is not None:
            self._following.result()

    def close(self) -> None:
        """Let go of it; the caller that waits gets an error. The group is its owner's to close."""
        self._reducer.close()
        self._came.put(None)
        self._thread.shutdown(wait=True)

    def _hand_over(self, place: int, gradient: torch.Tensor) -> None:
        memory = gradient.detach().contiguous().cpu()
        self._means[place] = memory
        self._reducer.ready(place, as_numpy(memory, f"gradient of {self._names[place]!r}"))

    def _follow(self, came: SimpleQueue[int | None], final: Final) -> None:
        done: set[int] = set()
        while (place := came.get()) is not None:
            self._reducer.wait(place, BACKWARD_S)
            self._assign(place, final)
            done.add(place)
        self._reducer.wait_all()
        for place in range(len(self._parameters)):
            if place not in done and bool(self._used[place]):
                self._assign(place, final)

    def _assign(self, place: int, final: Final) -> None:
        """Put the mean where the optimizer looks for it."""
        parameter, mean = self._parameters[place], self._means[place]
        gradient: Any = parameter.grad
        if gradient is None:
            parameter.grad = mean.to(parameter.device)
        elif gradient.data_ptr() != mean.data_ptr():
            gradient.copy_(mean)
        final(parameter)
