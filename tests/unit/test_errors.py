"""Every refusal is ours and a built-in at once, names the odd one out, and leaves all arrays as they were."""

from __future__ import annotations

import dataclasses
import inspect
from collections import OrderedDict
from collections.abc import Callable
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

import crossdevice as cd
from conformance.rows import ALGORITHM_ROWS
from crossdevice import errors
from crossdevice.errors import (
    BitsMismatchError,
    ContextError,
    ConversionError,
    CrossDeviceError,
    DestinationError,
    DeviceError,
    DeviceMismatchError,
    DtypeError,
    DtypeMismatchError,
    FileError,
    LibraryMismatchError,
    MismatchError,
    OptionError,
    OutError,
    PlanError,
    ReduceOpError,
    ShapeMismatchError,
    StructureMismatchError,
    TopologyError,
)
from crossdevice.values.replica_scope import replica_scope

WATCHED: list[Any] = []


def kept(array: Any) -> Any:
    """An array whose bits are compared before and after every refusal."""
    WATCHED.append(array)
    return array


def f32(*numbers: float) -> np.ndarray:
    return kept(np.float32(numbers))


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return kept(np.ones(shape, dtype))


def tensor(*numbers: float, **named: Any) -> torch.Tensor:
    return kept(torch.tensor(numbers, **named))


def bits(arrays: list[Any]) -> list[tuple[Any, ...]]:
    found = []
    for array in arrays:
        memory = array.detach().numpy() if isinstance(array, torch.Tensor) else np.asarray(array)
        found.append((memory.dtype.str, memory.shape, memory.tobytes()))
    return found


@dataclasses.dataclass
class Refusal:
    """A call that must be refused: by which class, which built-in that also is, and with which words."""

    call: Callable[[cd.CrossDeviceOps], Any]
    error: type[CrossDeviceError]
    built_in: type[Exception]
    parts: tuple[str, ...]


PAIR = cd.PerReplica([f32(1, 2), f32(3, 4)])
SLICES = cd.IndexedSlices(ones(1, 2), kept(np.array([0])), (4, 2))
READ_ONLY = np.zeros(2, np.float32)
READ_ONLY.flags.writeable = False
REFUSALS: dict[str, Refusal] = {}


def refuses(name: str, error: type, built_in: type, call: Callable[..., Any], *parts: str) -> None:
    assert name not in REFUSALS, name
    REFUSALS[name] = Refusal(call, error, built_in, parts)


def reduces(name: str, error: type, built_in: type, value: Any, *parts: str, op: str = "sum") -> None:
    """A value that is refused alone, and in a batch after a good one."""
    refuses(f"reduce {name}", error, built_in, lambda ops: ops.reduce(op, value, "cpu:0"), *parts)
    pairs = [(PAIR, "cpu:0"), (value, "cpu:0")]
    refuses(f"batch_reduce {name}", error, built_in, lambda ops: ops.batch_reduce(op, pairs), *parts)


refuses(
    "replicas that should be the same",
    BitsMismatchError,
    ValueError,
    lambda ops: ops.check_same(PAIR),
    "replica",
)

# ---------------------------------------------------------------- destinations

for each in (None, 3, 2.5, True, [], ["cpu:0"], ("cpu:0",), {}, {"a": "cpu:0"}, "", b"cpu:0", {"cpu:0"}):
    words = ("destinations is", "expected a DistributedValues, a variable, an array or a device string")
    for name, call in {
        "reduce": lambda ops, each=each: ops.reduce("sum", PAIR, each),
        "reduce of one value": lambda ops, each=each: ops.reduce("sum", PAIR.values[0], each),
        "batch_reduce": lambda ops, each=each: ops.batch_reduce("sum", [(PAIR, "cpu:0"), (PAIR, each)]),
        "broadcast": lambda ops, each=each: ops.broadcast(PAIR.values[0], each),
        "gather": lambda ops, each=each: ops.gather(PAIR, each),
    }.items():
        refuses(f"{name} to {each!r}", DestinationError, ValueError, call, *words)
refuses(
    "reduce to an empty PerReplica",
    DestinationError,
    ValueError,
    lambda ops: ops.reduce("sum", PAIR, cd.PerReplica([])),
    "without components",
)
refuses(
    "the function reduce to an empty list",
    DestinationError,
    ValueError,
    lambda _: cd.reduce(list(PAIR.values), "sum", []),
    "empty list",
)

# ---------------------------------------------------------------- operations

for each in ("mode", "", " sum", None, 1, cd.VariableAggregation.MEAN, object, ["sum"]):
    words = (repr(each), "expected one of SUM, MEAN, MIN, MAX, PROD")
    for name, call in {
        "reduce": lambda ops, each=each: ops.reduce(each, PAIR, "cpu:0"),
        "reduce of one value": lambda ops, each=each: ops.reduce(each, PAIR.values[0], "cpu:0"),
        "batch_reduce": lambda ops, each=each: ops.batch_reduce(each, [(PAIR, PAIR)]),
        "batch_reduce of nothing": lambda ops, each=each: ops.batch_reduce(each, []),
        "explain": lambda ops, each=each: ops.explain(PAIR, PAIR, reduce_op=each),
        "all_reduce": lambda ops, each=each: cd.all_reduce(list(PAIR.values), each, algorithm=ops),
    }.items():
        refuses(f"{name} with {each!r}", ReduceOpError, ValueError, call, *words)
for each in (cd.VariableAggregation.NONE, cd.VariableAggregation.ONLY_FIRST_REPLICA, "SUM", None):
    refuses(
        f"from_variable_aggregation of {each!r}",
        ReduceOpError,
        ValueError,
        lambda _, each=each: cd.ReduceOp.from_variable_aggregation(each),
        repr(each),
        "VariableAggregation.SUM or .MEAN",
    )
COMPLEX = cd.PerReplica([ones(2, dtype=np.complex64), ones(2, dtype=np.complex64)])
for each in ("min", "max"):
    reduces(
        f"{each} of complex numbers",
        ReduceOpError,
        ValueError,
        COMPLEX,
        each.upper(),
        "complex64",
        "no order",
        op=each,
    )

# ---------------------------------------------------------------- values that are no arrays

SERIES = type("Series", (), {"__module__": "pandas.core.series", "__array__": lambda _: f32(1)})

for name, value, parts in [
    ("an empty PerReplica", cd.PerReplica([]), ("PerReplica without components", "one per replica")),
    ("None", None, ("is None", "expected an array")),
    ("a component None", cd.PerReplica([f32(1), None, f32(2)]), ("replica 1 ", "is None")),
    ("an object", object(), ("replica 0 holds an object", "expected a number or an array of numpy, torch")),
    ("a table of another library", SERIES(), ("holds a Series of pandas", "numpy.asarray makes one of it")),
    ("a dataclass", dataclasses.make_dataclass("Step", ["w"])(f32(1)), ("holds a Step", "vars makes a tree")),
    ("a mapping", MappingProxyType({"w": f32(1)}), ("holds a mappingproxy", "dict makes a tree of it")),
    ("a text", "text", ("replica 0 holds a str", "expected a number or an array")),
    ("a set", {1.0}, ("replica 0 holds a set",)),
    ("a text deep inside", cd.PerReplica([{"a": [f32(1), "x"]}] * 2), ("holds a str", "value['a'][1]")),
    ("a ragged list", [[1.0, 2.0], [3.0]], ("cannot be read as an array of numbers",)),
    ("a number beyond 64 bits", 2**70, ("cannot be read as an array of numbers",)),
    ("distributed values in one another", cd.PerReplica([PAIR, PAIR]), ("replica 0 (cpu:0)", "do not nest")),
    ("a masked array", cd.PerReplica([f32(1), np.ma.masked_array(f32(1), [True])]), ("replica 1", "mask")),
    ("a sparse tensor", cd.PerReplica([tensor(1.0), torch.eye(1).to_sparse()]), ("replica 1", "sparse_coo")),
    ("a tensor without data", cd.PerReplica([torch.ones(1, device="meta")]), ("replica 0", "meta")),
]:  # fmt: skip
    reduces(name, ConversionError, ValueError, value, *parts)
for name, value in {
    "a masked array": np.ma.masked_array(f32(1), [True]),
    "a sparse tensor": torch.ones(1, 1).to_sparse(),
    "an object": object(),
    "None": None,
}.items():
    words = () if value is None else ("replica 0",)
    for verb, call in {
        "broadcast": lambda ops, value=value: ops.broadcast(value, "cpu:0"),
        "gather": lambda ops, value=value: ops.gather(value, "cpu:0"),
    }.items():
        refuses(f"{verb} {name}", ConversionError, ValueError, call, *words)
refuses(
    "broadcast a PerReplica",
    ConversionError,
    ValueError,
    lambda ops: ops.broadcast(PAIR, "cpu:0"),
    "one value",
    "PerReplica",
)
refuses(
    "gather scalars", ConversionError, ValueError, lambda ops: ops.gather(cd.PerReplica([1.0, 2.0]), "cpu:0"),
    "at least one dimension",
)  # fmt: skip
for axis in (1, -2):
    refuses(
        f"gather along axis {axis}",
        ConversionError,
        ValueError,
        lambda ops, axis=axis: ops.gather(PAIR, "cpu:0", axis),
        f"axis {axis} is out of range for 1 dimension",
    )
refuses(
    "a PerReplica as an array", ConversionError, ValueError, lambda _: np.asarray(PAIR), ".values"
)  # fmt: skip
refuses(
    "the function all_reduce of what is no list",
    ConversionError,
    ValueError,
    lambda _: cd.all_reduce(PAIR.values[0]),
    "values is an ndarray",
    "one value per replica",
)
refuses(
    "slices without dense_shape made dense",
    ConversionError,
    ValueError,
    lambda _: cd.to_dense(cd.IndexedSlices(SLICES.values, SLICES.indices)),
    "no dense_shape",
)
refuses(
    "slices beyond their rows made dense",
    MismatchError,
    ValueError,
    lambda _: cd.to_dense(cd.IndexedSlices(SLICES.values, kept(np.array([4])), (4, 2))),
    "outside of its 4 rows",
)

refuses(
    "an array made dense",
    ConversionError,
    ValueError,
    lambda _: cd.to_dense(PAIR.values[0]),
    "to_dense takes IndexedSlices, got an ndarray",
)
WITHOUT_AXES = cd.IndexedSlices(kept(np.float32(1)), kept(np.array(0)), (4,))
refuses(
    "slices without axes made dense",
    ShapeMismatchError,
    ValueError,
    lambda _: cd.to_dense(WITHOUT_AXES),
    "indices of shape ()",
    "expected one index for each row",
)
reduces(
    "slices without axes",
    ShapeMismatchError,
    ValueError,
    cd.PerReplica([WITHOUT_AXES, WITHOUT_AXES]),
    "replica 0 (cpu:0)",
    "expected one index for each row",
)

# ---------------------------------------------------------------- malformed pairs

for name, pairs in {
    "None": None,
    "a number": 3,
    "a value": PAIR,
    "a text": "ab",
    "values": [PAIR],
    "lists of two": [(PAIR, "cpu:0"), [PAIR, "cpu:0"]],
    "tuples of one": [(PAIR,)],
    "tuples of three": [(PAIR, "cpu:0", None)],
    "a dict": {"cpu:0": PAIR},
}.items():
    refuses(
        f"batch_reduce of {name}",
        ConversionError,
        ValueError,
        lambda ops, pairs=pairs: ops.batch_reduce("sum", pairs),
        "expected an iterable of (value, destinations) tuples",
    )

refuses(
    "batch_reduce of tuples, whose lengths are told",
    ConversionError,
    ValueError,
    lambda ops: ops.batch_reduce("sum", [(PAIR, "cpu:0"), (PAIR, "cpu:0", None)]),
    "pair 1 is a tuple of 3; expected an iterable of (value, destinations) tuples",
)
refuses(
    "batch_reduce of a generator of values",
    ConversionError,
    ValueError,
    lambda ops: ops.batch_reduce("sum", (value for value in [PAIR])),
    "expected an iterable of (value, destinations) tuples",
)

# ---------------------------------------------------------------- dtypes

for name, array in {
    "bool": kept(np.array([True, False])),
    "text": kept(np.array(["a", "b"])),
    "bytes": kept(np.array([b"a", b"b"])),
    "objects": np.array([object(), object()]),
    "dates": kept(np.array(["2020-01-01"], "datetime64[D]")),
    "records": kept(np.array([(1, 2.0)], "i4,f4")),
    "longdouble": kept(np.ones(2, np.longdouble)),
    "a bool tensor": kept(torch.tensor([True])),
}.items():
    reduces(
        name, DtypeError, TypeError, cd.PerReplica([array, array]), "replica 0 (cpu:0)", "dtype", "float32"
    )
reduces("Python's bools", DtypeError, TypeError, cd.PerReplica([True, False]), "dtype bool")
reduces(
    "a bool deep inside", DtypeError, TypeError, cd.PerReplica([{"a": np.array([True])}] * 2), "value['a']"
)
reduces(
    "slices of bools",
    DtypeError,
    TypeError,
    cd.PerReplica([cd.IndexedSlices(np.ones((1, 1), bool), np.array([0]))] * 2),
    "dtype bool",
)

# ---------------------------------------------------------------- replicas that do not agree

KERNELS = [{"dense": {"kernel": ones(*((4, 2) if replica == 3 else (2, 4)))}} for replica in range(8)]
reduces(
    "one shape of eight",
    ShapeMismatchError,
    ValueError,
    cd.PerReplica(KERNELS),
    "replica 3 (cpu:3) has shape (4, 2) at value['dense']['kernel']; the other 7 have (2, 4)",
)
reduces(
    "two shapes",
    ShapeMismatchError,
    ValueError,
    cd.PerReplica([ones(2), ones(3)], ["cpu:4", "cpu:9"]),
    "replica 1 (cpu:9) has shape (3,); replica 0 (cpu:4) has (2,)",
)
reduces(
    "several odd shapes",
    ShapeMismatchError,
    ValueError,
    cd.PerReplica([ones(3), ones(2), ones(2), ones(4), ones(2)]),
    "replica 0 (cpu:0) has shape (3,); replica 3 (cpu:3) has shape (4,); the other 3 have (2,)",
)
reduces(
    "the first as the odd one out",
    ShapeMismatchError,
    ValueError,
    cd.PerReplica([ones(), ones(1), ones(1)]),
    "replica 0 (cpu:0) has shape (); the other 2 have (1,)",
)
reduces(
    "one dtype of three",
    DtypeMismatchError,
    ValueError,
    cd.PerReplica([[ones(2), f32(1)], [ones(2), ones(1, dtype=np.float64)], [ones(2), f32(1)]]),
    "replica 1 (cpu:1) has dtype float64 at value[1]; the other 2 have float32",
)
reduces(
    "a number next to a double",
    DtypeMismatchError,
    ValueError,
    cd.PerReplica([1.0, kept(np.array(1.0))]),
    "replica 1 (cpu:1) has dtype float64; replica 0 (cpu:0) has float32",
)
reduces(
    "one structure of three",
    StructureMismatchError,
    ValueError,
    cd.PerReplica([{"a": f32(1)}, {"a": f32(1)}, {"b": f32(1)}]),
    "replica 2 (cpu:2) has structure",
    "'b'",
    "the other 2 have",
    "'a'",
)
LAYERS = {f"layer{number}.weight": f32(1) for number in range(40)}
reduces(
    "one leaf of a large structure",
    StructureMismatchError,
    ValueError,
    cd.PerReplica([LAYERS, {**LAYERS, "head": f32(1)}, LAYERS]),
    "replica 1 (cpu:1) has structure dict of 41 leaves, with value['head']; the other 2 have",
    "dict of 40 leaves, without value['head']",
)
reduces(
    "another order in a large structure",
    StructureMismatchError,
    ValueError,
    cd.PerReplica([OrderedDict(LAYERS), OrderedDict(LAYERS), OrderedDict(reversed(LAYERS.items()))]),
    "replica 2 (cpu:2) has structure OrderedDict of 40 leaves, in the order value['layer39.weight'], ",
    "in the order value['layer0.weight'], value['layer1.weight'], value['layer2.weight'] and 37 more",
)
reduces(
    "an array next to a list of one",
    StructureMismatchError,
    ValueError,
    cd.PerReplica([f32(1), [f32(1)], f32(1)]),
    "replica 1 (cpu:1) has structure",
    "the other 2 have",
)
reduces(
    "None in the place of a leaf",
    StructureMismatchError,
    ValueError,
    cd.PerReplica([{"a": f32(1)}, {"a": None}, {"a": f32(1)}]),
    "replica 1 (cpu:1)",
)
reduces(
    "one library of three",
    LibraryMismatchError,
    ValueError,
    cd.PerReplica([{"a": f32(1)}, {"a": tensor(1.0)}, {"a": f32(1)}]),
    "replica 1 (cpu:1) has an array of torch at value['a']; the other 2 have numpy",
)
reduces(
    "rows and indices of two libraries",
    LibraryMismatchError,
    ValueError,
    cd.PerReplica([cd.IndexedSlices(kept(torch.ones(1, 2)), kept(np.array([0])))] * 2),
    "replica 0 (cpu:0)",
    "torch",
    "numpy",
)
VARIABLES = {"a": cd.Variable(f32(1), device="cpu:1"), "b": cd.Variable(f32(1), device="cpu:2")}
reduces(
    "leaves of one replica on two devices",
    DeviceMismatchError,
    ValueError,
    cd.PerReplica([VARIABLES, VARIABLES]),
    "replica 0 (cpu:1) at value['b']",
    "cpu:2; expected one on cpu:1",
)
for name, call, parts in [
    ("a number placed on a GPU", lambda _: cd.PerReplica([1.0], ["cuda:0"]), ("replica 0", "cuda:0", "host")),
    (
        "a variable placed elsewhere",
        lambda _: cd.PerReplica([f32(1), cd.Variable(f32(1), device="cpu:3")], ["cpu:0", "cpu:1"]),
        ("replica 1 was placed on cpu:1", "cpu:3"),
    ),
]:  # fmt: skip
    refuses(name, DeviceMismatchError, ValueError, call, *parts)
refuses(
    "more devices than components",
    StructureMismatchError,
    ValueError,
    lambda _: cd.PerReplica([f32(1)], ["cpu:0", "cpu:1"]),
    "1 component and 2 devices",
)
for name, value, error, part in [
    ("other axes", [ones(2, 3), ones(2, 4)], ShapeMismatchError, "shape outside of axis 0 (4,)"),
    ("numbers of dimensions", [ones(2, 3), ones(2)], ShapeMismatchError, "number of dimensions 1"),
    ("dtypes", [ones(2), ones(2, dtype=np.int32)], DtypeMismatchError, "dtype int32"),
    ("libraries", [ones(2), tensor(1.0)], LibraryMismatchError, "an array of torch"),
]:  # fmt: skip
    refuses(
        f"gather different {name}",
        error,
        ValueError,
        lambda ops, value=value: ops.gather(cd.PerReplica(value), "cpu:0"),
        f"replica 1 (cpu:1) has {part}; replica 0 (cpu:0) has",
    )
refuses(
    "a variable assigned another shape",
    ShapeMismatchError,
    ValueError,
    lambda _: cd.Variable(f32(1, 2), name="weights").assign(f32(1)),
    "'weights'",
    "(2,)",
    "(1,)",
)

# ---------------------------------------------------------------- devices

for name in (
    "foo", " cpu:0", "/device:CPU", "device:cpu", "/cpu:0/gpu:1", "/cpu:0/device:CPU:0", "cpu:1:2", "cpu:one",
    "/device:Foo:1", "/device:CPU:x", "/replica:a/cpu:0", "/task:/cpu:0", "/job:w/gadget:1",
):  # fmt: skip
    for verb, call in {
        "Device.parse": lambda _, name=name: cd.Device.parse(name),
        "reduce to": lambda ops, name=name: ops.reduce("sum", PAIR, name),
        "PerReplica on": lambda _, name=name: cd.PerReplica([f32(1)], [name]),
        "Variable on": lambda _, name=name: cd.Variable(f32(1), device=name),
    }.items():
        refuses(f"{verb} {name!r}", DeviceError, ValueError, call, repr(name))
for thing in (3, 1.5, object, ["cpu:0"]):
    refuses(
        f"Device.parse {thing!r}",
        DeviceError,
        ValueError,
        lambda _, thing=thing: cd.Device.parse(thing),
        "is not a device",
    )
TENSORS = cd.PerReplica([tensor(1.0), tensor(2.0)])
for library, value in {"numpy": PAIR, "torch": TENSORS}.items():
    for name in (
        "cuda:99",
        "/gpu:99",
        "cpu:-1",
        "/tpu:0",
        "/job:w/cpu:0",
        "/task:1/cpu:0",
        "/replica:1",
    ):
        pairs = [(value, value), (value, name)]
        for verb, call in {
            "reduce": lambda ops, value=value, name=name: ops.reduce("sum", value, name),
            "batch_reduce": lambda ops, pairs=pairs: ops.batch_reduce("sum", pairs),
            "broadcast": lambda ops, value=value, name=name: ops.broadcast(value.values[0], name),
            "gather": lambda ops, value=value, name=name: ops.gather(value, name),
        }.items():  # fmt: skip
            parts = (str(cd.Device.parse(name)), "cpu:0, cpu:1, ...")
            refuses(f"{verb} {library} to {name}", DeviceError, ValueError, call, *parts)
    refuses(
        f"reduce {library} on a device that does not exist",
        DeviceError,
        ValueError,
        lambda _, value=value: cd.ReductionToOneDevice("cuda:99").reduce("sum", value, "cpu:0"),
        "cuda:99",
    )
refuses(
    "reduce to a device that holds no data",
    DeviceError,
    ValueError,
    lambda ops: ops.reduce("sum", TENSORS, "/device:META:0"),
    "meta:0",
)

# ---------------------------------------------------------------- options

for name, value in [
    ("bytes_per_pack", -1), ("bytes_per_pack", float("nan")), ("bytes_per_pack", float("inf")),
    ("bytes_per_pack", "1k"), ("bytes_per_pack", None), ("bytes_per_pack", True),
    ("timeout_seconds", -5), ("timeout_seconds", "soon"), ("timeout_seconds", float("nan")),
    ("timeout_seconds", timedelta(seconds=-5)), ("timeout_seconds", True),
    ("implementation", "MPI"), ("implementation", 3), ("implementation", None),
    ("precision", "sloppy"), ("precision", None), ("precision", "FAST"), ("precision", ["fast"]),
    ("lowering", "on"), ("lowering", None), ("lowering", True),
]:  # fmt: skip
    refuses(
        f"{name}={value!r}",
        OptionError,
        ValueError,
        lambda _, name=name, value=value: cd.CommunicationOptions(**{name: value}),
        name,
    )
for value in ("fast", {}, 3, cd.CommunicationOptions):
    for verb, call in {
        "reduce": lambda ops, value=value: ops.reduce("sum", PAIR, "cpu:0", value),
        "reduce with hints": lambda ops, value=value: ops.reduce(
            "sum", PAIR, "cpu:0", experimental_hints=value
        ),
        "batch_reduce": lambda ops, value=value: ops.batch_reduce("sum", [(PAIR, "cpu:0")], value),
        "gather": lambda ops, value=value: ops.gather(PAIR, "cpu:0", 0, value),
    }.items():  # fmt: skip
        refuses(f"{verb} and options {value!r}", OptionError, ValueError, call, "options")
for make in (cd.HierarchicalCopyAllReduce, cd.NcclAllReduce, cd.RingAllReduce, cd.HalvingDoublingAllReduce,
             cd.TreeAllReduce, cd.DirectAllReduce, cd.AllReduceCrossDeviceOps):  # fmt: skip
    for num_packs in (-1, 1.5, "a", None, True):
        refuses(
            f"{make.__name__} with {num_packs!r} packs",
            OptionError,
            ValueError,
            lambda _, make=make, num_packs=num_packs: make(num_packs=num_packs),
            "num_packs",
            repr(num_packs),
        )
for name, call in {
    "AllReduceCrossDeviceOps": lambda _: cd.AllReduceCrossDeviceOps("carrier pigeon"),
    "all_reduce": lambda _: cd.all_reduce(list(PAIR.values), algorithm="carrier pigeon"),
}.items():
    refuses(f"{name} by an unknown name", OptionError, ValueError, call, "'carrier pigeon'", "ring", "tree")

# ---------------------------------------------------------------- out

SPARE = f32(0, 0)
for name, out, parts in [
    ("of another shape", f32(0, 0, 0), ("out[0] (cpu:0)", "shape (3,)", "expected (2,)")),
    ("of another dtype", ones(2, dtype=np.int32), ("out[0] (cpu:0)", "int32", "expected float32")),
    ("of another library", tensor(0.0, 0.0), ("out[0] (cpu:0)", "Tensor", "an array of numpy")),
    ("that is read-only", READ_ONLY, ("out[0] (cpu:0)", "read-only")),
    ("that is strided", f32(0, 0, 0, 0)[::2], ("out[0] (cpu:0) is not contiguous; copy",)),
    ("that is masked", np.ma.array(f32(0, 0)), ("out[0] (cpu:0) is a masked array; copy",)),
    ("with too many components", [SPARE, SPARE], ("out[0]", "list")),
    ("in another structure", {"a": SPARE}, ("out[0]", "dict")),
    ("that is a number", 0.0, ("out[0]", "float")),
]:
    refuses(
        f"reduce to an out {name}",
        OutError,
        ValueError,
        lambda ops, out=out: ops.reduce("sum", PAIR, "cpu:0", out=out),
        *parts,
    )
    refuses(
        f"broadcast to an out {name}",
        OutError,
        ValueError,
        lambda ops, out=out: ops.broadcast(PAIR.values[0], "cpu:0", out=out),
        *parts,
    )
refuses(
    "reduce to one array for two devices",
    OutError,
    ValueError,
    lambda ops: ops.reduce("sum", PAIR, PAIR, out=(SPARE, SPARE)),
    "out[0] and out[1] overlap",
)
for name, out in {"too few": [], "too many": [None, None], "a number": 3}.items():
    refuses(
        f"batch_reduce with {name} for outs",
        OutError,
        ValueError,
        lambda ops, out=out: ops.batch_reduce("sum", [(PAIR, PAIR)], out=out),
        "out",
        "one for each of 1 pair",
    )
refuses(
    "a structure reduced to an out of another structure",
    OutError,
    ValueError,
    lambda ops: ops.reduce("sum", {"a": PAIR}, "cpu:0", out={"b": SPARE}),
    "out has another structure",
)
refuses(
    "structures reduced to an out of another structure",
    OutError,
    ValueError,
    lambda ops: ops.reduce("sum", cd.PerReplica([{"a": f32(1)}, {"a": f32(2)}]), "cpu:0", out={"b": SPARE}),
    "out for cpu:0 has another structure",
)

# ---------------------------------------------------------------- contexts and plans


def inside_a_replica(call: Callable[[cd.CrossDeviceOps], Any]) -> Callable[[cd.CrossDeviceOps], Any]:
    def called(ops: cd.CrossDeviceOps) -> Any:
        with replica_scope(2):
            return call(ops)

    return called


for name, call in {
    "reduce": lambda ops: ops.reduce("sum", PAIR, "cpu:0"),
    "batch_reduce": lambda ops: ops.batch_reduce("sum", [(PAIR, "cpu:0")]),
    "broadcast": lambda ops: ops.broadcast(PAIR.values[0], "cpu:0"),
    "gather": lambda ops: ops.gather(PAIR, "cpu:0"),
}.items():
    refuses(
        f"{name} inside a replica",
        ContextError,
        RuntimeError,
        inside_a_replica(call),
        f"{name} was called inside replica 2",
    )
refuses(
    "the function all_reduce inside a replica",
    ContextError,
    RuntimeError,
    inside_a_replica(lambda ops: cd.all_reduce(list(PAIR.values), algorithm=ops)),
    "inside replica 2",
)


class ForgetsTheLast(cd.CrossDeviceOps):
    def plan_sum(self, build, destinations):
        total = build.add(build.inputs[:-1], at=destinations[0])
        return [build.copy(total, to=device) for device in destinations]


refuses(
    "a plan that forgets a replica",
    PlanError,
    AssertionError,
    lambda _: ForgetsTheLast().reduce("sum", cd.PerReplica([f32(1)] * 3), "cpu:0"),
    "ForgetsTheLast.plan_sum gives a wrong plan: replica 2 (cpu:2) missing from output 0",
)

refuses(
    "a topology that does not exist",
    TopologyError,
    ValueError,
    lambda _: cd.read_topology("dgx9"),
    "'dgx9' is not a topology; expected a file that ends in .toml, or one of",
    "dgx1v",
)

refuses(
    "files that do not exist",
    FileError,
    OSError,
    lambda _: cd.average_files(["none.safetensors"], "mean.safetensors"),
    "none.safetensors does not exist",
)

CLASSES = [thing for thing in vars(errors).values() if inspect.isclass(thing)]


# ---------------------------------------------------------------- the tests


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_is_ours_and_a_built_in_and_leaves_everything_usable(name):
    refusal = REFUSALS[name]
    for row in ALGORITHM_ROWS:
        ops, watched = row.make(), list(WATCHED)
        before = bits(watched)
        with pytest.raises(refusal.built_in) as caught:
            refusal.call(ops)
        assert type(caught.value) is refusal.error, row.name
        assert isinstance(caught.value, CrossDeviceError)
        for part in refusal.parts:
            assert part in str(caught.value), row.name
        assert bits(watched) == before, row.name
        assert ops.reduce("sum", PAIR, "cpu:0").tolist() == [4, 6], "the next call is not usable"


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_every_exception_class_is_raised_by_some_refusal(error):
    # What goes wrong while something runs is raised by the tests of strategies, engines and groups.
    elsewhere = {
        "CrossDeviceError",
        "BoundError",
        "ReplicaError",
        "DeadlineError",
        "EngineError",
        "ProcessGroupError",
        "CorruptionError",
    }
    assert error.__name__ in elsewhere | {refusal.error.__name__ for refusal in REFUSALS.values()}


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_every_exception_class_is_in_the_tree_and_a_built_in(error):
    assert issubclass(error, CrossDeviceError)
    built_ins = (ValueError, TypeError, RuntimeError, TimeoutError, ConnectionError, AssertionError, OSError)
    assert error is CrossDeviceError or issubclass(error, built_ins)


@pytest.mark.filterwarnings("ignore")  # PyTorch's own, about quantized tensors
def test_a_quantized_tensor_is_called_so():
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(ConversionError, match=r"replica 1 \(cpu:1\) is a quantized tensor on cpu"):
        cd.all_reduce([torch.ones(2), quantized])


def test_an_array_of_another_library_is_the_only_error_in_the_traceback():
    with pytest.raises(LibraryMismatchError) as error:
        cd.all_reduce([tensor(1.0), f32(1)])
    assert error.value.__context__ is None


@pytest.mark.parametrize(("returned", "message"), [(None, "it is None"), ([1, 2], "output 0 is an int")])
def test_what_is_not_a_list_of_buffers_is_a_wrong_plan(returned, message):
    class Own(cd.CrossDeviceOps):
        def plan_sum(self, build, destinations):
            return returned

    with pytest.raises(PlanError, match=f"Own.plan_sum gives a wrong plan: {message}"):
        Own().reduce("sum", PAIR, PAIR)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (cd.PerReplica([ones(2), ones(3)]), ShapeMismatchError),
        (cd.PerReplica([ones(2), ones(2, dtype=np.float64)]), DtypeMismatchError),
        (cd.PerReplica([ones(2), tensor(1.0, 2.0)]), LibraryMismatchError),
        (cd.PerReplica([np.array([True])] * 2), DtypeError),
        (cd.PerReplica([object()] * 2), ConversionError),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_users_hook_is_not_called_with_what_is_refused(value, error):
    class Own(cd.CrossDeviceOps):
        def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
            pytest.fail("called with unchecked arguments")

    with pytest.raises(error):
        Own().reduce("sum", value, "cpu:0")
    with pytest.raises(error):
        Own().batch_reduce("sum", [(PAIR, "cpu:0"), (value, "cpu:0")])


def test_gathering_slices_is_not_implemented():
    with pytest.raises(NotImplementedError, match="gather of IndexedSlices"):
        cd.ReductionToOneDevice().gather(cd.PerReplica([SLICES, SLICES]), "cpu:0")


def test_pairs_may_come_from_any_iterable():
    for row in ALGORITHM_ROWS:
        for pairs in (
            ((PAIR, "cpu:0") for _ in range(2)),
            zip([PAIR, PAIR], ["cpu:0", "cpu:1"], strict=True),
            iter([(PAIR, "cpu:0"), (PAIR, PAIR)]),
            ((PAIR, "cpu:0"), (PAIR, PAIR)),
            {(PAIR, "cpu:0"), (PAIR, "cpu:1")},
        ):
            results = row.make().batch_reduce("sum", pairs)
            assert [type(results), len(results)] == [list, 2]
