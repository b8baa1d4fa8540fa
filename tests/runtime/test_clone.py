"""A twin shares tensors and nothing that the two could quarrel about."""

from __future__ import annotations

import collections
import dataclasses
import functools
import types
from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from amprewrite.runtime.model.in_place import clone_of


class Odd(nn.Module):
    """Modules in plain containers, bound methods, partials, a parent link, shared parts, a set and a cycle."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.same = self.fc
        self.parts = nn.ModuleDict({"a": nn.ReLU(), "b": nn.Sequential(nn.Linear(2, 2))})
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(2))])
        self.hidden = [nn.Linear(2, 2), {"deep": (self.fc, 3)}]
        self.table = {"run": self.run, "half": functools.partial(self.run, scale=0.5)}
        self.order = OrderedDict(x=self.parts["a"])
        self.__dict__["parent"] = self
        self.number, self.text, self.tensor = 3, "text", torch.ones(2)

    def run(self, x, scale=1.0):
        return self.fc(x) * scale


def test_modules_are_new_and_tensors_the_same():
    model = Odd()
    twin = clone_of(model)
    assert type(twin) is Odd and list(twin.state_dict()) == list(model.state_dict())
    assert all(a is b for a, b in zip(twin.parameters(), model.parameters(), strict=True))
    for (name, mine), (other, theirs) in zip(twin.named_modules(), model.named_modules(), strict=True):
        assert name == other and mine is not theirs and type(mine) is type(theirs)
        assert mine._parameters is not theirs._parameters and mine._forward_hooks is not theirs._forward_hooks


def test_every_way_back_to_a_module_leads_to_the_twin():
    model = Odd()
    twin = clone_of(model)
    assert twin.same is twin.fc and twin.parent is twin
    assert twin.hidden[0] is not model.hidden[0] and twin.hidden[1]["deep"] == (twin.fc, 3)
    assert twin.table["run"].__self__ is twin and twin.table["half"].func.__self__ is twin
    assert type(twin.order) is OrderedDict and twin.order["x"] is twin.parts["a"]
    assert twin.number == 3 and twin.tensor is model.tensor


def test_flags_hooks_and_attributes_are_apart():
    model = Odd()
    model.fc.register_forward_hook(lambda *_: None)
    twin = clone_of(model)
    assert len(twin.fc._forward_hooks) == 1
    twin.eval()
    twin.fc.register_forward_pre_hook(lambda *_: None)
    twin.hidden.append(1)
    twin.fc.extra = 1
    assert model.training and model.fc.training and not model.fc._forward_pre_hooks
    assert len(model.hidden) == 2 and not hasattr(model.fc, "extra")


def test_compiled_calls_are_left_behind():
    model = nn.Linear(2, 2)
    model.compile(backend="eager")
    assert clone_of(model).__dict__.get("_compiled_call_impl") is None


def test_lazy_modules_and_graph_modules():
    lazy = nn.Sequential(nn.LazyLinear(3))
    twin = clone_of(lazy)
    assert twin(torch.ones(1, 2)).shape == (1, 3)
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    x = torch.randn(1, 2)
    assert torch.equal(clone_of(graph)(x), graph(x))


def test_what_is_one_container_stays_one():
    class Layer(nn.Module):
        def __init__(self, cache: dict) -> None:
            super().__init__()
            self.cache, self.fc = cache, nn.Linear(2, 2)
            self.gain, self.skip, self.ring = {self.fc: 2.0}, frozenset({self.fc}), [1.0]
            self.ring.append(self.ring)

    cache: dict = {}
    model = nn.Sequential(Layer(cache), Layer(cache))
    twin = clone_of(model)
    assert twin[0].cache is twin[1].cache is not cache
    assert twin[0].gain[twin[0].fc] == 2.0
    assert twin[0].fc in twin[0].skip
    assert twin[0].ring[1] is twin[0].ring


def test_what_a_hook_is_given_is_the_callers():
    kept: dict = {}

    def keep(store, module, given, result):
        store["seen"] = result

    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_forward_hook(functools.partial(keep, kept))
    clone_of(model)(torch.ones(1, 2))
    assert "seen" in kept


Named = collections.namedtuple("Named", "part")


@dataclasses.dataclass
class Record:
    part: nn.Module


@pytest.mark.parametrize(
    "hold",
    [
        lambda part: Named(part),
        lambda part: Record(part),
        lambda part: types.SimpleNamespace(part=part),
        lambda part: collections.deque([part]),
        lambda part: collections.defaultdict(list, {0: part}),
    ],
    ids=["named tuple", "dataclass", "namespace", "deque", "defaultdict"],
)
def test_holders_of_modules_hold_those_of_the_twin(hold):
    model = nn.Sequential(nn.Dropout(0.5))
    model.held = hold(model[0])
    held = clone_of(model).eval().held
    part = held[0] if isinstance(held, collections.deque | collections.defaultdict) else held.part
    assert not part.training
    assert model[0].training


@pytest.mark.parametrize("slots", [False, True])
def test_a_holder_that_refuses_to_tell_an_attribute_is_carried_as_it_is_held(slots):
    """So do configurations of transformers whose layers differ."""

    @dataclasses.dataclass(slots=slots)
    class Config:
        part: nn.Module
        width: int = 4

        def __getattribute__(self, name):
            if name == "width":
                raise RuntimeError("the layers have widths of their own")
            return object.__getattribute__(self, name)

    model = nn.Sequential(nn.Linear(2, 2))
    model.config = Config(model[0])
    twin = clone_of(model)
    assert twin.config.part is twin[0] and object.__getattribute__(twin.config, "width") == 4


def test_a_configuration_stays_one():
    @dataclasses.dataclass
    class Configuration:
        sizes: list

    model = nn.Sequential(nn.Linear(2, 2))
    model.config = Configuration([1, 2])
    assert clone_of(model).config is model.config


# -- any nest of containers ------------------------------------------------------------------
KINDS = ("module", "list", "dict", "deque", "tuple", "namespace")
NESTS = st.lists(st.tuples(st.sampled_from(KINDS), st.lists(st.integers(0, 9), max_size=3)), min_size=1, max_size=10)


def nest(recipe: list[tuple[str, list[int]]]) -> nn.Module:
    """A model with one attribute for each part of the recipe; what may grow may hold any part, itself too, and a tuple those before it."""
    empty = {"module": nn.Module, "list": list, "dict": dict, "deque": collections.deque, "namespace": types.SimpleNamespace}
    parts: list = [None if kind == "tuple" else empty[kind]() for kind, _ in recipe]
    for place, (kind, held) in enumerate(recipe):
        if kind == "tuple":
            parts[place] = tuple(parts[each] for each in held if each < place)
    for place, (kind, held) in enumerate(recipe):
        for slot, each in enumerate(parts[number] for number in held if number < len(parts)):
            if kind in ("list", "deque"):
                parts[place].append(each)
            elif kind == "dict":
                parts[place][slot] = each
            elif kind != "tuple":
                vars(parts[place])[f"a{slot}"] = each
    model = nn.Module()
    vars(model).update({f"part{place}": part for place, part in enumerate(parts)})
    return model


def walk(value, numbers: dict[int, int], modules: list[nn.Module]):
    """The shape of a nest, in which each thing that may change has a number: two are alike if the same things are one."""
    if isinstance(value, tuple):
        return ["tuple", *(walk(each, numbers, modules) for each in value)]
    if id(value) in numbers:
        return numbers[id(value)]
    if isinstance(value, list | dict | collections.deque | types.SimpleNamespace | nn.Module):
        numbers[id(value)] = len(numbers)
        modules += [value] if isinstance(value, nn.Module) else []
        named = vars(value) if isinstance(value, types.SimpleNamespace | nn.Module) else value
        held = [named[key] for key in named if not str(key).startswith("_")] if isinstance(named, dict) else list(named)
        return [type(value).__name__, *(walk(each, numbers, modules) for each in held)]
    return value


@settings(deadline=None)
@given(NESTS)
def test_what_is_one_in_the_model_is_one_in_the_twin_and_no_module_is_in_both(recipe):
    model, modules, clones = nest(recipe), [], []
    shape = walk(model, {}, modules)
    assert walk(clone_of(model), {}, clones) == shape
    assert not {id(each) for each in modules} & {id(each) for each in clones}
