"""Result memory comes back when its last array dies, within bounds, from any thread, after a fork."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading

import ml_dtypes
import numpy as np
import pytest

import crossdevice as cd
from crossdevice.errors import OptionError
from crossdevice.kernels.host.resources import pool as module
from crossdevice.kernels.host.resources import threads
from crossdevice.kernels.host.resources.pool import (
    IDLE_SECONDS,
    LINE_BYTES,
    SMALLEST_POOLED_BYTES,
    SMALLEST_SHARING_BYTES,
    Pool,
    empty_on_line,
    result_pool,
)
from interrupts.stepping import called_at_each_step, interrupted_at_each_step, may_meet_finalizers

LARGE = 2 << 20
"""Elements of a float32 that is just large enough to be pooled."""


def address(array):
    return array.ctypes.data


def test_a_block_comes_back_when_the_last_view_dies():
    pool = Pool()
    first = pool.empty(LARGE, np.float32)
    place, view = address(first), first.reshape(2, -1)[1:]
    del first
    other = pool.empty(LARGE, np.float32)
    assert address(other) != place
    del view
    assert address(pool.empty(LARGE, np.float32)) == place


def test_arrays_are_ordinary():
    array = Pool().empty(LARGE, np.float32)
    assert type(array) is np.ndarray
    assert array.shape == (LARGE,)
    assert array.dtype == np.float32
    assert array.flags.writeable
    assert array.flags.c_contiguous
    assert address(array) % 4096 == 0
    array[:] = 1
    assert array.sum() == LARGE


def test_torch_takes_them_without_a_warning():
    torch = pytest.importorskip("torch")
    pool = Pool()
    tensor = torch.from_numpy(pool.empty(LARGE, np.float32))
    place = tensor.data_ptr()
    tensor.fill_(2)
    assert pool.statistics().leased_bytes > 0
    del tensor
    assert pool.statistics().leased_bytes == 0
    assert address(pool.empty(LARGE, np.float32)) == place


def test_nearly_equal_sizes_and_any_dtype_share_blocks():
    pool = Pool()
    place = address(pool.empty(LARGE + 1000, np.float32))
    assert address(pool.empty(2 * LARGE + 2500, ml_dtypes.bfloat16)) == place
    assert pool.statistics().hits == 1


def test_small_results_are_not_pooled():
    pool = Pool()
    assert pool.empty(SMALLEST_POOLED_BYTES // 4 - 1, np.float32).base is None
    assert pool.statistics() == (0, 0, pool.statistics().limit_bytes, 0, 0)


def test_idle_memory_is_bounded_and_the_oldest_goes_first():
    pool = Pool(limit_bytes=20 << 20)
    arrays = [pool.empty(LARGE, np.float32) for _ in range(4)]
    places = [address(array) for array in arrays]
    while arrays:
        del arrays[0]
        assert pool.statistics().idle_bytes <= 20 << 20
    assert {address(pool.empty(LARGE, np.float32)) for _ in range(1)} == {places[-1]}
    pool.set_limit(0)
    assert pool.statistics().idle_bytes == 0


def test_clear_gives_everything_idle_back():
    pool = Pool()
    kept, dropped = pool.empty(LARGE, np.float32), pool.empty(LARGE, np.float32)
    del dropped
    assert pool.statistics().idle_bytes > 0
    pool.clear()
    assert pool.statistics().idle_bytes == 0
    assert pool.statistics().leased_bytes >= kept.nbytes


def test_the_limit_comes_from_the_variable(monkeypatch):
    monkeypatch.setenv("CROSSDEVICE_POOL_BYTES", "12345")
    assert Pool().statistics().limit_bytes == 12345
    monkeypatch.setenv("CROSSDEVICE_POOL_BYTES", "-3")
    with pytest.raises(OptionError, match="CROSSDEVICE_POOL_BYTES must be a number of bytes"):
        Pool().statistics()
    monkeypatch.delenv("CROSSDEVICE_POOL_BYTES")
    assert Pool().statistics().limit_bytes > 1 << 20


def test_the_limit_is_a_quarter_of_what_a_container_may_use(tmp_path, monkeypatch):
    monkeypatch.delenv("CROSSDEVICE_POOL_BYTES", raising=False)
    monkeypatch.setattr(threads, "ROOT", tmp_path)
    monkeypatch.setattr(threads, "MEMBERSHIP", tmp_path / "membership")
    (tmp_path / "membership").write_text("0::/\n")
    (tmp_path / "memory.max").write_text("40000000\n")
    assert Pool().statistics().limit_bytes == 10_000_000


@pytest.mark.parametrize("given", [-1, True, 1.5, "12"])
def test_bad_limits_are_refused(given):
    with pytest.raises(OptionError, match="0 or more"):
        Pool().set_limit(given)


def test_a_batch_shares_blocks_but_no_lines():
    pool = Pool()
    sizes = [
        (5, np.float32),
        (0, np.float64),
        (3_000_000, np.float32),
        (7, np.int8),
        (20_000_000, np.int8),
    ] * 2
    arrays = pool.empty_batch(sizes)
    assert [(array.size, array.dtype) for array in arrays] == [
        (size, np.dtype(dtype)) for size, dtype in sizes
    ]
    assert all(address(array) % 64 == 0 for array in arrays if array.nbytes >= SMALLEST_SHARING_BYTES)
    assert all(address(array) % 4096 == 0 for array in arrays if array.nbytes >= 1 << 16)
    for number, array in enumerate(arrays):
        array[:] = number
    assert all((array == number).all() for number, array in enumerate(arrays))
    places = [address(array) for array in arrays]
    del array, arrays
    assert pool.statistics().leased_bytes == 0
    assert sorted(address(array) for array in pool.empty_batch(sizes)) == sorted(places)


def test_a_small_batch_is_not_pooled():
    pool = Pool()
    assert [array.base for array in pool.empty_batch([(5, np.float32), (6, np.int8)])] == [None, None]
    assert pool.empty_batch([]) == []


@may_meet_finalizers
def test_an_interrupt_at_any_step_leaves_a_working_pool(monkeypatch):
    # pytest's own would keep an interrupt that meets a finalizer, and with its frames the memory they lease.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    pool = Pool()
    keep = pool.empty(LARGE, np.float32)

    def use():
        first = pool.empty(LARGE, np.float32)
        pool.empty_batch([(LARGE, np.float32)] * 2)
        del first
        pool.statistics()
        pool.set_limit(64 << 20)
        pool.clear()

    for _ in interrupted_at_each_step(use):
        array = pool.empty(LARGE, np.float32)
        array[:] = 1
        assert not np.shares_memory(array, keep)
        del array
        if pool.statistics().leased_bytes != keep.nbytes:
            gc.collect()  # frames of an interrupted call may be part of a cycle
        assert pool.statistics().leased_bytes == keep.nbytes
        pool.clear()
        assert pool.statistics().idle_bytes == 0


def test_a_signal_handler_may_use_the_pool_while_it_is_in_use():
    pool = Pool()
    pool.empty(LARGE, np.float32)

    def use():
        pool.empty(LARGE, np.float32)
        pool.statistics()

    calls = list(called_at_each_step(use, lambda: pool.empty(LARGE, np.float32)))
    assert len(calls) > 20
    assert pool.statistics().leased_bytes == 0


@pytest.mark.parametrize("look", [lambda pool: pool.give_back_unused(0.0), Pool.statistics, Pool.clear])
def test_whoever_looks_at_the_pool_never_keeps_a_block_leased(look):
    pool = Pool()
    held = [pool.empty(LARGE, np.float32)]
    seen = []

    def drop_and_count():
        held.clear()
        seen.append(pool.statistics().leased_bytes)
        held.append(pool.empty(LARGE, np.float32))

    assert len(list(called_at_each_step(lambda: look(pool), drop_and_count))) > 5
    assert not any(seen)


def test_memory_that_nobody_uses_is_given_back():
    pool = Pool()
    kept, dropped = pool.empty(LARGE, np.float32), pool.empty(LARGE, np.float32)
    del dropped
    assert pool.give_back_unused(100.0)
    assert pool.give_back_unused(100.0 + IDLE_SECONDS / 2)
    assert pool.statistics().idle_bytes > 0
    assert pool.give_back_unused(100.0 + IDLE_SECONDS)
    assert pool.statistics().idle_bytes == 0
    assert pool.statistics().leased_bytes >= kept.nbytes
    del kept
    assert pool.give_back_unused(200.0)
    assert not pool.give_back_unused(200.0 + IDLE_SECONDS)


def test_a_thread_gives_memory_back_and_ends(monkeypatch):
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.02)
    pool = Pool()
    pool.empty(LARGE, np.float32)
    keeper = pool._keeper
    keeper.join(120)
    assert not keeper.is_alive()
    assert not pool._blocks
    pool.empty(LARGE, np.float32)
    assert pool._keeper is not keeper


def test_local_processes_share_the_memory(monkeypatch):
    monkeypatch.delenv("CROSSDEVICE_POOL_BYTES", raising=False)
    alone = Pool().statistics().limit_bytes
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "16"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "8")):
        monkeypatch.setenv(name, value)
    assert Pool().statistics().limit_bytes == alone // 8
    monkeypatch.delenv("WORLD_SIZE")  # variables of something else do no harm
    assert Pool().statistics().limit_bytes == alone


def test_users_set_and_release_it():
    result_pool.empty(LARGE, np.float32)
    assert cd.release_memory() >= 4 * LARGE
    assert cd.release_memory() == 0
    cd.set_pool_bytes(0)
    try:
        assert cd.pool_bytes() == 0
        result_pool.empty(LARGE, np.float32)
        assert result_pool.statistics().idle_bytes == 0
    finally:
        cd.set_pool_bytes(None)
    assert cd.pool_bytes() > 0


def test_threads_never_share_a_block():
    pool = Pool(limit_bytes=64 << 20)
    wrong = []

    def hammer(number):
        random = np.random.default_rng(number)
        held = []
        for step in range(150):
            array = pool.empty(LARGE + int(random.integers(0, 3)) * (1 << 18), np.float32)
            array[:: 1 << 16] = number * 1000 + step
            held.append((array, number * 1000 + step))
            if len(held) > random.integers(0, 4):
                array, value = held.pop(0)
                if not (array[:: 1 << 16] == value).all():
                    wrong.append(value)

    threads = [threading.Thread(target=hammer, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    statistics = pool.statistics()
    assert statistics.leased_bytes == 0
    assert statistics.idle_bytes <= 64 << 20
    assert 0 < statistics.hits + statistics.misses <= 900


FORKED = """
import os
import numpy as np
from crossdevice.kernels.host.resources.pool import result_pool
kept = result_pool.empty(1 << 22, np.float32)
kept[:] = 1
result_pool.empty(1 << 22, np.float32)
child = os.fork()
if child == 0:
    other = result_pool.empty(1 << 22, np.float32)
    other[:] = 2
    assert (kept == 1).all()
    del kept, other
    assert result_pool.statistics().leased_bytes == 0
    assert result_pool._keeper.is_alive()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert (kept == 1).all()
print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_has_a_working_pool():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert done.stdout == "done\n"


def test_a_batch_may_begin_with_nothing_and_tiny_results_keep_no_block():
    pool = Pool()
    empty, tiny, large = pool.empty_batch([(0, "float32"), (1, "float32"), (1 << 20, "float32")])
    assert (empty.size, tiny.size, large.size) == (0, 1, 1 << 20)
    assert tiny.base is None
    del large
    assert pool.statistics().leased_bytes == 0


def test_small_arrays_start_on_lines_if_asked_to():
    for size in (1, 1000):
        array = empty_on_line(size, np.float64)
        assert (array.size, array.dtype) == (size, np.float64)
        assert array.ctypes.data % LINE_BYTES == 0
    for array in Pool().empty_batch([(3, np.float32), (5, np.int8)], on_lines=True):
        assert array.ctypes.data % LINE_BYTES == 0
