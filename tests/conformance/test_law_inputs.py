"""An array of any layout, shape or byte order is read as what it means, and so are plain numbers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import crossdevice as cd
from conformance.oracle import expected
from conformance.rows import (
    ALGORITHM_ROWS,
    LOWERINGS,
    NUMPY,
    TORCH,
    components_of,
    each_algorithm,
    each_backend,
    each_option,
    same_numbers,
)

RAMP = np.arange(24, dtype=np.float32).reshape(4, 6)


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


NUMPY_LAYOUTS = {
    "strided": lambda a: np.repeat(np.repeat(a, 2, 0), 3, 1)[::2, ::3],
    "reversed": lambda a: a[::-1, ::-1].copy()[::-1, ::-1],
    "transposed": lambda a: a.T.copy().T,
    "fortran": np.asfortranarray,
    "broadcast": lambda a: np.broadcast_to(a[:1], a.shape),
    "read-only": read_only,
    "big-endian": lambda a: a.astype(">f4"),
    "strided big-endian": lambda a: np.repeat(a.astype(">f4"), 2, 1)[:, ::2],
    "unaligned": lambda a: np.frombuffer(b"x" + a.tobytes(), np.float32, offset=1).reshape(a.shape),
}
TORCH_LAYOUTS = {
    "strided": lambda a: TORCH.make(np.repeat(np.repeat(a, 2, 0), 3, 1))[::2, ::3],
    "transposed": lambda a: TORCH.make(a.T.copy()).T,
    "expanded": lambda a: TORCH.make(a[:1]).expand(a.shape),
    "requires_grad": lambda a: TORCH.make(a).requires_grad_(),
    "parameter": lambda a: torch.nn.Parameter(TORCH.make(a)),
    "part of a graph": lambda a: TORCH.make(a).requires_grad_() * 1,
    "negated view": lambda a: torch.imag(torch.complex(TORCH.make(0 * a), TORCH.make(-a)).conj()),
}


def test_every_layout_is_what_it_says():
    assert not NUMPY_LAYOUTS["unaligned"](RAMP).flags.aligned
    assert not NUMPY_LAYOUTS["strided"](RAMP).flags.c_contiguous
    assert TORCH_LAYOUTS["negated view"](RAMP).is_neg()
    assert not TORCH_LAYOUTS["transposed"](RAMP).is_contiguous()


def check_layout(row, values, memory_of):
    flat = [np.array(memory_of(value), np.float32).reshape(-1) for value in values]
    value = cd.PerReplica(values)
    before = [memory_of(array).tobytes() for array in values]
    for op, options in itertools.product(("MEAN", "MAX"), each_option()):
        right = expected(op, flat, "float32", options.precision).reshape(RAMP.shape)
        for component in map(memory_of, components_of(row.make().reduce(op, value, value, options))):
            assert same_numbers(component, right), (op, options)
            assert not any(np.shares_memory(component, memory_of(array)) for array in values)
    assert [memory_of(array).tobytes() for array in values] == before


@each_algorithm("inputs")
@pytest.mark.parametrize("layout", NUMPY_LAYOUTS)
def test_numpy_arrays_of_any_layout_are_reduced(row, layout):
    values = [NUMPY_LAYOUTS[layout](RAMP * factor) for factor in (1, -2, 5)]
    check_layout(row, values, np.asarray)


@each_algorithm("inputs")
@pytest.mark.parametrize("layout", TORCH_LAYOUTS)
@pytest.mark.filterwarnings("ignore:a tensor that requires a gradient")
def test_torch_tensors_of_any_layout_are_reduced(row, layout):
    values = [TORCH_LAYOUTS[layout](RAMP * factor) for factor in (1, -2, 5)]
    check_layout(row, values, lambda tensor: tensor.detach().resolve_neg().numpy())


@each_algorithm("inputs")
def test_replicas_may_have_different_layouts(row):
    layouts = [NUMPY_LAYOUTS[name](RAMP) for name in ("strided", "fortran", "big-endian", "read-only")]
    check_layout(row, layouts, np.asarray)


@each_algorithm("inputs")
def test_conjugated_tensors_are_reduced_as_what_they_mean(row):
    ops = row.make()
    plain = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    for options in each_option():
        value = cd.PerReplica([plain.conj(), plain, plain])
        for component in components_of(ops.reduce("sum", value, value, options)):
            assert component.tolist() == [3 + 2j, 9 - 4j]


@each_backend("inputs")
@each_algorithm("inputs")
def test_any_shape_is_kept_also_without_dimensions_or_elements(row, backend):
    ops = row.make()
    shapes = [(), (0,), (0, 3), (3, 0, 2), (1,), (1, 1, 1), (5, 2)]
    for count, op, options, shape in backend.product(
        (1, 2, 5), ("SUM", "MEAN", "MIN"), each_option(), shapes
    ):
        value = backend.per_replica([np.full(shape, replica, np.float32) for replica in range(count)])
        right = {"SUM": sum(range(count)), "MEAN": sum(range(count)) / count, "MIN": 0}[op]
        for component in components_of(ops.reduce(op, value, value, options)):
            assert type(component) is backend.array_type
            assert same_numbers(backend.memory(component), np.full(shape, right, np.float32))


@each_backend("inputs")
@each_algorithm("inputs")
def test_a_batch_may_mix_shapes_dtypes_devices_and_empty_arrays(row, backend):
    shapes = [(), (0,), (3, 2), (0, 3), (4,)]
    pairs, rights = [], []
    for number, (shape, dtype) in enumerate(itertools.product(shapes, ("float32", "int32", "float64"))):
        count = 2 + number % 2
        devices = [f"cpu:{replica + number % 3}" for replica in range(count)]
        value = backend.per_replica([np.full(shape, number + r, dtype) for r in range(count)], devices)
        pairs.append((value, value if number % 4 else f"cpu:{number}"))
        rights.append(np.full(shape, count * number + sum(range(count)), dtype))
    ops = row.make()
    for options in each_option():
        results = ops.batch_reduce("sum", pairs, options)
        assert type(results) is list
        for result, right in zip(results, rights, strict=True):
            for component in components_of(result):
                assert same_numbers(backend.memory(component), right)


@each_algorithm("inputs")
@pytest.mark.parametrize(
    ("numbers", "right"),
    [
        ([1.5, 2.5], np.float32(4)),
        ([1, 2], np.int32(3)),
        ([2**40, 1], np.int64(2**40 + 1)),
        ([1j, 2], np.complex128(2 + 1j)),
        ([[1.0, 2.0], [3.0, 4.0]], np.float32([4, 6])),
        ([[[1, 2], [3, 4]], [[5, 6], [7, 8]]], np.int32([[6, 8], [10, 12]])),
        ([(1, 2), (3, 4)], np.int32([4, 6])),
    ],
    ids=str,
)
def test_plain_numbers_and_lists_become_arrays_of_tensorflows_dtypes(row, numbers, right):
    ops = row.make()
    if numbers in ([2**40, 1], [1j, 2]):
        numbers = [np.asarray(number, right.dtype) for number in numbers]
    value = cd.PerReplica(numbers)
    for component in components_of(ops.reduce("sum", value, value)):
        assert type(component) is np.ndarray
        assert same_numbers(component, np.asarray(right))


def test_a_plain_number_is_a_value_of_one_replica():
    for row in ALGORITHM_ROWS:
        for number, dtype in [(2.5, np.float32), (2, np.int32), (2**40, np.int64), (1j, np.complex128)]:
            result = row.make().reduce("sum", number, "cpu:3")
            assert (result.dtype, result.shape, result[()]) == (dtype, (), number)


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.int8, np.int64, np.complex128])
def test_numpy_scalars_keep_their_dtype(kind):
    result = cd.ReductionToOneDevice().reduce("sum", cd.PerReplica([kind(1), kind(2)]), "cpu:0")
    assert same_numbers(result, np.asarray(kind(3)))
    nested = cd.ReductionToOneDevice().reduce("sum", cd.PerReplica([{"a": kind(1)}, {"a": kind(2)}]), "cpu:0")
    assert same_numbers(nested["a"], np.asarray(kind(3)))


def test_a_plain_number_beyond_float32_is_infinite_and_warns_of_nothing():
    assert cd.reduce([1e300, 1.0]).tolist() == float("inf")
    assert cd.reduce([[1.0, -1e300], [1.0, 1.0]]).tolist() == [2.0, -float("inf")]


def test_a_value_that_is_no_container_is_one_replica():
    for row, backend in itertools.product(ALGORITHM_ROWS, (NUMPY, TORCH)):
        array = backend.make(np.float32([1, 2]))
        for target in ("cpu:0", "cpu:4"):
            result = row.make().reduce("mean", array, target)
            assert backend.bits(result) == backend.bits(array)
            assert not np.shares_memory(backend.memory(result), backend.memory(array))


def test_the_components_of_a_mirrored_value_are_reduced_like_any_others():
    for row in ALGORITHM_ROWS:
        value = cd.Mirrored([np.float32([1, 2]), np.float32([1, 2])])
        result = row.make().reduce("sum", value, value)
        assert [component.tolist() for component in result.values] == [[2, 4], [2, 4]]


def test_variables_are_read_and_never_written():
    for row in ALGORITHM_ROWS:
        held = [np.float32([1, 2]), np.float32([3, 4])]
        variables = [cd.Variable(array, device=f"cpu:{k + 2}") for k, array in enumerate(held)]
        result = row.make().reduce("sum", cd.PerReplica(variables), cd.PerReplica(variables))
        assert result.devices == (cd.Device("cpu", 2), cd.Device("cpu", 3))
        assert [component.tolist() for component in result.values] == [[4, 6], [4, 6]]
        assert [variable.value().tolist() for variable in variables] == [[1, 2], [3, 4]]


def test_variables_that_hold_plain_numbers_are_read_like_the_numbers():
    for row in ALGORITHM_ROWS:
        value = cd.PerReplica([cd.Variable(1.0), cd.Variable(2.0)])
        assert row.make().reduce("sum", value, "cpu:0") == 3.0
        assert row.make().reduce("sum", cd.Variable([1.0, 2.0]), "cpu:0").tolist() == [1, 2]
        assert row.make().broadcast(cd.Variable(1.0), "cpu:0") == 1.0


@pytest.mark.filterwarnings("ignore:the matrix subclass")
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_matrices_are_read_as_arrays(lowering):
    """They multiply, and keep two dimensions, in ways of their own."""
    arrays = [np.arange(6.0).reshape(2, 3) + number for number in range(3)]
    options = cd.CommunicationOptions(lowering=lowering)
    for op, right in (("sum", sum(arrays)), ("mean", sum(arrays) / 3), ("prod", np.prod(arrays, axis=0))):
        for algorithm in ("ring", "one_device"):
            found = cd.all_reduce(
                [np.matrix(array) for array in arrays], op, algorithm=algorithm, options=options
            )
            assert {type(each) for each in found} == {np.ndarray}
            assert [each.tolist() for each in found] == [right.tolist()] * 3
