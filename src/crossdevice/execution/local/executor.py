"""Running a plan step by step, as on devices with separate memories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, assert_never

from crossdevice.backends.protocol import Array, Backend, Streams
from crossdevice.execution.local.combining import combine
from crossdevice.execution.tracing import flight_recorder, now
from crossdevice.kernels.recipe import Recipe
from crossdevice.plans import steps
from crossdevice.plans.plan import Plan
from crossdevice.plans.steps import Step, sources_of, targets_of
from crossdevice.values.dtypes import ITEM_BYTES
from crossdevice.values.reduce_op import ReduceOp

MIN_OVERLAPPED_BYTES = 1 << 20
"""Smaller packs are run in order: streams and events cost the host some 45 us a step, as long as PCIe takes
for this much."""

Held: TypeAlias = "tuple[tuple[int, Array], ...]"
"""What a buffer holds: arrays with the replica each came from, in replica order.

Under `"fast"` there is one array, added up as the plan goes. Otherwise a partial sum stays a list of
its contributions until it is finished: only so do its bits not depend on the plan.
"""


def execute(plan: Plan, inputs: Sequence[Array], backend: Backend, recipe: Recipe, dtype: str) -> list[Array]:
    """The plan's outputs as new flat arrays of `dtype`, each on its buffer's device.

    On several GPUs, steps of large packs that need not wait for each other are in flight together. Like all
    that a library enqueues, they are ordered by the current streams: after what came before the call, before
    what follows.
    """
    held: dict[int, Held] = {
        buffer.number: ((replica, array),)
        for replica, (buffer, array) in enumerate(zip(plan.inputs, inputs, strict=True))
    }
    is_large = plan.num_elements * ITEM_BYTES[dtype] >= MIN_OVERLAPPED_BYTES
    streams = backend.streams(plan.devices) if is_large else None
    if streams is None:
        for step, last_uses in zip(plan.steps, plan.last_uses, strict=True):
            _run_and_record(step, last_uses, held, backend, recipe, dtype)
    else:
        with streams:
            _run_on(streams, plan, held, backend, recipe, dtype)
    return [held[buffer.number][0][1] for buffer in plan.outputs]


def _run_on(
    streams: Streams, plan: Plan, held: dict[int, Held], backend: Backend, recipe: Recipe, dtype: str
) -> None:
    """The plan's schedule: each step on its tracks, after the marks of those it waits for."""
    marks: dict[int, Any] = {}
    for number, (scheduled, last_uses) in enumerate(zip(plan.schedule, plan.last_uses, strict=True)):
        step, tracks, waits, is_awaited = scheduled
        for other in waits:
            streams.wait(tracks, marks[other])
        for buffer in sources_of(step):
            for _, array in held[buffer.number]:
                streams.keep(array, tracks)
        streams.switch_to(tracks)
        _run_and_record(step, last_uses, held, backend, recipe, dtype)
        if is_awaited:
            marks[number] = streams.mark(tracks)
    for buffer in plan.outputs:
        streams.hand_over(held[buffer.number][0][1], buffer.device)


def _run_and_record(
    step: Step,
    last_uses: Sequence[int],
    held: dict[int, Held],
    backend: Backend,
    recipe: Recipe,
    dtype: str,
) -> None:
    started = now()
    results = _run(step, [held[buffer.number] for buffer in sources_of(step)], backend, recipe, dtype)
    held.update(zip((buffer.number for buffer in targets_of(step)), results, strict=True))
    for number in last_uses:
        del held[number]
    flight_recorder.events.append((step, started, now(), ITEM_BYTES[dtype]))


def _run(step: Step, sources: Sequence[Held], backend: Backend, recipe: Recipe, dtype: str) -> list[Held]:
    match step:
        case steps.Copy():
            return [
                tuple((replica, backend.copy(array, step.target.device)) for replica, array in sources[0])
            ]
        case steps.Add():
            together = tuple(pair for source in sources for pair in source)
            if recipe.precision != "fast":
                return [tuple(sorted(together, key=lambda pair: pair[0]))]
            arrays = [array for _, array in together]
            partial = recipe._replace(divisor=None, order=None)
            total = combine(backend, arrays, partial, backend.dtype_of(arrays[0]), step.target.device)
            return [((together[0][0], total),)]
        case steps.Finish():
            arrays = [array for _, array in sources[0]]
            return [((0, combine(backend, arrays, recipe._replace(order=None), dtype, step.target.device)),)]
        case steps.Split():
            edges = [(part.start - step.source.start, part.stop - step.source.start) for part in step.targets]
            return [
                tuple((replica, backend.part_of(array, start, stop)) for replica, array in sources[0])
                for start, stop in edges
            ]
        case steps.Join():
            columns = zip(*sources, strict=True)
            return [
                tuple(
                    (parts[0][0], backend.concat([array for _, array in parts], 0, step.target.device))
                    for parts in columns
                )
            ]
        case steps.EngineAllReduce():
            arrays = [source[0][1] for source in sources]
            source_dtype, divisor = backend.dtype_of(arrays[0]), recipe.divisor
            if divisor is None:
                return [((0, array),) for array in backend.engine_all_reduce(arrays, recipe.op)]
            if divisor == len(arrays) and not backend.engine_lack(source_dtype, ReduceOp.MEAN, divisor):
                return [((0, array),) for array in backend.engine_all_reduce(arrays, ReduceOp.MEAN)]
            sums = backend.engine_all_reduce(arrays, recipe.op)
            finish = recipe._replace(order=None)
            return [
                ((0, combine(backend, [array], finish, dtype, buffer.device)),)
                for array, buffer in zip(sums, step.targets, strict=True)
            ]
        case _:
            assert_never(step)
