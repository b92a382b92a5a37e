"""Parts of a module that stay in inference while the rest of it is trained.

Rules
- A part whose buffers must not change (the statistics of a BatchNorm) is put into inference before each of its calls:
  whoever trains the module calls `train()`, which would reach it.
- What is attached to it for that is ours, and no part of what the module is built from (`recipe`).
"""

# pyright: reportMissingTypeStubs=false
# (torch's types are partial)

from __future__ import annotations

from collections.abc import Callable, Set

from torch import nn
from torch.utils.hooks import RemovableHandle


def keep_in_inference(module: nn.Module, frozen: Set[int]) -> Callable[[], None]:
    """Keep submodules with frozen buffers, such as BatchNorm statistics, in evaluation mode during training.

    Args:
        module: The module to train.
        frozen: Ids of the frozen tensors, from `id()`. A submodule stays in evaluation mode if one of its own buffers
            is frozen.

    Returns:
        A function to call after training. The function removes the hooks that keep submodules in evaluation mode. It
        does not change `training` flags.

    >>> norm = nn.BatchNorm1d(2)
    >>> end = keep_in_inference(norm, {id(norm.running_mean)})
    >>> norm.training
    False
    >>> end()
    """
    hooks: list[RemovableHandle] = []
    for part in module.modules():
        if any(id(buffer) in frozen for buffer in part.buffers(recurse=False)):
            part.eval()
            hooks.append(part.register_forward_pre_hook(to_inference))

    def end() -> None:
        for hook in hooks:
            hook.remove()

    return end


def to_inference(module: nn.Module, arguments: object) -> None:
    """Put a part into inference: the hook."""
    module.eval()
