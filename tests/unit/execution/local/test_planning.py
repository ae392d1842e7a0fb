"""Plans are proved on every path, also where a fused pass runs in their place."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import crossdevice as cd
from crossdevice.errors import PlanError
from crossdevice.execution.local import prepared
from crossdevice.plans import ledger
from crossdevice.values.options import LOWERINGS, PRECISIONS

OPTIONS = [
    cd.CommunicationOptions(precision=precision, lowering=lowering)
    for precision, lowering in itertools.product(PRECISIONS, LOWERINGS)
]
each_option = pytest.mark.parametrize(
    "options", OPTIONS, ids=lambda options: f"{options.precision}-{options.lowering}"
)


def values(count=3, size=5):
    return cd.PerReplica([np.full(size, replica + 1, np.float32) for replica in range(count)])


class DropsTheSecond(cd.CrossDeviceOps):
    def plan_sum(self, build, destinations):
        first, _, *others = build.inputs
        total = build.add([first, *others], at=destinations[0])
        return [build.copy(total, to=device) for device in destinations]


class CountsTheFirstTwice(cd.CrossDeviceOps):
    def plan_sum(self, build, destinations):
        total = build.add([build.inputs[0], *build.inputs], at=destinations[0])
        return [build.copy(total, to=device) for device in destinations]


class ForgetsADestination(cd.CrossDeviceOps):
    def plan_sum(self, build, destinations):
        return [build.add(build.inputs, at=destinations[0])]


class Swaps(cd.CrossDeviceOps):
    def plan_sum(self, build, destinations):
        total = build.add(build.inputs, at=destinations[0])
        return [build.copy(total, to=device) for device in reversed(destinations)]


class WrongInTheSecondPack(cd.CrossDeviceOps):
    packing = cd.RingAllReduce(num_packs=2).packing

    def plan_sum(self, build, destinations):
        inputs = build.inputs[: len(build.inputs) - build.pack_number]
        total = build.add(inputs, at=destinations[0])
        return [build.copy(total, to=device) for device in destinations]


class Raises(cd.CrossDeviceOps):
    def plan_sum(self, build, destinations):
        raise ZeroDivisionError("a bug")


@each_option
@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (DropsTheSecond, r"DropsTheSecond.plan_sum gives a wrong plan: replica 1 \(cpu:1\) missing"),
        (CountsTheFirstTwice, "CountsTheFirstTwice.plan_sum gives a wrong plan: replica 0 counts twice"),
        (ForgetsADestination, "outputs are on cpu:0; expected one on each of cpu:0, cpu:1, cpu:2"),
        (Swaps, "outputs are on cpu:2, cpu:1, cpu:0; expected one on each of cpu:0, cpu:1, cpu:2"),
        (WrongInTheSecondPack, r"replica 2 \(cpu:2\) missing from output 0"),
    ],
    ids=lambda given: given.__name__ if isinstance(given, type) else "",
)
def test_a_wrong_plan_is_refused_on_every_path(algorithm, message, options):
    value = values()
    before = [array.copy() for array in value.values]
    calls = (
        lambda ops: ops.reduce("sum", value, value, options, out=value),
        lambda ops: ops.batch_reduce("sum", [(value, value)], options, out=[value]),
        lambda ops: ops.bind("sum", value, value, options, out=value),
        lambda ops: ops.explain(value, value, options),
    )
    for call in calls:
        with pytest.raises(PlanError, match=message):
            call(algorithm())
    assert all(map(np.array_equal, before, value.values))


@each_option
def test_what_a_plan_raises_is_raised_on_every_path(options):
    with pytest.raises(ZeroDivisionError, match="a bug"):
        Raises().reduce("sum", values(), "cpu:0", options)


class WrongFromAHundredElements(cd.CrossDeviceOps):
    def plan_sum(self, build, destinations):
        again = [] if build.inputs[0].length < 100 else [build.inputs[0]]
        total = build.add([*build.inputs, *again], at=destinations[0])
        return [build.copy(total, to=device) for device in destinations]


@each_option
def test_a_plan_that_depends_on_sizes_is_proved_at_the_size_that_runs(options):
    ops, large = WrongFromAHundredElements(), values(size=100)
    assert ops.reduce("sum", values(), "cpu:0", options)[0] == 6
    with pytest.raises(PlanError, match=r"WrongFromAHundredElements.plan_sum .*: replica 0 counts twice"):
        ops.explain(large, large, options)
    if "one fused pass adds in replica order" in ops.explain(values(), "cpu:0", options):
        assert ops.reduce("sum", large, "cpu:0", options)[0] == 6
    else:
        with pytest.raises(PlanError, match="replica 0 counts twice"):
            ops.reduce("sum", large, "cpu:0", options)


@each_option
def test_a_plan_is_proved_once_for_a_placement_and_each_size_that_runs(options, monkeypatch):
    proved = []
    check = ledger.check_plan
    monkeypatch.setattr(ledger, "check_plan", lambda plan: proved.append(plan.num_elements) or check(plan))
    ops = cd.RingAllReduce()
    for size in (1, 5, 1000, 5):
        ops.reduce("sum", values(size=size), "cpu:0", options)
    assert len(proved) == len(set(proved)) <= 3
    before = len(proved)
    ops.reduce("sum", values(), values(), options)
    assert len(proved) == before + 1


def test_a_fused_pass_stands_for_a_bounded_number_of_plans(monkeypatch):
    proved = []
    check = ledger.check_plan
    monkeypatch.setattr(ledger, "check_plan", lambda plan: proved.append(plan) or check(plan))
    pairs = [(values(), "cpu:0") for _ in range(prepared.MAX_PROVED_PACKS + 8)]
    cd.RingAllReduce(num_packs=0).batch_reduce("sum", pairs)
    assert len(proved) == prepared.MAX_PROVED_PACKS


def test_explain_says_that_the_plan_was_proved():
    text = cd.RingAllReduce().explain(values(), values())
    assert (
        "share the host's memory: one fused pass adds in replica order what the plan below was proved" in text
    )
    fast = cd.RingAllReduce().explain(values(), values(), cd.CommunicationOptions(precision="fast"))
    assert "one fused pass adds in the order of the plan below" in fast
