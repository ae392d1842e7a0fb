"""One entry: the same bits from NumPy and numba, for one value or many, with one thread or several."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from crossdevice.errors import OptionError
from crossdevice.kernels.host import fused_pass as module
from crossdevice.kernels.host.fused_pass import fused_batch, fused_pass, select_kernels, selected_kernels
from crossdevice.kernels.host.reference.numpy_pass import numpy_pass
from crossdevice.kernels.host.resources.threads import set_num_threads
from crossdevice.kernels.host.work_list import RANGE_ELEMENTS, WorkList
from crossdevice.values.dtypes import result_dtype
from crossdevice.values.recipe import Recipe
from crossdevice.values.reduce_op import ReduceOp
from unit.kernels.host.adversarial import adversarial, dtype_named, misaligned, same_bits, spread_out

SUM = ReduceOp.SUM


@pytest.fixture(autouse=True)
def own_settings():
    yield
    select_kernels(None)
    set_num_threads(None)


@pytest.fixture
def random():
    return np.random.default_rng(30)


@pytest.fixture(params=[1, 2, 3])
def num_threads(request, monkeypatch):
    """Threads and non-temporal stores for everything, however small."""
    set_num_threads(request.param)
    monkeypatch.setattr(module, "THREADED_BYTES", 2)
    monkeypatch.setattr(module, "STREAMED_BYTES", 1 << 20)


def expected_of(inputs, recipe, into):
    expected = np.empty(inputs[0].size, into)
    numpy_pass(inputs, [expected], recipe)
    return expected


@pytest.mark.parametrize("precision", ["fast", "accurate", "exact"])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float64", "complex64"])
@pytest.mark.usefixtures("num_threads")
def test_threads_and_streams_do_not_change_bits(name, precision, random):
    dtype = dtype_named(name)
    recipe = Recipe(SUM, precision, 5)
    for size in (1, 1000, 70_000, 200_003):
        inputs = [adversarial(random, dtype, size, finite=True) for _ in range(4)]
        outputs = [misaligned(np.zeros(size, dtype), 16 * (number == 3)) for number in range(4)]
        fused_pass(inputs, outputs[:3], recipe)
        fused_pass(inputs, outputs[3:], recipe)
        expected = expected_of(inputs, recipe, dtype)
        assert all(same_bits(output, expected, any_nan=precision == "fast") for output in outputs)


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
@pytest.mark.usefixtures("num_threads")
def test_partial_sums_may_be_wide_and_their_sums_narrow_again(name, random):
    dtype, wide = dtype_named(name), np.dtype("float64")
    for size in (1, 7, 64, 1000, 70_001):
        inputs = [adversarial(random, dtype, size) for _ in range(3)]
        partial = np.empty(size, wide)
        fused_pass(inputs, [partial], Recipe(SUM, "accurate"))
        assert same_bits(partial, expected_of(inputs, Recipe(SUM, "accurate"), wide))
        partials = [partial, *(adversarial(random, wide, size) for _ in range(2))]
        result = np.empty(size, dtype)
        fused_pass(partials, [result], Recipe(SUM, "accurate", 7))
        assert same_bits(result, expected_of(partials, Recipe(SUM, "accurate", 7), dtype))


def test_outputs_of_any_alignment_are_written(random):
    inputs = [adversarial(random, np.dtype("float32"), 100_000) for _ in range(4)]
    expected = expected_of(inputs, Recipe(SUM, "accurate"), np.float32)
    for offsets in ((0, 4, 16, 33), (1, 1, 1), (60, 60)):
        outputs = [misaligned(np.zeros(100_000, np.float32), offset) for offset in offsets]
        fused_pass(inputs, outputs, Recipe(SUM, "accurate"))
        assert all(same_bits(output, expected) for output in outputs)


@pytest.mark.parametrize("num_inputs", [3, 20])
@pytest.mark.parametrize("precision", ["accurate", "exact"])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float64"])
def test_outputs_whose_lines_start_at_different_elements_are_written_to_their_ends(
    name, precision, num_inputs, random, monkeypatch
):
    monkeypatch.setattr(module, "STREAMED_BYTES", 1)
    dtype, recipe = dtype_named(name), Recipe(SUM, precision)
    for size in (1, 31, 5000, 70_001):
        inputs = [adversarial(random, dtype, size, finite=True) for _ in range(num_inputs)]
        inputs[0][::50], inputs[-1][::50] = 1e30, -1e30  # which exact kernels leave to NumPy
        expected = expected_of(inputs, recipe, dtype)
        memory = [np.full(size * dtype.itemsize + 256, 171, np.uint8) for _ in range(4)]
        starts = [64 - each.ctypes.data % 64 + 16 * number for number, each in enumerate(memory)]
        stops = [start + expected.nbytes for start in starts]
        outputs = [
            each[start:stop].view(dtype) for each, start, stop in zip(memory, starts, stops, strict=True)
        ]
        for is_in_place in (False, True):
            outputs[2][:] = inputs[1]
            given = [inputs[0], outputs[2] if is_in_place else inputs[1], *inputs[2:]]
            fused_pass(given, outputs, recipe)
            assert all(same_bits(output, expected) for output in outputs)
        assert all((each[:start] == 171).all() for each, start in zip(memory, starts, strict=True))
        assert all((each[stop:] == 171).all() for each, stop in zip(memory, stops, strict=True))


@pytest.mark.parametrize("precision", ["fast", "accurate", "exact"])
@pytest.mark.usefixtures("num_threads")
def test_a_batch_is_many_passes(precision, random):
    tasks, expected = [], []
    recipe = Recipe(SUM, precision, 3)
    for name in ("float32", "int8", "bfloat16", "int64", "float64", "complex128", "float32"):
        dtype, into = dtype_named(name), dtype_named(result_dtype(name, ReduceOp.MEAN))
        for size in (0, 1, 17, 5000, 120_000 if name == "float32" else 300):
            inputs = [adversarial(random, dtype, size, finite=True) for _ in range(3)]
            tasks.append((inputs, [np.empty(size, into) for _ in range(2)]))
            expected.append(expected_of(inputs, recipe, into))
    fused_batch(tasks, recipe)
    for (_, outputs), right in zip(tasks, expected, strict=True):
        assert all(same_bits(output, right, any_nan=precision == "fast") for output in outputs)


@pytest.mark.usefixtures("num_threads")
def test_a_batch_of_exact_sums_in_place_that_no_kernel_is_certain_of(random):
    tasks = [
        [spread_out(random, np.dtype("float32"), size, bits=24, exponents=140) for _ in range(4)]
        for size in (10, 3000, 30_000)
    ]
    recipe = Recipe(SUM, "exact", 4)
    expected = [expected_of(inputs, recipe, np.float32) for inputs in tasks]
    fused_batch([(inputs, inputs) for inputs in tasks], recipe)
    for outputs, right in zip(tasks, expected, strict=True):
        assert all(same_bits(output, right) for output in outputs)


def test_an_empty_batch_is_nothing():
    fused_batch([], Recipe(SUM, "accurate"))


def test_numpy_kernels_are_used_when_asked_for(monkeypatch, random):
    monkeypatch.setenv("CROSSDEVICE_KERNELS", "numpy")
    select_kernels(None)
    assert selected_kernels() == "numpy"
    inputs = [adversarial(random, np.dtype("float32"), 100) for _ in range(2)]
    outputs = [np.empty(100, np.float32)]
    fused_pass(inputs, outputs, Recipe(SUM, "accurate"))
    fused_batch([(inputs, outputs)], Recipe(SUM, "accurate"))
    assert set(module._prepared.values()) == {None}
    assert same_bits(outputs[0], expected_of(inputs, Recipe(SUM, "accurate"), np.float32))


def test_a_missing_numba_means_numpy():
    code = (
        "import sys, numpy as np\n"
        "sys.modules['numba'] = sys.modules['llvmlite'] = None\n"
        "from crossdevice.kernels.host.fused_pass import fused_pass, selected_kernels\n"
        "from crossdevice.values.recipe import Recipe\n"
        "from crossdevice.values.reduce_op import ReduceOp\n"
        "outputs = [np.empty(3)]\n"
        "fused_pass([np.ones(3)] * 2, outputs, Recipe(ReduceOp.SUM, 'accurate'))\n"
        "assert selected_kernels() == 'numpy' and outputs[0].tolist() == [2, 2, 2]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_kernels_are_refused(monkeypatch):
    with pytest.raises(OptionError, match="numba, numpy; got 'fortran'"):
        select_kernels("fortran")
    monkeypatch.setenv("CROSSDEVICE_KERNELS", "fortran")
    select_kernels(None)
    with pytest.raises(OptionError, match="CROSSDEVICE_KERNELS must be one of"):
        selected_kernels()


def test_many_python_threads_may_call_at_once(random, monkeypatch):
    monkeypatch.setattr(module, "THREADED_BYTES", 1 << 16)
    set_num_threads(3)
    recipe = Recipe(SUM, "accurate", 3)
    inputs = [[adversarial(random, np.dtype("float32"), 50_000) for _ in range(3)] for _ in range(6)]
    expected = [expected_of(arrays, recipe, np.float32) for arrays in inputs]
    wrong = []

    def call(arrays, right):
        for _ in range(30):
            outputs = [np.empty(50_000, np.float32) for _ in range(2)]
            fused_pass(arrays, outputs, recipe)
            if not all(same_bits(output, right) for output in outputs):
                wrong.append(1)

    callers = [threading.Thread(target=call, args=pair) for pair in zip(inputs, expected, strict=True)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_no_arrays_are_kept_alive(random):
    import weakref

    inputs = [adversarial(random, np.dtype("float32"), 1 << 20) for _ in range(2)]
    output = np.empty(1 << 20, np.float32)
    references = [weakref.ref(array) for array in (*inputs, output)]
    fused_pass(inputs, [output], Recipe(SUM, "accurate"))
    del inputs, output
    assert [reference() for reference in references] == [None] * 3


def test_rows_cover_every_element_once():
    for size in (0, 1, 255, 256, 257, 100_000, 1 << 20):
        arrays = (np.empty(size, np.float32),) * 2
        work = WorkList([(arrays, arrays)], range_bytes=1 << 19)
        bounds = [tuple(row[4:6]) for row in work.rows]
        assert [start for start, _ in bounds] == [0, *(stop for _, stop in bounds)][: len(bounds)]
        assert (bounds[-1][1] if bounds else 0) == size
        assert all(start % RANGE_ELEMENTS == 0 for start, _ in bounds)


REFUSED = """
import numpy as np, crossdevice as cd, crossdevice.errors
small, large = [np.ones(2)] * 2, [np.ones(1 << 20, np.float32)] * 2
outs = [list(map(np.zeros_like, value)) for value in (small, large)]
pairs = [(value, value) for value in map(cd.PerReplica, (small, large))]
try:
    cd.RingAllReduce().batch_reduce("sum", pairs, out=outs)
except cd.errors.OptionError as error:
    print(error, outs[0][0].any(), outs[1][0].any())
"""


@pytest.mark.parametrize(
    "variable", ["CROSSDEVICE_NUM_THREADS", "CROSSDEVICE_POOL_BYTES", "CROSSDEVICE_KERNELS"]
)
def test_a_bad_variable_is_refused_before_anything_is_written(variable):
    environment = {**os.environ, variable: "abc"}
    done = subprocess.run([sys.executable, "-c", REFUSED], env=environment, capture_output=True, text=True)
    assert done.stdout.startswith(f"{variable} must be "), done.stderr
    assert done.stdout.endswith("got 'abc' False False\n")


@pytest.mark.parametrize("precision", ["fast", "accurate"])
def test_a_mean_has_the_bits_of_a_division_by_powers_of_two_too(precision):
    for dtype in ("float16", "float32", "float64"):
        limits = np.finfo(dtype)
        odd = [3 * limits.smallest_subnormal, -limits.smallest_subnormal, limits.tiny, limits.max / 2]
        special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, *odd, *range(-40, 40)], dtype)
        for divisor in (2, 3, 4, 8, 12, 1024):
            recipe, outputs = Recipe(SUM, precision, divisor), np.empty((2, special.size), dtype)
            for compute, output in zip((fused_pass, numpy_pass), outputs, strict=True):
                compute([special, special], [output], recipe)
            assert outputs[0].tobytes() == outputs[1].tobytes(), (dtype, divisor)
