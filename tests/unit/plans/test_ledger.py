import dataclasses

import pytest

from crossdevice.errors import PlanError
from crossdevice.plans.builder import PlanBuilder
from crossdevice.plans.ledger import check_plan
from crossdevice.plans.plan import Plan
from crossdevice.plans.steps import Add, Buffer, Copy, Finish, Join, Split
from crossdevice.values.device import host_device

HERE, THERE = host_device(0), host_device(1)


def builder(count=2, length=4):
    return PlanBuilder([host_device(i) for i in range(count)], length)


def one_device_plan(count=3):
    build = builder(count)
    return build.plan([build.add(build.inputs, at=HERE)])


def test_a_right_plan_passes():
    check_plan(one_device_plan())


def test_a_lost_replica_is_named():
    build = builder(3)
    partial = build.add(build.inputs[:2], at=HERE)
    with pytest.raises(PlanError, match=r"replica 2 \(cpu:2\) missing from output 0"):
        build.plan([partial])
    plan = one_device_plan()
    *steps, add, finish = plan.steps
    forged = Plan(
        plan.inputs, (*steps, dataclasses.replace(add, sources=add.sources[:2]), finish), plan.outputs
    )
    with pytest.raises(PlanError, match="replica 2 is lost"):
        check_plan(forged)


def test_a_replica_that_counts_twice_is_named():
    build = builder()
    twice = build.add([build.inputs[0], build.inputs[1], build.inputs[1]], at=HERE)
    with pytest.raises(PlanError, match="replica 1 counts twice"):
        check_plan(build.plan([twice]))


def test_work_on_another_device_needs_a_copy():
    x, y = builder().inputs
    total = Buffer(2, HERE, 0, 4, 3)
    result = Buffer(3, HERE, 0, 4, 3, True)
    with pytest.raises(PlanError, match="Add reaches over devices without a copy"):
        check_plan(Plan((x, y), (Add((x, y), total), Finish(total, result)), (result,)))


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([Copy(Buffer(9, HERE, 0, 4, 1), Buffer(2, THERE, 0, 4, 1))], "b9 is read before it is written"),
        ([Copy(Buffer(0, HERE, 0, 4, 1), Buffer(1, THERE, 0, 4, 1))], "b1 is written twice"),
        ([Copy(Buffer(0, HERE, 0, 4, 1), Buffer(2, THERE, 0, 3, 1))], "b2 says it holds elements 0:3"),
        (
            [Split(Buffer(0, HERE, 0, 4, 1), (Buffer(2, HERE, 0, 1, 1), Buffer(3, HERE, 2, 4, 1)))],
            "Split leaves a gap",
        ),
        ([Split(Buffer(0, HERE, 0, 4, 1), (Buffer(2, HERE, 0, 1, 1),))], "Split ends at element 1"),
        (
            [Join((Buffer(0, HERE, 0, 4, 1), Buffer(0, HERE, 0, 4, 1)), Buffer(2, HERE, 0, 4, 1))],
            "Join leaves a gap",
        ),
        ([Finish(Buffer(0, HERE, 0, 4, 1), Buffer(2, HERE, 0, 4, 1))], "replica 1 is lost"),
    ],
)
def test_steps_that_do_not_add_up_are_refused(steps, message):
    inputs = builder().inputs
    with pytest.raises(PlanError, match=message):
        check_plan(Plan(inputs, tuple(steps), (inputs[0],)))


def test_an_output_must_be_the_whole_finished_pack():
    inputs = builder().inputs
    with pytest.raises(
        PlanError, match="output 0 holds elements 0:4 of 1 replica; expected elements 0:4 of the result"
    ):
        check_plan(Plan(inputs, (), (inputs[0],)))


def test_outputs_have_their_own_buffers():
    build = builder()
    total = build.add(build.inputs, at=HERE)
    plan = build.plan([total, total, build.copy(total, to=THERE)])
    check_plan(plan)
    assert len({buffer.number for buffer in plan.outputs}) == 3
    shared = Plan(plan.inputs, plan.steps, plan.outputs[:1] * 2)
    with pytest.raises(PlanError, match="share a buffer"):
        check_plan(shared)


def test_finished_results_are_not_added_again():
    build = builder()
    total = build.copy(build.add(build.inputs, at=HERE), to=THERE)
    with pytest.raises(PlanError, match="Add reads a finished result"):
        check_plan(
            build.plan([dataclasses.replace(build.add([total, build.inputs[1]], at=THERE), is_finished=True)])
        )


def test_a_builder_refuses_what_is_not_a_device_and_sums_of_nothing():
    build = builder()
    with pytest.raises(PlanError, match="'cpu:1' is a str; expected a Device"):
        build.add(build.inputs, at="cpu:1")
    with pytest.raises(PlanError, match="add has nothing to add; expected one buffer or more"):
        build.add([], at=HERE)
