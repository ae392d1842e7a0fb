"""Passes that add up sums of their arrays: results and sums are those of a pass and of sums afterwards."""

from __future__ import annotations

import numpy as np
import pytest

from crossdevice.kernels.host.check_sums import check_sums, row_columns, zero_columns
from crossdevice.kernels.host.fingerprint_pass import pieces_of, sums_of
from crossdevice.kernels.host.fused_pass import fused_pass, select_kernels
from crossdevice.kernels.host.resources.threads import set_num_threads
from crossdevice.kernels.host.summed_pass import Summed, bound_sums, movable_passes, zero_sums
from crossdevice.values.recipe import COPYING, Recipe
from crossdevice.values.reduce_op import ReduceOp

SUM = Recipe(ReduceOp.SUM, "accurate")


@pytest.fixture(params=["numba", "numpy"])
def kernels(request):
    select_kernels(request.param)
    yield request.param
    select_kernels(None)


@pytest.fixture(params=[1, 3])
def _threads(request):
    set_num_threads(request.param)
    yield
    set_num_threads(None)


def columns_of(array, offset=0):
    item_bytes = array.dtype.itemsize
    return Summed(array, zero_columns(item_bytes), offset, row_columns(item_bytes))


@pytest.mark.usefixtures("kernels", "_threads")
@pytest.mark.parametrize("dtype", ["float32", "int8", "int64", "complex64"])
@pytest.mark.parametrize("length", [0, 1, 5, 1000, 700_001])
def test_sums_made_on_the_way_are_those_of_whole_arrays(dtype, length):
    random = np.random.default_rng(length)
    inputs = [random.integers(0, 100, length).astype(dtype) for _ in range(3)]
    out, right = np.empty(length, dtype), np.empty(length, dtype)
    fused_pass(inputs, [right], SUM)
    summed = [Summed(each, zero_sums()) for each in (*inputs, out)]
    if dtype.startswith("int"):
        summed.append(columns_of(out))
    bound_sums([(inputs, [out])], [summed], SUM)()
    assert (out == right).all()
    for array, each in zip((*inputs, right), summed, strict=False):
        assert (each.sums == sums_of(pieces_of(0, array), 1)[0]).all()
    for each in summed[4:]:
        whole = columns_of(right)
        whole.add()
        assert (each.sums == whole.sums).all()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("offset", [64, 640, 24])
def test_ranges_with_an_offset_add_up_to_the_whole(offset):
    memory = np.random.default_rng(0).integers(0, 256, 400_000).astype(np.uint8)
    first, copy = memory[:offset], np.empty(memory.size - offset, np.uint8)
    sums, columns = zero_sums(), zero_columns(1)
    parts = [(memory[offset:], copy, offset), (first, np.empty_like(first), 0)]
    tasks = [([source], [target]) for source, target, _ in parts]
    summed = [
        [Summed(source, sums, start), Summed(target, columns, start, row_columns(1))]
        for source, target, start in parts
    ]
    bound_sums(tasks, summed, COPYING)()
    assert (sums == sums_of(pieces_of(0, memory), 1)[0]).all()
    whole = columns_of(memory)
    whole.add()
    assert (columns == whole.sums).all()


@pytest.mark.usefixtures("kernels", "_threads")
@pytest.mark.parametrize("shift", [0, 8])
@pytest.mark.parametrize("length", [0, 5, 64, 10_000, 1_700_001])
def test_what_is_copied_as_it_is_summed_has_the_bits_and_the_sums_of_its_source(length, shift):
    source = np.random.default_rng(length).integers(0, 256, length).astype(np.uint8)
    memory = np.full(length + 200, 77, np.uint8)
    begin = -memory.ctypes.data % 64 + shift  # whole lines of memory, and others
    target = memory[begin : begin + length]
    copied = Summed(source, zero_sums(), 192, target=target)
    bound_sums([([source], [])], [[copied, columns_of(source)]], COPYING)()
    assert (target == source).all()
    assert (memory[:begin] == 77).all()
    assert (memory[begin + length :] == 77).all()
    assert (copied.sums == sums_of(pieces_of(0, source, offset=192), 1)[0]).all()


def test_exact_sums_whose_kernel_leaves_pieces_are_summed_after_them():
    inputs = [np.full(5000, value, np.float32) for value in (1e30, 1.0, -1e30)]
    out, right = np.empty(5000, np.float32), np.empty(5000, np.float32)
    recipe = Recipe(ReduceOp.SUM, "exact")
    fused_pass(inputs, [right], recipe)
    own = Summed(out, zero_sums())
    bound_sums([(inputs, [out])], [[own]], recipe)()
    assert (out == right).all()
    assert (own.sums == sums_of(pieces_of(0, right), 1)[0]).all()


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "int64"])
def test_kernels_add_the_columns_of_the_reference(dtype):
    words = np.random.default_rng(0).integers(0, 100, 100_003).astype(dtype)
    found = []
    for kernels in ("numba", "numpy"):
        select_kernels(kernels)
        own = columns_of(words, 192)
        own.add()
        found.append(own.sums)
    select_kernels(None)
    assert (found[0] == found[1]).all()


def sums_of_words(words):
    own = columns_of(words.view(f"u{words.itemsize}"))
    own.add()
    return check_sums(own.sums)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64"])
def test_check_sums_of_integers_add_up_and_show_every_bit(dtype):
    random = np.random.default_rng(0)
    unsigned = np.dtype(dtype)
    size = 100_000
    first, second = (
        random.integers(0, 256, size * unsigned.itemsize).astype(np.uint8).view(unsigned) for _ in range(2)
    )
    before = sums_of_words(first)
    assert (sums_of_words(first + second) == before + sums_of_words(second)).all()
    for place in (0, 1, size // 2, size - 1):
        for bit in range(8 * unsigned.itemsize):
            wrong = first.copy()
            wrong[place] ^= unsigned.type(1 << bit)
            assert (sums_of_words(wrong) != before).any(), (place, bit)


@pytest.mark.parametrize("distance", [1, 16, 2048, 4096, 65_536])
def test_two_highest_bits_that_flip_show(distance):
    right = np.zeros(100_000, np.uint32)
    wrong = right.copy()
    wrong[[10, 10 + distance]] ^= np.uint32(1 << 31)
    assert (sums_of_words(wrong) != sums_of_words(right)).any()


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dtype", ["float32", "int16", "complex64"])
@pytest.mark.parametrize("length", [5, 1000, 700_001])
def test_passes_that_are_moved_give_the_results_and_sums_of_other_arrays(dtype, length):
    select_kernels("numba")

    def arrays(seed):
        random = np.random.default_rng(seed)
        return [random.integers(0, 100, length + 8).astype(dtype) for _ in range(3)]

    *inputs, out = arrays(0)
    between, sums = np.empty(length, dtype), [zero_sums() for _ in range(4)]
    summed = [Summed(inputs[0][8:], sums[0], 64, target=between), Summed(inputs[0][8:], sums[1], 64)]
    passes = [
        bound_sums([([inputs[0][8:]], [])], [summed], COPYING),
        bound_sums([([between, inputs[1][8:]], [out[:length]])], [[Summed(out[:length], sums[2])]], SUM),
        bound_sums([], [], SUM),
    ]
    moved = movable_passes(passes, [*inputs, out, *(each[4:4] for each in inputs), inputs[0][:0]])
    for seed in (0, 1, 2):
        *inputs, out = arrays(seed)
        for each in sums:
            each[:] = 0
        moved.move([*inputs, out, *(each[4:4] for each in inputs), inputs[0][:0]])
        for run in passes:
            run()
        right = np.empty(length, dtype)
        fused_pass([each[8:].copy() for each in inputs], [right], SUM)
        assert (out[:length] == right).all()
        assert (out[length:] == arrays(seed)[2][length:]).all()
        source = sums_of(pieces_of(0, inputs[0][8:], offset=64), 1)[0]
        assert (sums[0] == source).all()
        assert (sums[1] == source).all()
        assert (sums[2] == sums_of(pieces_of(0, right), 1)[0]).all()
    select_kernels(None)


def test_passes_over_arrays_that_overlap_or_without_a_kernel_are_not_moved():
    memory = np.ones(5000, np.float32)
    first, second, out = memory[:3000], memory[2000:], np.empty(3000, np.float32)
    for recipe in (SUM, Recipe(ReduceOp.SUM, "exact")):
        run = bound_sums([([first, second], [out])], [[Summed(out, zero_sums())]], recipe)
        assert movable_passes([run], [first, second, out]) is None
        is_tiled = recipe is SUM
        assert (movable_passes([run], [memory, out]) is None) is not is_tiled
