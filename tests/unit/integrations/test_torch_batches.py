"""How DataParallel cuts up arguments and joins results, in which containers, and what it refuses."""

import collections
import dataclasses
import types
from collections import UserDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from crossdevice.errors import ConversionError, MismatchError, ShapeMismatchError, StructureMismatchError
from crossdevice.integrations.torch import DataParallel, register_container

TWO = ["cpu:0", "cpu:1"]


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Record:
    x: Any
    y: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenRecord:
    x: Any
    y: Any


class Attributes:
    """As attrs makes them, for which a class need not be made by attrs."""

    __attrs_attrs__ = (types.SimpleNamespace(name="x"), types.SimpleNamespace(name="y"))

    def __init__(self, x, y):
        self.x, self.y = x, y


class Words(UserDict):
    pass


class Dictionary(dict):
    pass


class Row(list):
    pass


class Pair(tuple):
    pass


class Registered:
    def __init__(self, x, y):
        self.held = [x, y]


register_container(Registered, lambda value: value.held, lambda _, values: Registered(*values))

BY_KEY = (lambda value: value["x"], lambda value: value["y"])
BY_NAME = (lambda value: value.x, lambda value: value.y)
BY_NUMBER = (lambda value: value[0], lambda value: value[1])
CONTAINERS = {
    "dict": (lambda x, y: {"x": x, "y": y}, BY_KEY),
    "ordered": (lambda x, y: collections.OrderedDict(x=x, y=y), BY_KEY),
    "dict subclass": (lambda x, y: Dictionary(x=x, y=y), BY_KEY),
    "UserDict": (lambda x, y: Words(x=x, y=y), BY_KEY),
    "mapping": (lambda x, y: types.MappingProxyType({"x": x, "y": y}), BY_KEY),
    "named tuple": (Point, BY_NAME),
    "dataclass": (Record, BY_NAME),
    "frozen dataclass": (FrozenRecord, BY_NAME),
    "attrs": (Attributes, BY_NAME),
    "list": (lambda x, y: [x, y], BY_NUMBER),
    "list subclass": (lambda x, y: Row([x, y]), BY_NUMBER),
    "tuple subclass": (lambda x, y: Pair((x, y)), BY_NUMBER),
    "deque": (lambda x, y: collections.deque([x, y]), BY_NUMBER),
    "structseq": (lambda x, y: torch.return_types.max((x, y)), BY_NUMBER),
    "registered": (Registered, (lambda value: value.held[0], lambda value: value.held[1])),
    "nested": (
        lambda x, y: {"a": [Record(Point(x, None), Words(y=y))]},
        (lambda value: value["a"][0].x.x, lambda value: value["a"][0].y["y"]),
    ),
}


class Through(torch.nn.Module):
    """Scales what it finds in a container and returns it in another like it."""

    def __init__(self, make, first, second):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.make, self.first, self.second = make, first, second
        self.sizes = []

    def forward(self, value):
        x, y = self.first(value), self.second(value)
        self.sizes.append(len(x))
        return self.make(x * self.weight, (y * self.weight).sum())


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_are_split_and_joined_and_all_gradients_flow(name):
    make, (first, second) = CONTAINERS[name]
    module = Through(make, first, second)
    given = make(torch.arange(5.0), torch.ones(5, 2))
    result = DataParallel(module, TWO)(given)
    assert type(result) is type(given)
    assert module.sizes == [3, 2]
    assert first(result).tolist() == [0, 1, 2, 3, 4]
    assert second(result).tolist() == [6, 4], "one number per replica"
    assert len(first(given)) == 5, "the argument itself is left alone"
    (first(result).sum() + second(result).sum()).backward()
    assert module.weight.grad.item() == 20


class Opaque:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Returns(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.function = function

    def forward(self, x):
        return {"it": self.function(x * self.weight)}


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda x: Opaque(x=x), "Opaque"),
        (lambda x: Opaque(deep=[{"x": Opaque(x=x)}]), "Opaque"),
        (lambda x: Slotted(x), "Slotted"),
        (lambda x: {x}, "builtins.set"),
        (lambda x: torch.distributions.Normal(x, 1), "torch.distributions.normal.Normal"),
    ],
)
def test_unknown_containers_are_refused_by_name_as_results_and_as_arguments(make, kind):
    """If replicas returned equal tensors, comparing them would drop all gradients but the first's."""
    model = DataParallel(Returns(make), TWO)
    with pytest.raises(
        ConversionError, match=rf"result\['it'\] of replica 0 is a .*{kind}.*register_container"
    ):
        model(torch.ones(2, 3))
    with pytest.raises(ConversionError, match=rf"x is a .*{kind}.*register_container"):
        model(make(torch.ones(2, 3)))


def test_gradients_of_replicas_with_equal_results_all_count():
    model = DataParallel(Returns(lambda x: Record(x.sum(1))), TWO)
    model(torch.ones(2, 3))["it"].x.sum().backward()
    assert model.module.weight.grad.tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda x: len(x), ConversionError, r"numbers \[3, 2\] at result\['it'\]"),
        (lambda x: Record(x, 3), ConversionError, r"numbers \[3, 3\] at result\['it'\]\.y"),
        (lambda x: x.shape, ConversionError, "numbers"),
        (lambda x: x.detach().numpy(), ConversionError, r"result\['it'\] of replica 0 is a numpy\.ndarray"),
        (lambda x: "even" if len(x) == 2 else "odd", MismatchError, r"\['odd', 'even'\]"),
        (
            lambda x: x if len(x) == 2 else None,
            StructureMismatchError,
            r"replica 1 returned Tensor at result",
        ),
        (
            lambda x: {str(len(x)): x},
            StructureMismatchError,
            r"replica 1 returned dict with \['2'\].*\['3'\]",
        ),
        (lambda x: x[:, : len(x)], ShapeMismatchError, r"shape \(2, 2\) on replica 1 and \(3, 3\)"),
    ],
)
def test_results_that_cannot_be_joined_are_refused_with_their_place(function, error, message):
    with pytest.raises(error, match=message):
        DataParallel(Returns(function), TWO)(torch.ones(5, 3))


# -------------------------------------------------------------------- what is the batch


class Takes(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x, *more, mask=None, options=None):
        given = [x, *more, mask, *(options or {}).values()]
        self.seen.append([tuple(value.shape) for value in given if isinstance(value, torch.Tensor)])
        return x


def shapes(*inputs, devices=TWO, replicate=(), dim=0, **kwargs):
    """What each replica gets."""
    module = Takes()
    DataParallel(module, devices, dim=dim, replicate=replicate)(*inputs, **kwargs)
    return module.seen


def test_tensors_without_a_batch_go_to_every_replica():
    x = torch.ones(4, 2)
    assert shapes(x, mask=torch.ones(1, 7, 7)) == [[(2, 2), (1, 7, 7)]] * 2
    assert shapes(torch.ones(1, 2), x) == [[(1, 2), (2, 2)]] * 2
    assert shapes(x, torch.tensor(3.0), mask="causal") == [[(2, 2), ()]] * 2
    assert shapes(torch.ones(3, 4), dim=1, mask=torch.ones(5)) == [[(3, 2), (5,)]] * 2


def test_named_arguments_and_keys_go_to_every_replica():
    x, square = torch.ones(4, 2), torch.ones(4, 4)
    assert shapes(x, mask=square) == [[(2, 2), (2, 4)]] * 2, "it looks like a batch"
    assert shapes(x, mask=square, replicate=("mask",)) == [[(2, 2), (4, 4)]] * 2
    assert shapes(x, mask=square, replicate="mask") == [[(2, 2), (4, 4)]] * 2
    assert shapes(x, options={"table": torch.ones(7, 3)}, replicate=["table"]) == [[(2, 2), (7, 3)]] * 2
    assert shapes(torch.ones(9, 3), x, replicate=["x"]) == [[(9, 3), (2, 2)]] * 2


def test_tensors_of_another_size_are_refused_by_name():
    with pytest.raises(
        ShapeMismatchError,
        match=r"mask has size 7 along dim 0; the batch has 4, as x has.*replicate=\('mask',\)",
    ):
        shapes(torch.ones(4, 2), mask=torch.ones(7, 7))
    with pytest.raises(ShapeMismatchError, match=r"options\['table'\] has size 3.*as more\[0\] has"):
        shapes(torch.ones(1, 2), torch.ones(4), options={"table": torch.ones(3)})


def test_small_batches_have_fewer_replicas_and_none_has_one():
    three = ["cpu:0", "cpu:1", "cpu:2"]
    assert shapes(torch.ones(2, 2), devices=three) == [[(1, 2)]] * 2
    assert shapes(torch.ones(1, 2), devices=three) == [[(1, 2)]]
    assert shapes(torch.ones(0, 2), devices=three) == [[(0, 2)]]
    assert shapes("no tensor", devices=three) == [[]]


# -------------------------------------------------------------------- tensors that are not plain


def packed():
    return torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])


def fake():
    with FakeTensorMode():
        return torch.ones(2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (packed, "a PackedSequence.*padded"),
        (fake, "a FakeTensor"),
        (lambda: torch.ones(2, device="meta"), "meta device.*to_empty"),
        (lambda: torch.ones(2, 2).to_sparse(), r"sparse_coo tensor; pass its to_dense\(\)"),
        (lambda: np.ones((2, 2)), r"numpy\.ndarray.*make it a tensor"),
    ],
)
def test_tensors_that_cannot_be_shared_are_refused_with_what_to_do(make, message):
    with pytest.raises(ConversionError, match=f"x is .*{message}"):
        shapes(make())


@pytest.mark.filterwarnings("ignore")  # PyTorch's own, about quantized and nested tensors
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), r"quantized.*dequantize\(\)"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(1)]), "nested tensor.*padded"),
    ],
)
def test_quantized_and_nested_tensors_are_refused(make, message):
    with pytest.raises(ConversionError, match=f"x is a {message}"):
        shapes(make())


def test_transformations_around_the_model_are_refused():
    model = DataParallel(torch.nn.Linear(3, 1), TWO)
    with pytest.raises(ConversionError, match=r"input is inside of a torch\.func transformation"):
        torch.func.grad(lambda x: model(x).sum())(torch.ones(4, 3))
    parameters, x = {name: p.detach() for name, p in model.named_parameters()}, torch.ones(4, 3)
    with pytest.raises(ConversionError, match=r"module\.weight is inside of a torch\.func transformation"):
        torch.func.grad(lambda own: torch.func.functional_call(model, own, x).sum())(parameters)


def test_parameters_without_data_are_refused():
    with pytest.raises(ConversionError, match=r"module\.weight is on the meta device"):
        DataParallel(torch.nn.Linear(3, 1, device="meta"), TWO)
    lazy = DataParallel(torch.nn.LazyLinear(1), TWO)
    with pytest.raises(ConversionError, match=r"module\.weight is not initialized yet; run one batch"):
        lazy(torch.ones(4, 3))
    lazy.module(torch.ones(1, 3))
    assert lazy(torch.ones(4, 3)).shape == (4, 1)


def test_a_sharded_tensor_is_refused(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        sharded = torch.distributed.tensor.distribute_tensor(torch.ones(2), mesh)
        with pytest.raises(ConversionError, match=r"x is a DTensor.*to_local\(\)"):
            shapes(sharded)
    finally:
        torch.distributed.destroy_process_group()
