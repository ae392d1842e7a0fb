"""Whatever the algorithm, nothing is read before it is written, and only what must wait waits."""

import pytest

from crossdevice import Device, DirectAllReduce, RingAllReduce
from crossdevice.algorithms.registry import ALGORITHMS
from crossdevice.plans.builder import PlanBuilder
from crossdevice.plans.steps import Copy, Split, sources_of, targets_of
from crossdevice.values.device import host_device
from unit.algorithms.planning import planned

COUNTS = (*range(1, 13), 16, 17)


def gpus(count):
    return [Device("cuda", index) for index in range(count)]


def plans_of(name):
    algorithm = ALGORITHMS.load(name)()
    for count in COUNTS:
        devices = gpus(count)
        elsewhere = Device("cuda", 99)
        for destinations in (devices, devices[:1], [elsewhere, devices[-1], host_device(0)]):
            yield planned(algorithm, devices, destinations)
        yield planned(algorithm, [*devices, *devices[:2]], devices)  # several replicas on a GPU


def certain_before(schedule):
    """For each step the steps that are over before it begins: by its tracks, or by what it waits for."""
    on_track, before = {}, []
    for number, (_, tracks, waits, _) in enumerate(schedule):
        earlier = set()
        for other in waits:
            assert other < number
            assert schedule[other].is_awaited
            earlier |= before[other] | {other}
        # A step of several tracks is over on each of its own only: what follows on one of them knows no more.
        for track in tracks:
            for other in on_track.get(track, ()):
                if len(schedule[other].tracks) == 1:
                    earlier |= before[other] | {other}
        if len(tracks) > 1:  # only what all of its tracks know for certain
            known = [set().union(*[before[o] | {o} for o in on_track.get(track, ())]) for track in tracks]
            earlier = set.intersection(*known) | {o for w in waits for o in before[w] | {w}}
        before.append(earlier)
        for track in tracks:
            on_track.setdefault(track, []).append(number)
    return before


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_read_comes_after_the_write(name):
    for plan in plans_of(name):
        before = certain_before(plan.schedule)
        writers = {}
        for number, (step, tracks, _, _) in enumerate(plan.schedule):
            needed = {w for buffer in sources_of(step) for w in writers.get(buffer.number, ())}
            if tracks:
                assert needed <= before[number], (name, step)
            writers.update((buffer.number, {number} if tracks else needed) for buffer in targets_of(step))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_step_is_there_once_and_in_the_order_of_the_plan(name):
    for plan in plans_of(name):
        assert tuple(entry.step for entry in plan.schedule) == plan.steps


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_step_runs_on_the_devices_whose_buffers_it_touches(name):
    for plan in plans_of(name):
        for step, tracks, waits, _ in plan.schedule:
            if isinstance(step, Split):
                assert (tracks, waits) == ((), ())
            else:
                ends = {device for track in tracks for device in track}
                assert ends == {buffer.device for buffer in (*sources_of(step), *targets_of(step))}


def test_shards_that_are_exchanged_wait_for_nothing():
    plan = planned(DirectAllReduce(), gpus(4), gpus(4))
    first = [
        entry for entry in plan.schedule if isinstance(entry.step, Copy) and not entry.step.source.is_finished
    ]
    assert len(first) == 12
    assert {entry.waits for entry in first} == {()}
    assert len({entry.tracks for entry in first}) == 12


def test_the_next_shard_travels_while_the_last_one_is_added():
    plan = planned(RingAllReduce(), gpus(3), gpus(3))
    copies = [entry for entry in plan.schedule if isinstance(entry.step, Copy)]
    adding = {(device, device) for device in gpus(3)}
    assert not adding & {track for entry in copies for track in entry.tracks}


def test_what_an_earlier_wait_made_certain_is_not_waited_for_again():
    zero, one = gpus(2)
    build = PlanBuilder([zero, one], 8)
    parts = build.split(build.inputs[1], 2)
    there = [build.copy(part, to=zero) for part in parts]
    mine = build.split(build.inputs[0], 2)
    second = build.add([mine[1], there[1]], at=zero)
    first = build.add([mine[0], there[0]], at=zero)
    plan = build.plan([build.join([first, second], at=zero)])
    waits = [entry.waits for entry in plan.schedule if entry.tracks]
    assert waits == [(), (), (2,), (), (), (), ()]
