from crossdevice.plans.builder import PlanBuilder
from crossdevice.plans.plan import render_plan
from crossdevice.plans.steps import Copy, Finish
from crossdevice.values.device import host_device

DEVICES = [host_device(i) for i in range(3)]


def one_device_plan():
    build = PlanBuilder(DEVICES, 10)
    total = build.add(build.inputs, at=DEVICES[0])
    return build.plan([build.copy(total, to=device) for device in DEVICES])


def test_traffic_is_counted_per_link():
    zero, one, two = DEVICES
    plan = one_device_plan()
    assert plan.traffic() == {(one, zero): 10, (two, zero): 10, (zero, one): 10, (zero, two): 10}
    assert plan.total_traffic() == 40
    assert plan.busiest_device_traffic() == 20
    assert plan.num_rounds == 2


def test_partial_sums_that_travel_unsummed_count_each_contribution():
    zero, one, two = DEVICES
    build = PlanBuilder(DEVICES, 10)
    partial = build.add(build.inputs[:2], at=one)
    plan = build.plan([build.add([partial, build.inputs[2]], at=two)])
    assert plan.traffic() == {(zero, one): 10, (one, two): 10}
    assert plan.traffic(unsummed=True) == {(zero, one): 10, (one, two): 20}


def test_nothing_is_sent_to_a_device_twice():
    build = PlanBuilder(DEVICES, 10)
    total = build.add(build.inputs, at=DEVICES[0])
    plan = build.plan([build.copy(total, to=DEVICES[1])] * 2)
    crossing = [
        step for step in plan.steps if isinstance(step, Copy) and step.source.device != step.target.device
    ]
    assert len([step for step in crossing if step.source.is_finished]) == 1


def test_steps_that_no_output_needs_are_left_out():
    build = PlanBuilder(DEVICES, 10)
    build.copy(build.inputs[2], to=DEVICES[1])
    plan = build.plan([build.add(build.inputs, at=DEVICES[0])])
    assert {step.target.device for step in plan.steps if isinstance(step, Copy)} == {DEVICES[0]}


def test_a_sum_is_finished_once_however_often_it_is_copied():
    assert sum(isinstance(step, Finish) for step in one_device_plan().steps) == 1


def test_buffers_are_let_go_after_their_last_use():
    plan = one_device_plan()
    gone = [number for numbers in plan.last_uses for number in numbers]
    assert len(gone) == len(set(gone))
    assert not set(gone) & {buffer.number for buffer in plan.outputs}
    assert {buffer.number for buffer in plan.inputs} <= set(gone)


def test_a_plan_prints_its_steps_with_sizes():
    text = render_plan(one_device_plan(), item_bytes=4)
    assert (
        text.splitlines()[0] == "3 replicas of 10 elements (40 B), 3 results, 2 rounds, 160 B between devices"
    )
    assert "b3[0:10] = copy b1[0:10] from cpu:1 to cpu:0 (40 B)" in text
    assert "b5[0:10] = add b0[0:10] b3[0:10] b4[0:10] on cpu:0" in text
    assert text.splitlines()[-1] == "  results: b6 on cpu:0, b7 on cpu:1, b8 on cpu:2"
