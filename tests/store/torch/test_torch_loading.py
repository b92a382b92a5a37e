"""A module that derives values from its weights when it is loaded has the derived values of what was assigned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensorvine.store.errors import TensorMismatchError
from tensorvine.store.torch import assign, loads_itself, tensors_of
from torch import nn


class Derived(nn.Module):
    """Answers with `merged`, which is neither a parameter nor a buffer."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.full((2,), value)) for _ in range(2))
        self.merge()

    def merge(self) -> None:
        self.merged = (self.a + self.b).detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.merged


class ByPostHook(Derived):
    def __init__(self, value: float = 1.0) -> None:
        super().__init__(value)
        self.register_load_state_dict_post_hook(lambda module, _: module.merge())


class ByPreHook(Derived):
    def __init__(self, value: float = 1.0) -> None:
        super().__init__(value)
        self.register_load_state_dict_pre_hook(self.take)

    def take(self, module: nn.Module, state: dict[str, Any], prefix: str, *rest: object) -> None:
        self.merged = state[f"{prefix}a"] + state[f"{prefix}b"]


class ByMethod(Derived):
    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.merge()


class ByLoad(Derived):
    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = super().load_state_dict(*args, **kwargs)
        self.merge()
        return found


class ByExtraState(Derived):
    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: Any) -> None:
        self.merge()


def by_attribute(value: float = 1.0) -> nn.Module:
    net = Derived(value)

    def load(state: Any, *rest: Any) -> Any:
        found = Derived.load_state_dict(net, state, *rest)
        net.merge()
        return found

    net.load_state_dict = load
    return net


KINDS = [ByPostHook, ByPreHook, ByMethod, ByLoad, ByExtraState, by_attribute]


def arrays_of(module: nn.Module) -> dict[str, np.ndarray]:
    return {name: array.copy() for name, array in tensors_of(module).items()}


class TestDerived:
    @pytest.mark.parametrize("make", KINDS)
    def test_it_is_renewed(self, make: Callable[..., nn.Module]) -> None:
        one, two = make(3.0), make()
        assert loads_itself(two)
        assign(two, arrays_of(one))
        assert two(torch.ones(2)).tolist() == one(torch.ones(2)).tolist() == [6.0, 6.0]

    @pytest.mark.parametrize("make", KINDS[:3])
    def test_within_other_modules_and_of_some_tensors_only(self, make: Callable[..., nn.Module]) -> None:
        net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(make()))
        assign(net, {"1.0.a": np.full(2, 5, "float32")})
        assert net[1][0].merged.tolist() == [6.0, 6.0]

    @pytest.mark.parametrize("wrap", [lambda net: torch.compile(net, backend="eager"), nn.DataParallel])
    def test_hooks_of_a_wrapper_are_called_too(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        inner = Derived()
        net = wrap(inner)
        net.register_load_state_dict_post_hook(lambda module, keys: inner.merge())
        assign(net, {"a": np.full(2, 5, "float32")})
        assert inner.merged.tolist() == [6.0, 6.0]

    def test_on_the_device_meta(self) -> None:
        with torch.device("meta"):
            two = ByMethod()
        assign(two, arrays_of(ByMethod(3.0)))
        assert two(torch.ones(2)).tolist() == [6.0, 6.0]

    @pytest.mark.parametrize("make", KINDS[:3])
    def test_a_load_that_fails_leaves_the_module_as_it_was(self, make: Callable[..., nn.Module]) -> None:
        net = make()
        fails = iter([True, False])

        def hook(module: nn.Module, keys: object) -> None:
            if next(fails):
                raise ValueError("not this one")

        net.register_load_state_dict_post_hook(hook)
        with pytest.raises(TensorMismatchError, match="not this one"):
            assign(net, arrays_of(make(3.0)))
        assert net.a.tolist() == [1.0, 1.0]
        assert net(torch.ones(2)).tolist() == [2.0, 2.0]

    def test_of_pytorch(self) -> None:
        net = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
        assert loads_itself(net)  # a hook takes states of the older `weight_norm`
        other = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
        assign(net, arrays_of(other))
        assert torch.equal(net.weight, other.weight)

    @pytest.mark.parametrize(
        "net", [nn.BatchNorm1d(2), nn.InstanceNorm1d(2), nn.LSTM(2, 2), nn.MultiheadAttention(2, 1), nn.ReLU()]
    )
    def test_what_only_copies_is_filled_in_place(self, net: nn.Module) -> None:
        assert not loads_itself(nn.Sequential(net))


class Tied(nn.Module):
    def __init__(self, tie: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
        if tie == "one parameter":
            self.head.weight = self.embed.weight
        elif tie == "one memory":
            self.head.weight = nn.Parameter(self.embed.weight.detach())
        elif tie == "one parameter, loads itself":
            self.head.weight = self.embed.weight
            self.register_load_state_dict_post_hook(lambda module, keys: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))


TIES = ["one parameter", "one memory", "one parameter, loads itself"]


class TestTied:
    @pytest.mark.parametrize("tie", TIES)
    def test_two_values_for_it_are_refused_by_name(self, tie: str) -> None:
        net = Tied(tie)
        before = net.embed.weight.detach().clone()
        with pytest.raises(TensorMismatchError, match=r"'embed\.weight' and 'head\.weight': expected one value"):
            assign(net, arrays_of(Tied("")))
        assert torch.equal(net.embed.weight, before)

    @pytest.mark.parametrize("tie", TIES)
    def test_one_value_twice_or_by_one_name_is_taken(self, tie: str) -> None:
        net = Tied(tie)
        value = np.float32([[1, -0.0], [np.nan, 3], [4, 5]])
        for given in (["embed.weight", "head.weight"], ["embed.weight"], ["head.weight"]):
            with torch.no_grad():
                net.embed.weight.zero_()
            assign(net, {name: value.copy() for name in given})
            np.testing.assert_array_equal(net.head.weight.detach().numpy(), value)

    def test_on_the_device_meta(self) -> None:
        with torch.device("meta"):
            net = Tied("one parameter")
        with pytest.raises(TensorMismatchError, match="expected one value"):
            assign(net, arrays_of(Tied("")))
        assert net.embed.weight.is_meta

    def test_parts_of_one_memory_are_not_tied(self) -> None:
        net = nn.Module()
        whole = torch.zeros(4)
        net.first, net.last = nn.Parameter(whole[:2]), nn.Parameter(whole[2:])
        assign(net, {"first": np.ones(2, "f4"), "last": np.full(2, 2, "f4")})
        assert whole.tolist() == [1, 1, 2, 2]
