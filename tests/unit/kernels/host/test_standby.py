"""A worker that stays awake between repeated passes: the same bits, and awake only where that is of use."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("numba")

import crossdevice as cd
from crossdevice.kernels.host import standby as standby_module
from crossdevice.kernels.host.fused_pass import bound_batch, select_kernels
from crossdevice.kernels.host.reference.numpy_pass import numpy_pass
from crossdevice.kernels.host.resources.threads import set_num_threads
from crossdevice.kernels.host.standby import FEWEST_PASSES, Standby
from crossdevice.values.recipe import Recipe
from crossdevice.values.reduce_op import ReduceOp


@pytest.fixture
def standby(monkeypatch):
    """One of this test's own, which needs no second processor and finds that all passes are close."""
    select_kernels("numba")
    monkeypatch.setattr(standby_module, "STANDBY_SECONDS", 0.5)
    monkeypatch.setattr(standby_module, "granted_processors", lambda: 2)
    set_num_threads(2)
    made = Standby()
    monkeypatch.setattr("crossdevice.kernels.host.fused_pass.standby", lambda: made)
    yield made
    made._dismiss()
    set_num_threads(None)
    select_kernels(None)


class Wakes(list):
    """Wake-ups in place of `wake_worker`."""

    is_coming = False

    def __call__(self, *calls):
        self.append(calls)
        return lambda: self.is_coming


@pytest.fixture
def wakes(monkeypatch):
    """The wake-ups, of workers that have left again before a pass, while `is_coming` is not set."""
    found = Wakes()
    monkeypatch.setattr(standby_module, "wake_worker", found)
    return found


def bound_pass(num_inputs=2, size=1 << 17, precision="accurate", num_arrays=1):
    random = np.random.default_rng(1)
    tasks = [
        (
            tuple(random.standard_normal(size // num_arrays).astype(np.float32) for _ in range(num_inputs)),
            (np.empty(size // num_arrays, np.float32),),
        )
        for _ in range(num_arrays)
    ]
    recipe = Recipe(ReduceOp.SUM, precision)
    (work,) = bound_batch(tasks, recipe)
    return work, tasks, recipe


@pytest.mark.parametrize(
    ("num_inputs", "size", "precision", "num_arrays"),
    [
        (2, 1 << 17, "accurate", 1),
        (2, 1 << 17, "accurate", 100),
        (3, 1 << 17, "exact", 7),
        (20, 1 << 15, "accurate", 3),  # reads them in blocks, with scratch memory
        (8, 1 << 18, "accurate", 1),  # large enough to wake a worker anyway
    ],
)
def test_a_worker_that_is_awake_takes_part_and_changes_no_bit(
    standby, num_inputs, size, precision, num_arrays
):
    work, tasks, recipe = bound_pass(num_inputs, size, precision, num_arrays)
    for inputs, _ in tasks:
        inputs[0][::100] = 1e30  # which exact kernels leave to NumPy, where the others hide it
        inputs[-1][::100] = -1e30
    expected = [[np.empty_like(output) for output in outputs] for _, outputs in tasks]
    for (inputs, _), outputs in zip(tasks, expected, strict=True):
        numpy_pass(inputs, outputs, recipe)
    took_part, share = [], standby._share
    standby._share = lambda *given: took_part.append(share(*given))
    deadline = time.monotonic() + 20
    while sum(took_part) < 3 and time.monotonic() < deadline:
        for _, outputs in tasks:
            outputs[0].fill(np.nan)
        work()
        for (_, outputs), right in zip(tasks, expected, strict=True):
            assert (outputs[0] == right[0]).all()
    assert sum(took_part) >= 3


@pytest.mark.parametrize("num_inputs", [2, 20])
@pytest.mark.parametrize("precision", ["accurate", "exact"])
@pytest.mark.parametrize("weights", [None, (0.5, 3.0)])
def test_it_takes_part_in_known_calls_too(standby, num_inputs, precision, weights):
    random = np.random.default_rng(2)
    shapes = [(1 << 20) // num_inputs, 3, (1 << 20) // num_inputs]  # so large that more than one row is left

    def trees():
        return [
            {str(leaf): random.standard_normal(size).astype(np.float32) for leaf, size in enumerate(shapes)}
            for _ in range(num_inputs)
        ]

    values, out = trees(), trees()
    for leaf in ("0", "2"):
        values[0][leaf][::100], values[-1][leaf][::100] = 1e30, -1e30  # which exact kernels leave to NumPy
    ops, given = cd.DirectAllReduce(), (None if weights is None else weights * (num_inputs // 2))
    value, targets = cd.PerReplica(values), cd.Mirrored(out)
    how = {"options": cd.CommunicationOptions(precision=precision), "weights": given}
    expected = ops.reduce("mean", value, value, **how).values[0]  # alone: it is not known yet
    took_part, share = [], standby._share
    standby._share = lambda *given: took_part.append(share(*given))
    deadline = time.monotonic() + 20
    while sum(took_part) < 3 and time.monotonic() < deadline:
        for tree in out:
            for array in tree.values():
                array.fill(np.nan)
        ops.reduce("mean", value, value, out=targets, **how)
        for tree in out:
            for leaf, array in tree.items():
                assert (array == expected[leaf]).all()
    assert sum(took_part) >= 3


@pytest.mark.parametrize(
    "case", ["one thread", "one processor", "calls far apart", "little traffic", "much traffic"]
)
def test_nobody_is_woken_for(case, standby, wakes, monkeypatch):
    set_num_threads(1 if case == "one thread" else 2)
    standby._has_processors = case != "one processor"
    if case == "calls far apart":
        monkeypatch.setattr(standby_module, "STANDBY_SECONDS", 1e-9)
    work, _, _ = bound_pass(size={"little traffic": 1 << 16, "much traffic": 1 << 21}.get(case, 1 << 17))
    for _ in range(10):
        work()
    assert wakes == []


def test_a_worker_that_never_comes_in_time_is_called_less_and_less_often(standby, wakes):
    work, _, _ = bound_pass()
    numbers = []
    for number in range(100):
        work()
        if len(wakes) > len(numbers):
            numbers.append(number)
    assert [later - earlier for earlier, later in pairwise(numbers)] == [4, 8, 16, 32]
    assert numbers[0] == FEWEST_PASSES


def test_a_worker_that_is_on_its_way_is_not_called_again(standby, wakes):
    wakes.is_coming = True
    for size in (
        1 << 17,
        1 << 20,
    ):  # with the second, which wakes one in any case, the first would be cancelled
        work, _, _ = bound_pass(size=size)
        for _ in range(20):
            work()
        assert len(wakes) == 1
    wakes.is_coming = False
    work()
    assert len(wakes) == 2


def test_a_large_pass_wakes_a_worker_that_stays(standby, wakes, monkeypatch):
    monkeypatch.setattr(standby_module, "STANDBY_SECONDS", 1e-9)  # however far apart
    work, _, _ = bound_pass(size=1 << 20)
    work()
    assert wakes == [(standby._wait_for_passes, standby._dismiss)]


LOOP = """
import os, threading, time
import numpy as np
from crossdevice.kernels.host import standby as module
from crossdevice.kernels.host.fused_pass import bound_batch
from crossdevice.kernels.host.resources.threads import run_together, set_num_threads
from crossdevice.values.recipe import Recipe
from crossdevice.values.reduce_op import ReduceOp
module.STANDBY_SECONDS, module.granted_processors = 60.0, lambda: 2
set_num_threads(2)
inputs, outputs = tuple(np.ones((2, 1 << 17), np.float32)), (np.zeros(1 << 17, np.float32),)
(work,) = bound_batch([(inputs, outputs)], Recipe(ReduceOp.SUM, "accurate"))
standby = module.standby()
def loop():
    took_part, share = [], standby._share
    standby._share = lambda *given: took_part.append(share(*given))
    deadline = time.monotonic() + 20
    while not any(took_part):
        outputs[0].fill(0)
        work()
        assert (outputs[0] == 2).all() and time.monotonic() < deadline
    standby._share = share
loop()
child = os.fork()
if child:
    run_together(threading.Barrier(2, timeout=120).wait, 2)  # the only worker comes at once
    assert os.waitpid(child, 0)[1] == 0
    print("done")
else:
    loop()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_worker_that_is_awake_follows_other_calls_and_keeps_neither_a_child_nor_an_exit_waiting():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOOP], capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("done\n", "", 0)
