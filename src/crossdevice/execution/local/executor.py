"""Running a plan step by step, as on devices with separate memories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, assert_never

from crossdevice.backends.protocol import Array, Backend, Streams
from crossdevice.execution.local.combining import combine
from crossdevice.execution.tracing import flight_recorder, now
from crossdevice.plans import steps
from crossdevice.plans.plan import Plan
from crossdevice.plans.steps import Buffer, Step, sources_of, targets_of
from crossdevice.values.dtypes import ITEM_BYTES
from crossdevice.values.recipe import Recipe
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
    run = _Run(inputs, plan, backend, recipe, dtype)
    is_large = plan.num_elements * ITEM_BYTES[dtype] >= MIN_OVERLAPPED_BYTES
    streams = backend.streams(plan.devices) if is_large else None
    if streams is None:
        for step, last_uses in zip(plan.steps, plan.last_uses, strict=True):
            run.take(step, last_uses)
    else:
        with streams:
            run.take_all_on(streams)
    return [run.held[buffer.number][0][1] for buffer in plan.outputs]


class _Run:
    """Contents of a plan's buffers during a run."""

    def __init__(
        self, inputs: Sequence[Array], plan: Plan, backend: Backend, recipe: Recipe, dtype: str
    ) -> None:
        self._plan, self._backend, self._recipe, self._dtype = plan, backend, recipe, dtype
        self.held: dict[int, Held] = {
            buffer.number: ((replica, array),)
            for replica, (buffer, array) in enumerate(zip(plan.inputs, inputs, strict=True))
        }

    def take_all_on(self, streams: Streams) -> None:
        """The plan's schedule: each step on its tracks, after the marks of those it waits for."""
        plan = self._plan
        marks: dict[int, Any] = {}
        for number, (scheduled, last_uses) in enumerate(zip(plan.schedule, plan.last_uses, strict=True)):
            step, tracks, waits, is_awaited = scheduled
            for other in waits:
                streams.wait(tracks, marks[other])
            for buffer in sources_of(step):
                for _, array in self.held[buffer.number]:
                    streams.keep(array, tracks)
            streams.switch_to(tracks)
            self.take(step, last_uses)
            if is_awaited:
                marks[number] = streams.mark(tracks)
        for buffer in plan.outputs:
            streams.hand_over(self.held[buffer.number][0][1], buffer.device)

    def take(self, step: Step, last_uses: Sequence[int]) -> None:
        """Runs and records one step, after which some buffers are not used again."""
        started = now()
        results = self._results(step, [self.held[buffer.number] for buffer in sources_of(step)])
        self.held.update(zip((buffer.number for buffer in targets_of(step)), results, strict=True))
        for number in last_uses:
            del self.held[number]
        flight_recorder.events.append((step, started, now(), ITEM_BYTES[self._dtype]))

    def _results(self, step: Step, sources: Sequence[Held]) -> list[Held]:
        backend, recipe = self._backend, self._recipe
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
                return [self._finished([array for _, array in sources[0]], step.target)]
            case steps.Split():
                first = step.source.start
                return [
                    tuple(
                        (replica, backend.part_of(array, part.start - first, part.stop - first))
                        for replica, array in sources[0]
                    )
                    for part in step.targets
                ]
            case steps.Join():
                return [
                    tuple(
                        (parts[0][0], backend.concat([array for _, array in parts], 0, step.target.device))
                        for parts in zip(*sources, strict=True)
                    )
                ]
            case steps.EngineAllReduce():
                arrays = [source[0][1] for source in sources]
                divisor, dtype = recipe.divisor, backend.dtype_of(arrays[0])
                has_mean = divisor == len(arrays) and not backend.engine_unavailable(
                    dtype, ReduceOp.MEAN, divisor
                )
                made = backend.engine_all_reduce(arrays, ReduceOp.MEAN if has_mean else recipe.op)
                if divisor is None or has_mean:
                    return [((0, array),) for array in made]
                return [self._finished([array], at) for array, at in zip(made, step.targets, strict=True)]
            case _:
                assert_never(step)

    def _finished(self, arrays: Sequence[Array], target: Buffer) -> Held:
        whole = self._recipe._replace(order=None)
        return ((0, combine(self._backend, arrays, whole, self._dtype, target.device)),)
