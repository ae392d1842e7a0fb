"""Ctrl-C at any moment of a public call leaves a library that works: the next call is right, and soon.

Each call is interrupted at INTERRUPT_STEPS of its steps (0: at all of them), chosen by INTERRUPT_SEED; in
`make test-all` at more of them.
"""

from __future__ import annotations

import inspect
import os
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import crossdevice as cd
from crossdevice import functions
from crossdevice.execution.tracing import flight_recorder
from crossdevice.strategies.running import rendezvous
from interrupts.stepping import interrupted_at_each_step, may_meet_finalizers, number_of_steps

pytestmark = may_meet_finalizers

STEPS = int(os.environ.get("INTERRUPT_STEPS", "8"))
MORE_STEPS = 5 * STEPS
SEED = int(os.environ.get("INTERRUPT_SEED", "1"))

LARGE = 2 << 20
"""Elements whose results come from the pool, and are combined by several threads."""

SMALL_VALUES = [np.full(5, k, np.float32) for k in (1, 2)]
LARGE_VALUES = [np.full(LARGE, k, np.float32) for k in (1, 2)]
SLICES = [cd.IndexedSlices(np.ones((1, 2), np.float32), np.array([k]), (3, 2)) for k in (0, 0)]
TREES = [{"a": np.ones(3), "b": [np.ones(LARGE, np.float32)]} for _ in range(2)]
STRATEGY = cd.MirroredStrategy(["cpu:0", "cpu:1"])
OUTS = [np.empty(5, np.float32) for _ in range(2)]
LARGE_OUTS = [np.empty(LARGE, np.float32) for _ in range(2)]
BOUND = cd.bind(SMALL_VALUES, "sum", "cpu:0")
MIDDLE_BOUND = cd.bind([np.full(1 << 17, k, np.float32) for k in (1, 2)], "sum", "cpu:0")
COLLECTIVE = cd.CollectiveAllReduce()
OPS = cd.DirectAllReduce()
GATHER_BOUND = OPS.bound.gather(cd.PerReplica(SMALL_VALUES), "cpu:0")
PARTS_BOUND = OPS.bound.all_to_all(cd.PerReplica(SMALL_VALUES))
STEPWISE = cd.CommunicationOptions(lowering="off")
EXACT = cd.CommunicationOptions(precision="exact")
with STRATEGY.scope():
    VARIABLE = cd.Variable(np.zeros(3, np.float32), aggregation=cd.VariableAggregation.SUM)


def in_replica() -> Any:
    context = cd.get_replica_context()
    total = context.all_reduce("sum", np.float32(context.replica_id_in_sync_group + 1))
    VARIABLE.assign(np.full(3, total, np.float32))
    return context.all_gather(np.ones(1, np.float32), axis=0) + total


def in_scope() -> None:
    with STRATEGY.scope():
        assert cd.get_strategy() is STRATEGY
        cd.Variable(1.0)


def used_strategy() -> None:
    with cd.MirroredStrategy(["cpu:0"]).scope():  # refused if another one were still entered
        assert cd.in_cross_replica_context()
    assert not cd.has_strategy()
    assert [total.tolist() for total in STRATEGY.run(in_replica).values] == [[4.0, 4.0]] * 2


def traced(path: str) -> None:
    with cd.trace(path):
        cd.reduce(SMALL_VALUES)


class Row(NamedTuple):
    name: str
    call: Callable[[], Any]
    check: Callable[[], Any]


def sums_of(values: list[Any]) -> Callable[[], None]:
    def check() -> None:
        total = cd.reduce(values)
        assert (total == 3).all()
        assert all((copy == 3).all() for copy in cd.all_reduce(values))

    return check


def reduced_into_outs() -> None:
    for out in OUTS:
        out[:] = -1
    cd.all_reduce(SMALL_VALUES, out=OUTS)
    assert all((out == 3).all() for out in OUTS)


def unchanged_afterwards() -> None:
    """No thread of the interrupted call writes any more."""
    for out in LARGE_OUTS:
        out[:] = -1
    cd.reduce(LARGE_VALUES)
    assert all((out == -1).all() for out in LARGE_OUTS)


def bound_sum() -> None:
    assert (BOUND() == 3).all()


def bound_gather() -> None:
    for gathered in (OPS.bound.gather(cd.PerReplica(SMALL_VALUES), "cpu:0")(), GATHER_BOUND()):
        assert gathered.tolist() == [1] * 5 + [2] * 5
    assert PARTS_BOUND().values[1].tolist() == [1, 1, 2, 2]


def started_sum() -> Any:
    return cd.RingAllReduce().start_reduce("sum", cd.PerReplica(SMALL_VALUES), "cpu:0").wait()


def collective_sum() -> None:
    total = COLLECTIVE.reduce("sum", cd.PerReplica(SMALL_VALUES), "cpu:0")
    assert (total == 3).all()
    assert (COLLECTIVE.reduce_scatter("sum", cd.PerReplica(SMALL_VALUES)).values[1] == 3).all()


def assigned() -> None:
    VARIABLE.assign(np.full(3, 7, np.float32))
    assert VARIABLE.assign_add(np.ones(3, np.float32)).values[1].tolist() == [8, 8, 8]


def batches() -> None:
    made = STRATEGY.experimental_distribute_dataset(np.arange(8, dtype=np.float32), batch_size=4)
    assert [STRATEGY.reduce("sum", batch, axis=0).tolist() for batch in made] == [6, 22]


def accumulated() -> None:
    """An interrupted accumulator is given up; a new one is right."""
    total = cd.Accumulator("exact", max_pending=2)
    for values in (SMALL_VALUES, SMALL_VALUES):
        total.add({"a": values[0], "b": values[1]}, weight=3)
    assert (total.mean()["b"] == 2).all()


def bound_in_a_row() -> None:
    for _ in range(4):  # so close together that a worker stays awake for the next
        assert (MIDDLE_BOUND() == 3).all()


small_sums, large_sums = sums_of(SMALL_VALUES), sums_of(LARGE_VALUES)

ROWS = [
    Row("reduce", lambda: cd.reduce(SMALL_VALUES), small_sums),
    Row("exact", lambda: cd.reduce(SMALL_VALUES, options=EXACT), small_sums),
    Row("reduce large", lambda: cd.reduce(LARGE_VALUES), large_sums),
    Row("all_reduce large", lambda: cd.all_reduce(LARGE_VALUES), large_sums),
    Row("all_reduce out=", lambda: cd.all_reduce(SMALL_VALUES, out=OUTS), reduced_into_outs),
    Row("all_reduce large out=", lambda: cd.all_reduce(LARGE_VALUES, out=LARGE_OUTS), unchanged_afterwards),
    Row("all_reduce trees", lambda: cd.all_reduce(TREES), large_sums),
    Row("steps", lambda: cd.all_reduce(SMALL_VALUES, algorithm="ring", options=STEPWISE), small_sums),
    Row("sparse", lambda: cd.all_reduce(SLICES), small_sums),
    Row("to_dense", lambda: cd.to_dense(SLICES[0]), small_sums),
    Row("gather", lambda: cd.gather(SMALL_VALUES, axis=0), small_sums),
    Row("reduce_scatter", lambda: cd.reduce_scatter(SMALL_VALUES), small_sums),
    Row("all_gather", lambda: cd.all_gather(SMALL_VALUES), small_sums),
    Row("all_to_all", lambda: cd.all_to_all(SMALL_VALUES), small_sums),
    Row("broadcast", lambda: cd.broadcast(SMALL_VALUES[0], ["cpu:0", "cpu:1"]), small_sums),
    Row("bind", lambda: cd.bind(SMALL_VALUES), small_sums),
    Row("bound", BOUND, bound_sum),
    Row("start", lambda: BOUND.start().wait(), bound_sum),
    Row("start_reduce", started_sum, bound_sum),
    Row("bound gather", bound_gather, bound_gather),
    Row("bound all_to_all", PARTS_BOUND, bound_gather),
    Row("weights", lambda: cd.reduce(SMALL_VALUES, "mean", weights=[3, 1]), small_sums),
    Row("median", lambda: cd.reduce(SMALL_VALUES, "median"), small_sums),
    Row("collective", collective_sum, collective_sum),
    Row("strategy.reduce", lambda: STRATEGY.reduce("sum", cd.PerReplica(SMALL_VALUES), 0), used_strategy),
    Row("assign", assigned, assigned),
    Row("dataset", batches, batches),
    Row("scope", in_scope, used_strategy),
    Row("run", lambda: STRATEGY.run(in_replica), used_strategy),
    Row("bound in a row", bound_in_a_row, bound_in_a_row),
    Row("Accumulator", accumulated, accumulated),
    Row("release_memory", cd.release_memory, large_sums),
]  # fmt: skip


def chosen_steps(call: Callable[[], Any], count: int = STEPS) -> list[int]:
    call()  # what happens once, such as imports, has happened
    number = number_of_steps(call)
    if not count or number <= count:
        return list(range(number))
    return sorted(random.Random(SEED).sample(range(number), count))


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(rendezvous, "DEADLINE_PATIENCE_SECONDS", 5.0)  # replicas here stop at once


@pytest.mark.parametrize(
    "steps", [STEPS, pytest.param(MORE_STEPS, marks=pytest.mark.more("a repetition"))], ids=["few", "more"]
)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_next_call_works(row, steps):
    row.check()
    for place in interrupted_at_each_step(row.call, chosen_steps(row.call, steps)):
        try:
            row.check()
        except BaseException as error:
            raise AssertionError(f"after an interrupt at {place}") from error


def test_every_function_has_a_row():
    public = [name for name, found in inspect.getmembers(functions, inspect.isfunction) if name in cd.__all__]
    assert set(public) <= {row.name.partition(" ")[0] for row in ROWS}


def test_a_trace_that_is_interrupted_ends(tmp_path):
    def call() -> None:
        traced(str(tmp_path / "trace.json"))

    always = flight_recorder.events
    for place in interrupted_at_each_step(call, chosen_steps(call)):
        assert flight_recorder.events is always, place
