"""Tracing finds how a forward pass goes, and touches nobody: no other thread, no other module, not the module."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import math
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import numpy as np
import pytest
import torch
from tensorvine.store.graphs.graph import ModelGraph
from tensorvine.store.torch import graph_of, tensors_of
from tensorvine.store.torch import signature as torch_signature
from tensorvine.store.torch import vertices as torch_vertices
from tensorvine.store.torch.signature import signature
from torch import fx, nn

AT_ONCE = 80


class Gated(nn.Module):
    """Modules, functions and a parameter between them; every number of `width` is another architecture."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b, self.gate = nn.Linear(width, width), nn.Linear(width, 2), nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.b(torch.relu(self.a(x)) * self.gate)


class Scaled(nn.Module):
    """Attention that scales by the root of a size, in a helper of this file."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return torch.softmax(self.keys(x) * scale_of(x) / math.sqrt(x.size(-1)), -1) @ self.values(x)


def scale_of(x):
    return 1.0 / math.sqrt(x.size(-1))


class Counting(nn.Module):
    """Counts its calls in a buffer, in an attribute and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.seen: list[int] = []
        self.number = 0

    def forward(self, x):
        self.calls += 1
        self.number += 1
        self.seen.append(self.number)
        return self.body(x)


class Held(nn.Module):
    """Reaches its modules in ways of its own: a list, a bound method, a partial application."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.plain = [self.first]
        self.step = self.apply_second

    def apply_second(self, x):
        return self.second(x)

    def forward(self, x):
        return self.step(self.plain[0](x))


class Registered(nn.Module):
    """Is told of each class that derives from it, and of each object that goes."""

    kinds: ClassVar[list[type]] = []
    gone: ClassVar[list[int]] = []

    def __init_subclass__(cls) -> None:
        Registered.kinds.append(cls)

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 2)

    def __del__(self) -> None:
        Registered.gone.append(id(self))

    def forward(self, x):
        return self.body(x)


class Text(nn.Module):
    """Branches on shapes, and says what it can be called with, as models of Hugging Face do."""

    def __init__(self, looks: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.looks = looks

    @property
    def dummy_inputs(self) -> dict[str, torch.Tensor]:
        return {"tokens": torch.tensor([[1, 2, 3]]), "attention_mask": torch.ones(1, 3)}

    def forward(self, tokens, attention_mask=None):
        if tokens.shape[1] > 5 or (attention_mask is not None and not attention_mask.all()):
            raise AssertionError("not called with this")
        if self.looks and tokens.max() > 5:
            return self.embed(tokens)
        x = self.embed(tokens)
        x[:, 0] = 0
        halves = x.split(2, -1)
        return self.head(torch.cat(list(halves), -1).mT.mT)


def edges(graph: ModelGraph) -> list[tuple[str, tuple[str, ...]]]:
    return [(layer.config["class"], layer.inputs) for layer in graph.layers]


def computes(net: nn.Module) -> Callable[[], None]:
    batch = torch.ones(4, 4)
    with torch.no_grad():
        answer = net(batch)

    def step() -> None:
        with torch.no_grad():
            assert torch.equal(net(batch), answer)

    return step


def trains() -> Callable[[], None]:
    net = nn.Sequential(Gated(4), nn.BatchNorm1d(2), nn.Linear(2, 1))
    optimizer, batch = torch.optim.SGD(net.parameters(), 0.01), torch.randn(6, 4)

    def step() -> None:
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()
        assert all(item.grad is not None for item in net.parameters())

    return step


def test_threads_that_trace_do_not_disturb_each_other_nor_threads_that_compute() -> None:
    """With `torch.fx` alone, forward passes got into another thread's trace, and compiled modules raised an error."""
    nets = [Gated(width) for width in range(1, 9)]
    expected = {net: edges(graph_of(Gated(net.a.in_features))) for net in nets}
    jobs = [computes(nets[3]), computes(Scaled()), computes(torch.compile(Scaled(), backend="eager")), trains()]
    over, steps = threading.Event(), [0] * len(jobs)

    def work(place: int) -> None:
        while not over.is_set():
            jobs[place]()
            steps[place] += 1

    def traces(offset: int) -> None:
        for number in range(AT_ONCE):
            net = nets[(number + offset) % len(nets)]
            net.note = object()  # which has no meaning: it is traced each time
            assert edges(graph_of(net)) == expected[net]

    before = nn.Module.__call__, nn.Module.__getattr__, math.sqrt, globals()["math"]
    with ThreadPoolExecutor(2 + len(jobs)) as threads:
        working = [threads.submit(work, place) for place in range(len(jobs))]
        try:
            for each in [threads.submit(traces, offset) for offset in (0, 3)]:
                each.result(120)
        finally:
            over.set()
        for each in working:
            each.result(60)
    assert all(steps)
    assert (nn.Module.__call__, nn.Module.__getattr__, math.sqrt, globals()["math"]) == before


def test_functions_of_math_are_traced_where_a_module_names_them() -> None:
    kinds = [kind for kind, _ in edges(graph_of(Scaled()))]
    assert kinds.count("function:sqrt") == 2
    assert kinds.count("Linear") == 2
    assert "len" not in globals()


def partial_of(module):
    return lambda x: module(x)


def wrapped_helper(x, factor):
    return x * factor if x.sum() > 0 else x


fx.wrap("wrapped_helper")
fx.wrap("len")


def test_what_fx_was_told_not_to_look_into_is_one_vertex() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(2, 2)

        def forward(self, x):
            return wrapped_helper(self.body(x), len(x))

    kinds = ["Input", "Linear", "function:len", "function:wrapped_helper"]
    assert [kind for kind, _ in edges(graph_of(Wrapped()))] == kinds


def test_what_a_forward_pass_sets_it_does_not_set_in_the_module() -> None:
    net = Counting()
    graph_of(net)
    assert (int(net.calls), net.number, net.seen) == (0, 0, [])
    net(torch.ones(1, 2))
    assert (int(net.calls), net.number, net.seen) == (1, 1, [1])


def test_modules_that_are_reached_in_other_ways_are_found() -> None:
    assert edges(graph_of(Held())) == [("Input", ()), ("Linear", ("input",)), ("Linear", ("first",))]


def test_a_trace_of_modules_of_pytorch_makes_no_class() -> None:
    kinds = nn.Module, nn.Bilinear, nn.Sequential
    before = [kind.__subclasses__() for kind in kinds]
    graph_of(nn.Sequential(nn.Bilinear(2, 2, 2), nn.ReLU()))
    assert [kind.__subclasses__() for kind in kinds] == before


def test_a_copy_that_a_forward_pass_copies_is_as_it_was() -> None:
    class Copying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

        def forward(self, x):
            return x * copy.deepcopy(self.norm).eps + self.norm(x)

    assert [layer.config["class"] for layer in graph_of(Copying()).layers] == [
        "Input",
        "function:mul",
        "BatchNorm1d",
        "function:add",
    ]


def test_classes_hear_nothing_of_a_trace() -> None:
    class Derived(Registered):
        pass

    net = Derived()
    net.note = object()
    known = len(Registered.kinds)
    graph_of(net)
    gc.collect()
    assert len(Registered.kinds) == known
    assert not Registered.gone


@pytest.mark.parametrize("error", [KeyError, OSError, StopIteration, type("OwnError", (Exception,), {})])
def test_a_forward_pass_that_raises_makes_the_module_a_chain(error: type[Exception], caplog) -> None:
    class Raising(Gated):
        def forward(self, x):
            raise error("no proxies here")

    Raising.__qualname__ = f"Raising{error.__name__}"
    net = nn.Sequential(Raising(2))
    with caplog.at_level(logging.WARNING, "tensorvine.store.torch"):
        graph = graph_of(net)
    assert edges(graph)[:2] == [("Linear", ()), ("Linear", ("0.a",))]
    assert set(graph.tensors) == set(tensors_of(net))
    assert any("cannot be traced" in record.message for record in caplog.records)


def test_what_could_not_be_traced_is_tried_again() -> None:
    class Once(Gated):
        fails: ClassVar[list[int]] = [1]

        def forward(self, x):
            if Once.fails:
                raise RuntimeError(Once.fails.pop())
            return super().forward(x)

    graphs = [graph_of(Once(2)) for _ in range(3)]
    assert [edges(graph)[0][0] for graph in graphs] == ["Linear", "Input", "Input"]
    assert graphs[1] is graphs[2]


def test_hooks_of_forward_passes_hear_nothing() -> None:
    heard: list[object] = []
    net = nn.Sequential(Gated(2))
    net[0].register_forward_hook(lambda *args: heard.append(args))
    net[0].register_forward_pre_hook(lambda *args: heard.append(args))
    assert edges(graph_of(net))[0] == ("Input", ())
    assert not heard
    net(torch.ones(1, 2))
    assert len(heard) == 2


class Meddling(nn.Module):
    """Writes to whatever it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.norm.running_mean.fill_(5)
        self.plain, self.held, self.seen, self.last = torch.zeros(2), {"t": torch.zeros(2)}, set(), deque(maxlen=2)

    def forward(self, x):
        self.norm.running_mean.zero_()
        self.plain += 1
        self.held["t"] += 1
        self.seen.add("called")
        self.last.append(x)
        return self.norm(x)


def test_whatever_a_module_holds_stays_as_it_is() -> None:
    net = Meddling()
    graph_of(net)
    assert net.norm.running_mean.tolist() == [5, 5]
    assert (net.plain.tolist(), net.held["t"].tolist(), net.seen, list(net.last)) == ([0, 0], [0, 0], set(), [])


class Above(Scaled):
    """Its parent's forward pass is found by `super()`, which the parent's file replaces."""

    def forward(self, x):
        return torch.relu(super().forward(x)) + super(Scaled, self).extra_repr().count("x")


def test_a_forward_pass_that_is_inherited_is_traced_like_its_own() -> None:
    kinds = [kind for kind, _ in edges(graph_of(Above()))]
    assert kinds.count("function:sqrt") == 2
    assert "function:relu" in kinds


def test_scripted_modules_have_a_graph() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch will take it away
        scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
    assert set(graph_of(scripted).tensors) == {"0.weight", "0.bias"}
    assert set(graph_of(nn.Sequential(scripted)).tensors) == {"0.0.weight", "0.0.bias"}


def test_a_module_that_another_thread_changes_has_a_graph() -> None:
    net, over = Gated(2), threading.Event()
    net.notes = {number: number for number in range(1000)}

    def note() -> None:
        number = 1000
        while not over.is_set():
            net.notes[number] = number
            net.notes.pop(number - 1000)
            number += 1

    with ThreadPoolExecutor(1) as threads:
        noting = threads.submit(note)
        graphs = [edges(graph_of(net)) for _ in range(50)]
        over.set()
        noting.result(60)
    assert graphs == [edges(graph_of(Gated(2)))] * 50


class TestObserved:
    @pytest.mark.parametrize("looks", [False, True], ids=["meta", "computed"])
    def test_a_module_that_branches_is_called_with_what_it_says(self, looks: bool) -> None:
        net = Text(looks)
        graph = graph_of(net)
        by_kind = dict(edges(graph))
        assert by_kind["Embedding"] == ("input",)
        assert by_kind["function:split"] == ("setitem",)
        assert len(by_kind["function:cat"]) == 2
        assert graph.by_name["embed"].tensors == graph.by_name["head"].tensors == ("embed.weight", "head.weight")
        assert graph.fingerprint == graph_of(Text(looks)).fingerprint

    def test_nothing_of_the_module_changes(self) -> None:
        net = Text()
        net.train()
        before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        graph_of(net)
        assert all(item.training for item in net.modules())
        assert all(torch.equal(net.state_dict()[name], tensor) for name, tensor in before.items())
        assert net.head.weight is net.embed.weight
        assert net.embed.weight.device.type == "cpu"

    def test_parameters_that_are_written_to_are_a_copy(self) -> None:
        class Writing(Text):
            def forward(self, tokens):
                self.embed.weight.mul_(2)
                return super().forward(tokens)

        net = Writing(looks=True)
        before = net.embed.weight.detach().clone()
        graph_of(net)
        assert torch.equal(net.embed.weight, before)


class TestSignature:
    def test_what_was_traced_is_not_traced_again(self) -> None:
        assert graph_of(Gated(3)) is graph_of(Gated(3))

    @pytest.mark.parametrize(
        "change",
        [
            lambda net: setattr(net, "rate", 2),
            lambda net: setattr(net, "rate", 1.0),
            lambda net: setattr(net, "rate", True),
            lambda net: setattr(net, "options", {"a": (1, [2])}),
            lambda net: setattr(net.a, "weight", nn.Parameter(torch.ones(5, 2))),
            lambda net: setattr(net.b, "weight", net.a.weight),
            lambda net: setattr(net, "b", nn.Linear(2, 3)),
            lambda net: setattr(net, "extra", nn.ReLU()),
            lambda net: setattr(net, "forward", net.b.forward),
            lambda net: setattr(net, "helper", scale_of),
            lambda net: net.register_buffer("seen", torch.zeros(1)),
            lambda net: net.register_buffer("seen", torch.zeros(1), persistent=False),
            lambda net: net.to(torch.bfloat16),
            lambda net: net.to("meta"),
        ],
    )
    def test_whatever_a_forward_pass_may_look_at_counts(self, change: Callable[[nn.Module], None]) -> None:
        prints = set()
        for number in range(2):
            net = Gated(2)
            net.rate = 1
            if number:
                change(net)
            prints.add(signature(net))
        assert None not in prints
        assert len(prints) == 2

    @pytest.mark.parametrize(
        "change",
        [
            lambda net: setattr(net, "helper", partial_of(nn.ReLU())),
            lambda net: setattr(net, "helper", torch.ones(2).mul),
            lambda net: setattr(net, "helper", functools.partial(scale_of, 2)),
            lambda net: setattr(net, "mask", torch.ones(2)),
            lambda net: setattr(net, "table", np.ones(2)),
            lambda net: setattr(net, "note", object()),
            lambda net: net.a.register_state_dict_post_hook(lambda *args: None),
            lambda net: setattr(net, "hidden", [nn.Linear(2, 2)]),
        ],
    )
    def test_what_has_no_meaning_gives_none(self, change: Callable[[nn.Module], None]) -> None:
        net = Gated(2)
        change(net)
        assert signature(net) is None

    def test_values_of_buffers_count_where_the_forward_pass_reads_them(self) -> None:
        class Masked(nn.Module):
            def __init__(self, mode: float, persistent: bool) -> None:
                super().__init__()
                self.body = nn.BatchNorm1d(2)
                self.register_buffer("mode", torch.full((2,), mode), persistent=persistent)

            def forward(self, x):
                return torch.relu(self.body(x)) if self.mode[0] > 0 else torch.tanh(self.body(x) * (self.mode + 1))

        for persistent in (True, False):
            for mode in (1.0, -1.0, 2.0, 1.0, -3.0):
                net = Masked(mode, persistent)
                kinds = [kind for kind, _ in edges(graph_of(net))]
                assert ("function:relu" in kinds) == (mode > 0)
                net.other = object()  # it is traced without being looked for
                assert edges(graph_of(net)) == edges(graph_of(Masked(mode, persistent)))
                assert graph_of(net).fingerprint == graph_of(Masked(mode, persistent)).fingerprint
        net = Masked(1.0, persistent=True)
        graph = graph_of(net)
        net.body.running_mean.fill_(3)  # which a training changes at each step, and no forward pass reads
        assert graph_of(net) is graph

    def test_a_quantised_buffer_is_no_plain_one(self) -> None:
        def made(quantised: bool) -> nn.Module:
            net = Gated(2)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                t = torch.ones(2)
                net.register_buffer("t", torch.quantize_per_tensor(t, 0.1, 0, torch.qint8) if quantised else t)
            return net

        for quantised in (False, True, False):
            assert set(graph_of(made(quantised)).tensors) == set(tensors_of(made(quantised)))

    def test_classes_and_what_their_functions_close_over_count(self) -> None:
        class Switched(Gated):
            active = True

            def forward(self, x):
                return super().forward(x) if self.active and state["on"] else x

        state, lengths = {"on": True}, []
        for active, on in [(True, True), (False, True), (True, False), (True, True)]:
            Switched.active, state["on"] = active, on
            lengths.append(len(edges(graph_of(Switched(2)))))
        assert lengths[0] == lengths[3] != lengths[1] == lengths[2]

    def test_objects_count_by_their_attributes(self) -> None:
        class Config:
            def __init__(self, heads: int) -> None:
                self.heads = heads

        def made(heads: int) -> nn.Module:
            net = Gated(2)
            net.config = Config(heads)
            return net

        assert signature(made(2)) == signature(made(2)) != signature(made(4))

    def test_a_lock_that_a_fork_left_held_is_done_without(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch_signature, "LONGEST_S", 0.01)
        expected = graph_of(Gated(7))
        with torch_vertices._known._lock:
            assert graph_of(Gated(7)) == expected

    def test_it_keeps_no_module_alive(self) -> None:
        net = Held()
        key = signature(net)
        there = [weakref.ref(net), weakref.ref(net.first.weight)]
        graph_of(net)
        del net
        gc.collect()
        assert key is not None
        assert [each() for each in there] == [None, None]


class TestWrapped:
    def test_what_wraps_a_module_is_seen_through(self) -> None:
        net = Gated(4)
        compiled = torch.compile(net, backend="eager")
        parallel = nn.DataParallel(net)
        assert graph_of(compiled) == graph_of(parallel) == graph_of(net)
        assert tensors_of(compiled).keys() == tensors_of(parallel).keys() == tensors_of(net).keys()

    def test_a_part_that_is_compiled_is_seen_through(self) -> None:
        net = nn.Sequential(Gated(4), nn.ReLU())
        graph, names = graph_of(net), tensors_of(net).keys()
        net[0] = torch.compile(net[0], backend="eager")
        net[1].compile(backend="eager")
        assert any("_orig_mod" in name for name in net.state_dict())
        assert graph_of(net) == graph
        assert tensors_of(net).keys() == names
