"""Arrays of subclasses of ndarray, which count as the ndarrays they are underneath."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import crossdevice as cd

DEVICES = ["cpu:0", "cpu:1"]

OPTIONS = [
    cd.CommunicationOptions(lowering=lowering, precision=precision)
    for lowering in ("auto", "off")
    for precision in ("fast", "accurate", "exact")
]


class Stubborn(np.ndarray):
    """Keeps two axes, as `np.matrix` does, and refuses arithmetic."""

    def __array_finalize__(self, source):
        if self.ndim != 2:
            raise AssertionError("not two axes")

    def __array_ufunc__(self, *_):
        raise AssertionError("arithmetic with the subclass")


def _reduced(op: str, options: cd.CommunicationOptions, **others: Any) -> Callable[[list[Any]], Any]:
    return lambda arrays: cd.all_reduce(arrays, op, options=options, **others)


def _packed(arrays):
    ops = cd.AllReduceCrossDeviceOps("ring", num_packs=2)
    pairs = [(cd.PerReplica(arrays), DEVICES[0])] * 3
    return ops.batch_reduce("sum", pairs, cd.CommunicationOptions(lowering="off"))


def _rows(arrays, *weights):
    slices = [cd.IndexedSlices(array, np.array([0, 1]), (4, 2)) for array in arrays]
    found = cd.reduce(slices, "mean", weights=weights or None)
    return [found.values, found.indices]


def _accumulated(arrays):
    total = cd.Accumulator()
    for array in arrays:
        total.add({"w": array}, weight=2)
    return total.mean()["w"]


def _along_axis(op: str) -> Callable[[list[Any]], Any]:
    return lambda arrays: cd.MirroredStrategy(DEVICES).reduce(op, cd.PerReplica(arrays), axis=0)


CALLS: dict[str, Callable[[list[Any]], Any]] = {
    **{
        f"{op}, {options.lowering}, {options.precision}": _reduced(op, options)
        for op in ("sum", "mean", "max", "prod", "median")
        for options in OPTIONS
    },
    **{
        f"weighted, {options.lowering}, {options.precision}": _reduced("mean", options, weights=[3, 0.5])
        for options in OPTIONS
    },
    "packs": _packed,
    "gather along axis 0": lambda arrays: cd.gather(arrays, axis=0),
    "gather along axis 1": lambda arrays: cd.all_gather(arrays, axis=1),
    "broadcast": lambda arrays: cd.broadcast(arrays[0], DEVICES),
    "reduce_scatter": cd.reduce_scatter,
    "all_to_all": lambda arrays: cd.all_to_all(arrays, axis=1),
    "sparse rows": _rows,
    "sparse rows with weights": lambda arrays: _rows(arrays, 3, 1),
    "dense rows": lambda arrays: cd.to_dense(cd.IndexedSlices(arrays[0], np.array([1, 1]), (4, 2))),
    "sparse beside dense": lambda arrays: cd.reduce(
        [arrays[0], cd.IndexedSlices(arrays[1], np.array([1, 1]), (2, 2))]
    ),
    "accumulator": _accumulated,
    "bound": lambda arrays: cd.bind(arrays)(),
    "function": lambda arrays: cd.ReductionToOneDevice(accumulation_fn=sum).reduce(
        "mean", cd.PerReplica(arrays), DEVICES[0]
    ),
    **{f"{op} along an axis": _along_axis(op) for op in ("sum", "mean", "max")},
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("view", [np.matrix, lambda array: array.view(Stubborn)], ids=["matrix", "stubborn"])
@pytest.mark.parametrize("dtype", ["int64", "float64"])
@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_results_of_subclasses_are_those_of_their_ndarrays(name, view, dtype):
    call, plain = CALLS[name], np.array([[1, 2], [3, 4]], dtype)
    arrays = [plain, 10 * plain]
    expected = _parts(call(arrays))
    for subclassed in ([view(each.copy()) for each in arrays], [plain, view(10 * plain)]):
        found = _parts(call(subclassed))
        assert [type(part) for part in found] == [np.ndarray] * len(expected)
        for one, other in zip(found, expected, strict=True):
            assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_results_are_written_to_memory_of_subclasses(options):
    arrays = [np.matrix([[1.0, 2.0], [3.0, 4.0]]), np.matrix([[10.0, 20.0], [30.0, 40.0]])]
    out = [np.matrix(np.zeros((2, 2))) for _ in arrays]
    found = cd.all_reduce(arrays, options=options, out=out)
    assert all(one is other for one, other in zip(found, out, strict=True))
    assert [each.tolist() for each in out] == [[[11, 22], [33, 44]]] * 2
    cd.all_reduce(arrays, options=options, out=arrays)
    assert [each.tolist() for each in arrays] == [[[11, 22], [33, 44]]] * 2


def _parts(result: Any) -> list[Any]:
    if isinstance(result, cd.DistributedValues):
        result = result.values
    return list(result) if isinstance(result, (list, tuple)) else [result]
