"""Compiled kernels repeat the bits of the NumPy pass, and are compiled once for all processes."""

from __future__ import annotations

import ctypes
import io
import math
import mmap
import os
import subprocess
import sys
import threading
from fractions import Fraction

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.oracle import FORMATS, rounded
from crossdevice.kernels.families import MAX_DEPTH, positions_of, program_of
from crossdevice.kernels.host import fused_pass as module
from crossdevice.kernels.host.fused_pass import fused_pass, select_kernels, selected_kernels
from crossdevice.kernels.host.llvm import numba_pass
from crossdevice.kernels.host.llvm.code import STREAMED_LINE_BYTES
from crossdevice.kernels.host.llvm.lanes import Lanes
from crossdevice.kernels.host.reference.numpy_pass import numpy_pass
from crossdevice.kernels.host.work_list import BLOCK_INPUTS
from crossdevice.values.dtypes import COMPLEXES, FLOATS, result_dtype
from crossdevice.values.recipe import Recipe
from crossdevice.values.reduce_op import ReduceOp
from unit.kernels.host.adversarial import (
    BFLOAT16,
    adversarial,
    dtype_named,
    misaligned,
    same_bits,
    spread_out,
)

SUM, PROD, MIN, MAX = ReduceOp.SUM, ReduceOp.PROD, ReduceOp.MIN, ReduceOp.MAX
NUMBERS_OF_INPUTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 17)
SIZES = (0, 1, 7, 15, 16, 17, 1000)

# What would compile the same code for another width of integer is left to the other widths.
ROWS = [
    *((dtype, SUM, precision) for dtype in FLOATS for precision in ("fast", "accurate", "exact")),
    *((dtype, PROD, precision) for dtype in ("float16", "float64") for precision in ("fast", "accurate")),
    *((dtype, MIN, "accurate") for dtype in (*FLOATS, "int8", "uint32")),
    *((dtype, MAX, "fast") for dtype in ("bfloat16", "float32", "uint8", "int64")),
    *((dtype, op, "fast") for dtype in ("int8", "uint16", "int64") for op in (SUM, PROD)),
    *((dtype, SUM, precision) for dtype in COMPLEXES for precision in ("fast", "accurate", "exact")),
]
MEANS = [
    *((dtype, precision) for dtype in FLOATS for precision in ("fast", "accurate", "exact")),
    *((dtype, "fast") for dtype in ("int8", "uint16", "int32", "uint64")),
    *((dtype, "accurate") for dtype in ("uint8", "int16", "uint32")),
]


@pytest.fixture(autouse=True)
def numba_kernels():
    pytest.importorskip("numba")
    select_kernels("numba")
    yield
    select_kernels(None)


@pytest.fixture
def random():
    return np.random.default_rng(20)


def assert_same_bits(inputs, recipe, into=None, num_outputs=3):
    outputs = [np.empty(inputs[0].size, into or inputs[0].dtype) for _ in range(num_outputs)]
    expected = np.empty_like(outputs[0])
    kept = [array.copy() for array in inputs]
    fused_pass(inputs, outputs, recipe)
    numpy_pass(inputs, [expected], recipe)
    for output in outputs:
        assert same_bits(output, expected, any_nan=recipe.precision == "fast")
    assert all(same_bits(array, copy) for array, copy in zip(inputs, kept, strict=True))


def is_compiled(recipe, dtype, into):
    return module.prepared_for(recipe, dtype, into) is not None


@pytest.mark.parametrize(("name", "op", "precision"), ROWS, ids=lambda value: getattr(value, "name", value))
def test_all_numbers_of_inputs_and_sizes_have_the_bits_of_numpy(name, op, precision, random):
    dtype = dtype_named(name)
    recipe = Recipe(op, precision)
    assert is_compiled(recipe, dtype, dtype)
    for num_inputs in NUMBERS_OF_INPUTS:
        for size in SIZES:
            assert_same_bits([adversarial(random, dtype, size) for _ in range(num_inputs)], recipe)


@pytest.mark.parametrize(("name", "precision"), MEANS)
def test_means_have_the_bits_of_numpy(name, precision, random):
    dtype, into = dtype_named(name), dtype_named(result_dtype(name, ReduceOp.MEAN))
    for num_inputs, divisor in ((1, 1), (3, 3), (8, 8), (9, 7), (4, 1000)):
        recipe = Recipe(SUM, precision, divisor)
        assert is_compiled(recipe, dtype, into)
        for size in SIZES:
            assert_same_bits([adversarial(random, dtype, size) for _ in range(num_inputs)], recipe, into)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("divisor", [None, 3, 8])
def test_exact_results_are_right_however_far_apart_the_terms(name, divisor, random, monkeypatch):
    dtype = dtype_named(name)
    elements_in_numpy = []

    def counted(inputs, outputs, recipe):
        elements_in_numpy.append(inputs[0].size)
        numpy_pass(inputs, outputs, recipe)

    monkeypatch.setattr(module, "numpy_pass", counted)
    for bits in (2, 11, 53):
        for exponents in (0, 5, 20, 80, 300):
            elements_in_numpy.clear()
            inputs = [spread_out(random, dtype, 3000, bits=bits, exponents=exponents) for _ in range(8)]
            inputs[7][:1000] = -inputs[0][:1000]
            assert_same_bits(inputs, Recipe(SUM, "exact", divisor))
            # Neighbouring magnitudes, which is what replicas have, never need the slow way.
            assert exponents > 5 or not elements_in_numpy


@pytest.mark.parametrize("divisor", [None, 8])
@pytest.mark.parametrize("scale", [2.0**-130, 1.0, 2.0**119, 2.0**127])
def test_accurate_bfloat16_sums_that_fit_into_float32_and_those_that_do_not(scale, divisor, random):
    for num_inputs in (2, 7, 8, 16):
        for exponents in range(0, 16, 2):
            with np.errstate(over="ignore"):
                inputs = [
                    (spread_out(random, BFLOAT16, 200, bits=8, exponents=exponents) * BFLOAT16.type(scale))
                    for _ in range(num_inputs)
                ]
            assert_same_bits(inputs, Recipe(SUM, "accurate", divisor))


@pytest.mark.parametrize("exponent", range(20, 40))
def test_exact_results_are_right_where_sums_just_stop_fitting(exponent):
    # 21 * 2**e and half of its last place in float32 are a tie, which 2**-23 breaks: in all e + 28 bits,
    # of which a float64 holds 53.
    column = [1.75 * 2.0**exponent] * 12 + [2.0 ** (exponent - 20), 1 + 2.0**-23, -1.0]
    inputs = [np.full(70, term, np.float32) for term in column]
    outputs = [np.empty(70, np.float32)]
    fused_pass(inputs, outputs, Recipe(SUM, "exact"))
    assert (outputs[0] == 21 * 2.0**exponent + 2.0 ** (exponent - 19)).all()


def test_what_no_kernel_can_decide_is_not_written_before_it_is_decided():
    # A tie in float32 that is broken by a term which every float64 sum of these loses.
    column = [1.0, 2.0**-24, 2.0**-80, 2.0**-149, -(2.0**-80)]
    for size in (1, 100, 300_000):
        inputs = [np.full(size, term, np.float32) for term in column]
        fused_pass(inputs, inputs, Recipe(SUM, "exact"))
        assert all((array == 1 + 2.0**-23).all() for array in inputs)


@pytest.mark.parametrize("divisor", [None, 8, 7])
@pytest.mark.parametrize("name", FLOATS)
def test_magnitudes_far_apart_are_decided_by_the_kernel(name, divisor, random, monkeypatch):
    monkeypatch.setattr(module, "numpy_pass", None)
    dtype = dtype_named(name)
    for num_inputs in (2, 8, 32):
        with np.errstate(over="ignore"):
            inputs = [
                (random.standard_normal(3000) * 10.0 ** random.integers(-6, 6, 3000)).astype(dtype)
                for _ in range(num_inputs)
            ]
        outputs = [np.empty(3000, dtype)]
        fused_pass(inputs, outputs, Recipe(SUM, "exact", divisor))
        expected = np.empty(3000, dtype)
        numpy_pass(inputs, [expected], Recipe(SUM, "exact", divisor))
        assert same_bits(outputs[0], expected)


@given(
    st.sampled_from(FLOATS),
    st.lists(st.tuples(st.integers(-(2**12), 2**12), st.integers(-45, 45)), min_size=1, max_size=12),
    st.sampled_from([None, 1, 2, 3, 8, 10, 5000]),
)
def test_sums_near_the_middle_of_two_results_fall_to_the_right_side(name, terms, divisor):
    """Few bits, far apart: where a sum in float64 is rounded, and what it lost breaks a tie."""
    dtype = dtype_named(name)
    with np.errstate(all="ignore"):
        column = [np.array(number * 2.0**exponent).astype(dtype) for number, exponent in terms]
    column = [each for each in column if np.isfinite(each.astype(float))] or [np.zeros((), dtype)]
    inputs = [np.full(70, each, dtype) for each in column]
    outputs = [np.empty(70, dtype)]
    fused_pass(inputs, outputs, Recipe(SUM, "exact", divisor))
    total = sum(Fraction(float(each)) for each in column) / (divisor or 1)
    right = float(rounded(total, name))
    assert {*outputs[0].astype(float).tolist()} == {right}


@st.composite
def columns_beside_a_tie(draw, name):
    """The middle of two results, perhaps broken by terms far below it, and large terms that cancel."""
    form = FORMATS[name]
    significand = 2 * draw(st.integers(2 ** (form.precision - 2), 2 ** (form.precision - 1) - 1)) + 1
    exponents = [form.least_exponent, 0, form.greatest_exponent]
    half = draw(st.sampled_from(exponents)) - form.precision + draw(st.integers(0, 3))
    terms = [(significand, half + 1), (1, half)]
    terms += draw(
        st.lists(st.tuples(st.sampled_from([-1, 1]), st.integers(half - 140, half - 1)), max_size=3)
    )
    for number in draw(st.lists(st.integers(1, 2**form.precision - 1), max_size=2)):
        exponent = half + draw(st.integers(-20, 70))
        terms += [(number, exponent), (-number, exponent)]
    sign = draw(st.sampled_from([-1, 1]))
    column = [sign * number * Fraction(2) ** exponent for number, exponent in terms]
    return draw(st.permutations([term for term in column if rounded(term, name) == term] + [Fraction(0)]))


@pytest.mark.parametrize("name", FLOATS)
@given(st.data())
def test_ties_next_to_ordinary_columns_are_rounded_once(name, data):
    """Also those of subnormal numbers, and the one above which a sum is infinite."""
    column = data.draw(columns_beside_a_tie(name))
    lane = data.draw(st.integers(0, 69))
    divisor = data.draw(st.sampled_from([None, 2, 3, 8]))
    random = np.random.default_rng(lane)
    inputs = [random.standard_normal(70).astype(dtype_named(name)) for _ in column]
    for array, term in zip(inputs, column, strict=True):
        array[lane] = float(term)
    outputs = [np.empty_like(inputs[0])]
    fused_pass(inputs, outputs, Recipe(SUM, "exact", divisor))
    for number, found in enumerate(outputs[0].astype(float).tolist()):
        total = sum(Fraction(float(array[number])) for array in inputs) / (divisor or 1)
        assert found == rounded(total, name)


@pytest.mark.parametrize("unusual", [[math.inf], [-math.inf], [math.inf, -math.inf], [math.nan]])
@pytest.mark.parametrize("divisor", [None, 2, 3])
@pytest.mark.parametrize("name", FLOATS)
def test_what_is_not_finite_changes_no_other_lane(name, divisor, unusual, random):
    dtype = dtype_named(name)
    for exponents in (0, 20):
        inputs = [spread_out(random, dtype, 70, bits=20, exponents=exponents) for _ in range(3)]
        for array, value in zip(inputs, unusual, strict=False):
            array[17] = value
        assert_same_bits(inputs, Recipe(SUM, "exact", divisor))


@pytest.mark.parametrize("name", FLOATS)
def test_a_sum_is_infinite_from_half_a_place_above_the_largest_number_on(name):
    dtype, form = dtype_named(name), FORMATS[name]
    largest = float(form.greatest)
    place = math.ldexp(1.0, form.greatest_exponent - form.precision + 1)
    columns = {
        (largest, place / 2): math.inf,
        (largest, place / 2, -place / 1024): largest,
        (largest, place / 2, -place / 1024, place / 1024): math.inf,
        (largest, largest, -largest, -place): largest - place,
        (-largest, -place / 4, -place / 4): -math.inf,
    }
    for column, right in columns.items():
        inputs = [np.full(70, term, dtype) for term in column]
        outputs = [np.empty(70, dtype)]
        fused_pass(inputs, outputs, Recipe(SUM, "exact"))
        assert {*outputs[0].astype(float).tolist()} == {right}
        # The mean of a sum that no float holds is one.
        fused_pass(inputs, outputs, Recipe(SUM, "exact", 4))
        assert {*outputs[0].astype(float).tolist()} == {
            rounded(sum(map(Fraction, column), Fraction(0)) / 4, name)
        }


@pytest.mark.parametrize("divisor", [None, 8])
def test_what_a_signal_handler_reduces_meanwhile_changes_nothing(divisor, monkeypatch):
    """Two passes of one thread, one within the other, keep what their kernels left apart."""
    open_column = [1.0, 2.0**-24, 2.0**-80, 2.0**-149, -(2.0**-80)]
    inner = [np.full(40, term, np.float32) for term in (2.0, 2.0**-23, 2.0**-80, 2.0**-149, -(2.0**-80))]

    def interrupted(inputs, outputs, recipe):
        monkeypatch.setattr(module, "numpy_pass", numpy_pass)
        fused_pass(inner, inner[:1], Recipe(SUM, "exact"))
        numpy_pass(inputs, outputs, recipe)

    monkeypatch.setattr(module, "numpy_pass", interrupted)
    inputs = [np.full(70, term, np.float32) for term in open_column]
    outputs = [np.empty(70, np.float32)]
    fused_pass(inputs, outputs, Recipe(SUM, "exact", divisor))
    assert (outputs[0] == np.float32((1 + 2.0**-23) / (divisor or 1))).all()
    assert (inner[0] == np.float32(2 + 2.0**-22)).all()


def test_every_input_of_a_block_is_read_by_instructions_of_its_own(monkeypatch):
    """Processors tell streams apart by the instruction that reads them; one for all is no stream."""
    num_loads = 0

    def load(self, address, kind):
        nonlocal num_loads
        num_loads += self.count > 1
        return loaded(self, address, kind)

    loaded = Lanes.load
    monkeypatch.setattr(Lanes, "load", load)
    monkeypatch.setattr(numba_pass, "_keeps_kernels", lambda: False)
    numba_pass.compiled_kernel.__wrapped__("chain wide SUM float32")
    assert num_loads >= BLOCK_INPUTS


def test_thousands_of_halves_have_their_true_mean():
    # 5000 is more than an exact sum in float64 is sure to be divided by without rounding twice.
    inputs = [np.float16([1, 65504, 2.0**-24])] * 4999 + [np.float16([1 + 2.0**-9, -65504, 2.0**-23])]
    outputs = [np.empty(3, np.float16)]
    for divisor in (None, 5000, 4096):
        fused_pass(inputs, outputs, Recipe(SUM, "exact", divisor))
        columns = np.array(inputs, float).T
        totals = [sum(map(Fraction, column)) / (divisor or 1) for column in columns]
        assert outputs[0].astype(float).tolist() == [float(rounded(total, "float16")) for total in totals]


@pytest.mark.parametrize("divisor", [None, 3, 8])
def test_exact_float64_ties_are_decided_by_the_kernel(divisor, random, monkeypatch):
    monkeypatch.setattr(module, "numpy_pass", None)
    inputs = [random.integers(2**52, 2**53, 4000).astype(np.float64) for _ in range(3)]
    outputs = [np.empty(4000)]
    fused_pass(inputs, outputs, Recipe(SUM, "exact", divisor))
    expected = [sum(map(int, column)) / (divisor or 1) for column in zip(*inputs, strict=True)]
    assert outputs[0].tolist() == expected


@pytest.mark.parametrize(
    ("name", "op"), [*((name, SUM) for name in FLOATS), ("float32", PROD)], ids=[*FLOATS, "PROD"]
)
def test_fast_follows_any_order(name, op, random):
    orders = [
        tuple(range(7, -1, -1)),
        (3, (0,), 1, 2, 7, 6, 5, 4),
        ((0, 1), (2, 3), (4, 5), (6, 7)),
        (((0, 1), (2, 3)), ((4, 5), (6, 7))),
        (7, (6, (5, (4, (3, (2, (1, 0))))))),
        ((0, 1, 2, 3), (4, 5, 6, 7)),
    ]
    for order in orders:
        for size in (1, 17, 1000):
            inputs = [adversarial(random, dtype_named(name), size) for _ in range(8)]
            assert_same_bits(inputs, Recipe(op, "fast", None, order))
            assert_same_bits(inputs, Recipe(op, "fast", 8, order))


def test_an_order_nested_too_deep_is_left_to_numpy(random):
    order = MAX_DEPTH + 2
    for position in range(MAX_DEPTH + 1, -1, -1):
        order = (position, order)
    assert program_of(order) is None
    inputs = [adversarial(random, np.dtype("float32"), 50) for _ in range(MAX_DEPTH + 3)]
    assert_same_bits(inputs, Recipe(SUM, "fast", None, order))


def test_orders_that_only_permute_need_no_program():
    assert positions_of((2, 1, 0)) == (2, 1, 0)
    assert positions_of(((2, 1), 0)) == (2, 1, 0)
    assert positions_of((((1,), 0),)) == (1, 0)
    assert positions_of((0, (1, 2))) is None


@pytest.mark.parametrize("precision", ["fast", "accurate", "exact"])
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_any_alignment_and_read_only_inputs(name, precision, random):
    dtype = dtype_named(name)
    recipe = Recipe(SUM, precision)
    for offset in (0, 1, 2, 16, 60):
        inputs = [misaligned(adversarial(random, dtype, 333), offset + 3 * number) for number in range(3)]
        for array in inputs:
            array.flags.writeable = False
        outputs = [misaligned(np.zeros(333, dtype), offset * number) for number in range(3)]
        expected = np.empty(333, dtype)
        fused_pass(inputs, outputs, recipe)
        numpy_pass(inputs, [expected], recipe)
        assert all(same_bits(output, expected, any_nan=precision == "fast") for output in outputs)


@pytest.mark.parametrize("precision", ["fast", "accurate", "exact"])
def test_outputs_may_be_the_inputs(precision, random):
    for size in (1, 17, 1000, 300_000):
        inputs = [adversarial(random, np.dtype("float32"), size, finite=True) for _ in range(4)]
        # Some columns that no kernel is certain of, and which must not be read after they are written.
        inputs[0][::97], inputs[1][::97], inputs[2][::97] = 1e38, 1e-30, 1e-38
        expected = np.empty_like(inputs[0])
        recipe = Recipe(SUM, precision, 4)
        numpy_pass(inputs, [expected], recipe)
        fused_pass(inputs, inputs, recipe)
        assert all(same_bits(array, expected, any_nan=precision == "fast") for array in inputs)


def test_nothing_outside_the_outputs_is_written(random):
    for size in (1, 15, 64, 65, 1000):
        room = np.full(size + 256, 7, np.float32)
        fused_pass([np.ones(size, np.float32)] * 2, [room[128 : 128 + size]], Recipe(SUM, "accurate"))
        assert (room[:128] == 7).all()
        assert (room[128 + size :] == 7).all()
        assert (room[128 : 128 + size] == 2).all()


PROBE = """
import numpy as np
from crossdevice.kernels.host import fused_pass as module
from crossdevice.kernels.host.llvm import numba_pass
from crossdevice.values.recipe import Recipe
from crossdevice.values.reduce_op import ReduceOp
made, compiled = [], numba_pass.compiled
numba_pass.compiled = lambda *call: made.append(compiled(*call)) or made[-1]
for row in ("f4 SUM fast", "f4 PROD fast", "f8 SUM fast", "f4 SUM exact"):
    dtype, op, precision = row.split()
    inputs = [np.full(100, 3, dtype)] * 3
    outputs = [np.empty(100, dtype)]
    module.fused_pass(inputs, outputs, Recipe(ReduceOp(op), precision))
    assert (outputs[0] == (27 if op == "PROD" else 9)).all()
stats = [kernel.stats for kernel in made]
print(sum(sum(s.cache_hits.values()) for s in stats), sum(sum(s.cache_misses.values()) for s in stats))
"""


def test_a_second_process_compiles_nothing_and_kernels_do_not_mix(tmp_path):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}

    def hits_and_misses():
        done = subprocess.run(
            [sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout.split()

    assert hits_and_misses() == ["0", "4"]
    assert hits_and_misses() == ["4", "0"]


def test_numba_is_imported_on_first_use_only():
    code = (
        "import sys, numpy as np\n"
        "from crossdevice.kernels.host.fused_pass import fused_pass\n"
        "assert 'numba' not in sys.modules and 'llvmlite' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert selected_kernels() == "numba"


@pytest.mark.parametrize("kernels", ["numba", "numpy"])
def test_a_sum_of_negative_zeros_is_negative_zero_in_every_precision(kernels):
    select_kernels(kernels)
    try:
        for dtype in ("float16", "float32", "float64"):
            for precision in ("fast", "accurate", "exact"):
                output = np.empty(3, dtype)
                fused_pass([np.full(3, -0.0, dtype)] * 3, [output], Recipe(ReduceOp.SUM, precision))
                assert np.signbit(output).all(), (dtype, precision)
    finally:
        select_kernels(None)


class Terminal(io.StringIO):
    def __init__(self, *, is_one):
        super().__init__()
        self._is_one = is_one
        self.is_written = threading.Event()

    def isatty(self):
        return self._is_one

    def write(self, text):
        length = super().write(text)
        self.is_written.set()
        return length


def test_a_slow_compilation_is_announced_once_and_on_a_terminal_only(monkeypatch):
    numba_pass._announce.cache_clear()
    for is_one, expected in ((False, ""), (True, "compiling kernels"), (True, "")):
        terminal = Terminal(is_one=is_one)
        monkeypatch.setattr(sys, "stderr", terminal)
        with numba_pass.announced_if_slow(seconds=0):
            terminal.is_written.wait(60 if expected else 0.2)
        assert expected in terminal.getvalue()
        assert bool(terminal.getvalue()) is bool(expected)
    numba_pass._announce.cache_clear()
    monkeypatch.setattr(sys, "stderr", Terminal(is_one=True))
    with numba_pass.announced_if_slow(seconds=3600):
        pass
    assert sys.stderr.getvalue() == ""


@pytest.mark.parametrize("family", ["exact SUM float32", "exact_double SUM float64"])
def test_kernels_of_exact_sums_prefetch_each_line_of_their_inputs(family):
    kernel = numba.njit(numba_pass.SIGNATURE)(numba_pass._kernel_function(f"chain {family}"))
    (code,) = kernel.inspect_llvm().values()
    lines = numba_pass.lanes_of(f"chain {family}") * int(family[-2:]) // 8 // STREAMED_LINE_BYTES
    # Of the first input, and of each of the others.
    assert code.count("call void @llvm.prefetch") >= 2 * lines


@pytest.mark.skipif(sys.platform != "linux", reason="mprotect is called through the C library")
def test_what_is_prefetched_behind_the_last_input_need_not_be_memory():
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    # The second page may not be touched.
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + page), page, 0) == 0
    whole = np.frombuffer(memory, np.float32, page // 4)
    out = np.empty(whole.size, np.float32)
    fused_pass([whole, whole], [out], Recipe(SUM, "exact"))
    assert not out.any()
