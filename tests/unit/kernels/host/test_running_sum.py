"""Sums that grow from call to call, against fractions, in both kinds of kernels."""

from __future__ import annotations

import functools
from fractions import Fraction

import numpy as np
import pytest

from conformance.oracle import rounded
from crossdevice.kernels.host import running_sum
from crossdevice.kernels.host.fused_pass import fused_pass, select_kernels
from crossdevice.kernels.host.running_sum import MAX_LEFTOVERS, MIN_CROWD, RANGE_ELEMENTS, RunningSum
from crossdevice.values.recipe import Recipe
from crossdevice.values.reduce_op import ReduceOp
from unit.kernels.host.adversarial import adversarial, bits_of, dtype_named, misaligned, spread_out

DTYPES = ("float16", "bfloat16", "float32", "float64")
WEIGHTS = [3.0, 1.0, 0.3, 7e-3, 1e3]


@pytest.fixture(params=["numba", "numpy"])
def kernels(request):
    select_kernels(request.param)
    yield request.param
    select_kernels(None)


def written(running, divisor=1.0, dtype=None):
    out = np.empty(running.parts[0].size, running.dtype if dtype is None else dtype)
    running.write(out, Fraction(divisor))
    return out


def true_mean(arrays, weights, dtype):
    divisor = sum(map(Fraction, weights))
    columns = zip(*(array.tolist() for array in arrays), strict=True)
    totals = [
        sum(Fraction(w) * Fraction(x) for w, x in zip(weights, column, strict=True)) for column in columns
    ]
    return np.array([rounded(total / divisor, dtype.name) for total in totals]).astype(dtype)


@pytest.mark.parametrize("name", DTYPES)
def test_exact_sums_are_the_true_ones_in_any_order_and_however_merged(kernels, name):
    random, dtype = np.random.default_rng(1), dtype_named(name)
    arrays = [adversarial(random, dtype, 150, finite=True) for _ in WEIGHTS]
    arrays = [np.concatenate([a, spread_out(random, dtype, 150, bits=8, exponents=200)]) for a in arrays]
    right = true_mean(arrays, WEIGHTS, dtype)
    for order in (range(5), [3, 1, 4, 0, 2]):
        first, second = (RunningSum(300, dtype, "exact") for _ in range(2))
        for position, number in enumerate(order):
            (first if position < 3 else second).add([misaligned(arrays[number], 3)], [WEIGHTS[number]])
        first.merge(second)
        mean = written(first, sum(map(Fraction, WEIGHTS)))
        wrong = mean != right
        assert not wrong.any(), (mean[wrong], right[wrong])


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("precision", ["accurate", "exact"])
def test_plain_sums_have_the_bits_of_one_pass_over_all(kernels, name, precision):
    random, dtype = np.random.default_rng(2), dtype_named(name)
    size = RANGE_ELEMENTS + 37 if (kernels, precision) == ("numba", "accurate") else 150
    arrays = [adversarial(random, dtype, size) for _ in range(9)]
    for divisor in (None, 9):
        out = np.empty(size, dtype)
        fused_pass(arrays, [out], Recipe(ReduceOp.SUM, precision, divisor))
        running = RunningSum(size, dtype, precision)
        running.add(arrays[:3], [1.0] * 3)
        running.add(arrays[3:], [1.0] * 6)
        found = written(running, divisor or 1)
        differ = np.flatnonzero(bits_of(found) != bits_of(out))
        assert not differ.size, (found[differ][:5], out[differ][:5])


@pytest.mark.parametrize("name", DTYPES)
def test_exact_sums_of_nothing_but_negative_zeros_are_negative_zeros(kernels, name):
    arrays = [np.array(signs * 20, dtype_named(name)) for signs in ([-0.0, -0.0, 0.0], [-0.0, 0.0, -0.0])]
    whole, first, second = (RunningSum(60, arrays[0].dtype, "exact") for _ in range(3))
    whole.add(arrays, [1.0, 3.0])
    first.add(arrays[:1], [1.0])
    second.add(arrays[1:], [3.0])
    first.merge(second)
    for running, divisor in ((whole, 1), (whole, 4), (first, 1), (first, Fraction(3, 8))):
        assert np.signbit(written(running, divisor)).tolist() == [True, False, False] * 20


@pytest.mark.parametrize("name", ["int8", "uint16", "int32", "int64", "uint64", "bool"])
def test_means_of_integers_are_rounded_to_nearest_even(kernels, name):
    random, dtype = np.random.default_rng(3), np.dtype(name)
    if name == "bool":
        arrays = [random.integers(0, 2, 200).astype(bool) for _ in range(4)]
    else:
        limits = np.iinfo(dtype)
        arrays = [random.integers(limits.min, limits.max, 200, dtype=dtype, endpoint=True) for _ in range(4)]
        for array in arrays:
            array[:100] //= array.dtype.type(2) ** (8 * dtype.itemsize - 4)
    weights = [1.0, 1.0, 1.0, 1.0]
    running = RunningSum(200, dtype, "accurate")
    running.add(arrays, weights)
    columns = zip(*(array.tolist() for array in arrays), strict=True)
    right = [round(Fraction(sum(column), 4)) for column in columns]
    assert written(running, 4).tolist() == [dtype.type(number) for number in right]


def test_kernels_that_run_out_of_room_go_on_where_they_stopped(monkeypatch):
    monkeypatch.setattr(running_sum, "MAX_LEFTOVERS", 16)
    size = 100
    arrays = [
        np.full(size, 2.0**900),
        np.full(size, 1.0),
        np.full(size, 2.0**-900),
        np.full(size, -(2.0**900)),
    ]
    running = RunningSum(size, np.dtype("float64"), "exact")
    for array in arrays:
        running.add([array], [1.0])
    assert len(running.fractions) == 0 or set(running.fractions) == set(range(size))
    running.add([np.full(size, 2.0**-500), np.full(size, 3 * 2.0**-700)], [1.0, 1.0])
    assert set(running.fractions) == set(range(size))
    assert (written(running) == 1.0).all()
    running.add([np.full(size, -1.0)], [1.0])
    assert (written(running) == 2.0**-500).all()


def test_infinities_and_nans_end_up_in_the_result():
    values = np.float32([np.inf, -np.inf, np.nan, np.inf, 1])
    others = np.float32([1, 1, 1, -np.inf, np.inf])
    for precision in ("accurate", "exact"):
        running = RunningSum(5, values.dtype, precision)
        running.add([values], [2.0])
        running.add([others], [1.0])
        np.testing.assert_array_equal(written(running, 3), [np.inf, -np.inf, np.nan, np.nan, np.inf])


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float8_e5m2"])
def test_kernels_that_begin_a_sum_and_add_to_it_have_the_bits_of_the_reference(name):
    """Also of zeros with a sign, of what is not finite, and of more inputs than are read at once."""
    dtype = dtype_named(name)
    random = np.random.default_rng(0)
    arrays = [random.standard_normal(1003).astype(np.float32).astype(dtype) for _ in range(14)]
    arrays[0][:3], arrays[1][:3] = [-0.0, np.inf, np.nan], [-0.0, -np.inf, 1.0]
    weights = [float(number) for number in random.integers(1, 900, len(arrays))]
    found = {}
    for kernels in ("numba", "numpy"):
        select_kernels(kernels)
        try:
            running = RunningSum(1003, dtype, "accurate")
            for start, stop in ((0, 2), (2, 3), (3, 14)):
                running.add(arrays[start:stop], weights[start:stop])
        finally:
            select_kernels(None)
        found[kernels] = running.parts[0]
    is_number = ~np.isnan(found["numpy"])
    assert np.count_nonzero(is_number) == 1001
    np.testing.assert_array_equal(np.isnan(found["numba"]), ~is_number)
    assert found["numba"][is_number].tobytes() == found["numpy"][is_number].tobytes()


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_only_what_the_rounding_kernel_is_not_certain_of_is_rounded_in_numpy(monkeypatch, name):
    dtype, size = dtype_named(name), 4000
    arrays = [adversarial(np.random.default_rng(seed), dtype, size, finite=True) for seed in range(2)]
    for array in arrays:
        array[: size // 2] = np.random.default_rng(3).standard_normal(size // 2)
        array[100:103] = [5e-324, -0.0, 5e-324]  # such quotients of float64 are too small to be certain of
    running = RunningSum(size, dtype, "exact")
    running.add(arrays, [3.0, 0.3])
    slowly, kernels = [], []
    write_some = RunningSum.write_some

    def counted(self, out, where, divisor):
        slowly.append(out[where].size)
        write_some(self, out, where, divisor)

    monkeypatch.setattr(RunningSum, "write_some", counted)
    for selected in ("numba", "numpy"):
        select_kernels(selected)
        try:
            kernels.append(written(running, Fraction(3.3)))
        finally:
            select_kernels(None)
    assert bits_of(kernels[0]).tobytes() == bits_of(kernels[1]).tobytes()
    assert np.signbit(kernels[0][101])
    assert slowly.pop() == size
    assert sum(slowly) < size
    assert name == "float32" or sum(slowly) > 0


@pytest.mark.parametrize("name", ["bfloat16", "float32"])
def test_where_many_elements_do_not_fit_all_get_more_parts_until_none_is_left(kernels, name):
    random, dtype = np.random.default_rng(5), dtype_named(name)
    size = 3 * MIN_CROWD
    arrays = [(random.standard_normal(size) * 2.0 ** random.integers(-110, 110, size)) for _ in range(6)]
    arrays = [array.astype(dtype) for array in arrays]
    running = RunningSum(size, dtype, "exact")
    for array, weight in zip(arrays, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], strict=True):
        running.add([array], [weight])
    assert len(running.parts) > 2
    assert running.num_apart <= MIN_CROWD
    mean = written(running, 21)
    few = slice(0, size, 97)
    right = true_mean([array[few] for array in arrays], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], dtype)
    assert mean[few].tobytes() == right.tobytes()


def test_short_sums_share_calls_of_a_kernel_and_have_the_bits_of_each_alone(monkeypatch):
    calls = []
    kernel_for = running_sum._kernel_for

    def counted(family, dtype):
        kernel = kernel_for(family, dtype)

        def call(*arguments):
            calls.append((family, dtype.name))
            return kernel(*arguments)

        return call

    monkeypatch.setattr(running_sum, "_kernel_for", functools.cache(counted))
    chosen = np.random.default_rng(5)
    dtypes = [np.dtype("float32"), np.dtype("float64")]
    tasks, alone = [], []
    for number in range(300):
        dtype = dtypes[number % 2]
        array = spread_out(chosen, dtype, 1 + number % 40, bits=20, exponents=120)
        array[:: 7 + number] = np.inf
        tasks.append((RunningSum(array.size, dtype, "exact"), [array], [3.0]))
        alone.append(RunningSum(array.size, dtype, "exact"))
    for _ in range(2):
        running_sum.add_all(tasks)
    assert sorted(calls) == [("expansion2", "float32")] * 2 + [("expansion3", "float64")] * 2
    monkeypatch.setattr(running_sum, "MAX_LEFTOVERS", 3)  # a call ends early, in any of its rows
    for running, _, _ in tasks:
        running.clear()
    for _ in range(2):
        running_sum.add_all(tasks)
    select_kernels("numpy")
    for (running, arrays, weights), expected in zip(tasks, alone, strict=True):
        for _ in range(2):
            expected.add(arrays, weights)
        assert written(running, 6).tobytes() == written(expected, 6).tobytes()
    select_kernels(None)


@pytest.mark.parametrize("number", [1, MAX_LEFTOVERS + 5, 3 * MAX_LEFTOVERS])
def test_overflown_elements_are_those_that_one_pass_gives_however_many_they_are(kernels, number):
    plain = np.linspace(-3, 5, 4 * MAX_LEFTOVERS).astype(np.float32)
    arrays = [plain, plain.copy(), -plain]
    arrays[1][:number] = np.inf
    arrays[1][1:number:3] = np.nan
    arrays[2][2:number:5] = -np.inf
    out = np.empty_like(plain)
    fused_pass(arrays, [out], Recipe(ReduceOp.SUM, "exact", None))
    whole, half, other = (RunningSum(plain.size, plain.dtype, "exact") for _ in range(3))
    for array in arrays:
        whole.add([array], [1.0])
    half.add(arrays[:2], [1.0, 1.0])
    other.add(arrays[2:], [1.0])
    half.merge(other)
    for running in (whole, half):
        assert written(running).tobytes() == out.tobytes()
        assert written(running).tobytes() == out.tobytes()  # it stays as it is
    copied = np.empty(plain.size - 7, np.float32)
    whole.copy_of(7, plain.size).write(copied)
    assert copied.tobytes() == out[7:].tobytes()
    whole.clear()
    whole.add([plain], [1.0])
    assert written(whole).tobytes() == plain.tobytes()
