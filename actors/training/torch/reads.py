"""Which tensors of a model a forward pass reads, and when it first does.

Rules
- Each call of a PyTorch function or tensor method is looked at, not each call of a module: modules read parameters of
  others (an attention those of its projection, tied weights those of an embedding) without calling them.
- Code that was compiled or scripted cannot be watched: it reads all there is at the beginning.
"""

# pyright: reportMissingTypeStubs=false

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ....store.torch import is_compiled, tensors_in


class Reads(TorchFunctionMode):
    """While it is entered, tells of each tensor right before it is first read, in this thread.

    Args:
        names: id of a tensor -> its name.
        tell: called with a name, once for each.

    >>> model, order = nn.Linear(2, 1), []
    >>> with Reads({id(item): name for name, item in model.named_parameters()}, order.append):
    ...     _ = model(torch.ones(1, 2))
    >>> order
    ['weight', 'bias']
    """

    def __init__(self, names: Mapping[int, str], tell: Callable[[str], None]) -> None:
        super().__init__()
        self._left = dict(names)
        self._tell = tell

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Look at the arguments of a call, and make it."""
        for tensor in tensors_in((args, kwargs or {})):
            name = self._left.pop(id(tensor), None)
            if name is not None:
                self._tell(name)
        return func(*args, **(kwargs or {}))


def can_be_watched(model: nn.Module) -> bool:
    """Tell whether a model's code is Python that runs as it is written."""
    return not any(
        isinstance(module, torch.jit.ScriptModule)
        or getattr(module, "_compiled_call_impl", None) is not None
        or is_compiled(module)
        for module in model.modules()
    )
