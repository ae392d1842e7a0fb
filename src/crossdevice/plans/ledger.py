"""The proof that a plan is right: each replica counts exactly once in every element of every output.

The ledger runs a plan on sets of contributions instead of arrays. It trusts nothing the builder
wrote down about a buffer: what each one holds is worked out again from the steps alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple, Protocol, assert_never

from crossdevice.errors import PlanError
from crossdevice.plans import steps
from crossdevice.plans.builder import PlanBuilder
from crossdevice.plans.plan import Plan
from crossdevice.plans.steps import Buffer, Step, sources_of, targets_of
from crossdevice.values.device import Device
from crossdevice.values.quantities import counted


class Holding(NamedTuple):
    """Known contents of a buffer: a range, its replicas, and whether it is a result."""

    start: int
    stop: int
    replicas: int
    is_finished: bool

    def __str__(self) -> str:
        kind = "the result" if self.is_finished else counted(self.replicas.bit_count(), "replica")
        return f"elements {self.start}:{self.stop} of {kind}"


class SumPlanner(Protocol):
    """An algorithm, as far as plans go."""

    def plan_sum(self, build: PlanBuilder, destinations: Sequence[Device]) -> Sequence[Buffer]:
        """Plans one pack, and returns its outputs."""


def proved_plan(algorithm: SumPlanner, build: PlanBuilder, destinations: Sequence[Device]) -> Plan:
    """Returns an algorithm's plan; PlanError unless it is right, with an output on each destination."""
    try:
        plan = build.plan(algorithm.plan_sum(build, destinations))
        check_plan(plan)
        placed = [buffer.device for buffer in plan.outputs]
        if placed != list(destinations):
            raise PlanError(
                f"outputs are on {', '.join(map(str, placed)) or 'no device'}; expected one on each of "
                f"{', '.join(map(str, destinations))}"
            )
    except PlanError as error:
        raise PlanError(f"{type(algorithm).__name__}.plan_sum gives a wrong plan: {error}") from None
    return plan


def check_plan(plan: Plan) -> None:
    """Raises PlanError unless every output is the whole pack with every replica counted exactly once."""
    everyone = (1 << len(plan.inputs)) - 1
    holdings: dict[int, Holding] = {}
    for replica, buffer in enumerate(plan.inputs):
        _write(holdings, buffer, Holding(0, plan.num_elements, 1 << replica, False))
    for step in plan.steps:
        held = [_read(holdings, buffer) for buffer in sources_of(step)]
        for buffer, holding in zip(targets_of(step), _outcomes(step, held, everyone), strict=True):
            _write(holdings, buffer, holding)
    if len({buffer.number for buffer in plan.outputs}) != len(plan.outputs):
        raise PlanError("two outputs share a buffer")
    whole = Holding(0, plan.num_elements, everyone, True)
    for number, buffer in enumerate(plan.outputs):
        held_there = _read(holdings, buffer)
        if held_there != whole:
            raise PlanError(f"output {number} holds {held_there}; expected {whole}")


def _outcomes(step: Step, held: Sequence[Holding], everyone: int) -> Sequence[Holding]:
    if not isinstance(step, (steps.Copy, steps.EngineAllReduce)):
        devices = {buffer.device for buffer in (*sources_of(step), *targets_of(step))}
        if len(devices) != 1:
            raise PlanError(
                f"{type(step).__name__} reaches over devices without a copy: {sorted(map(str, devices))}"
            )
    match step:
        case steps.Copy():
            return held
        case steps.Add():
            return [_sum_of(held)]
        case steps.Finish():
            return [_finished(held[0], everyone)]
        case steps.Split():
            return _parts_of(held[0], step.targets)
        case steps.Join():
            return [_joined(held)]
        case steps.EngineAllReduce():
            return [_finished(_sum_of(held), everyone)] * len(step.targets)
        case _:
            assert_never(step)


def _sum_of(held: Sequence[Holding]) -> Holding:
    replicas = 0
    for holding in held:
        if (holding.start, holding.stop) != (held[0].start, held[0].stop):
            raise PlanError(f"Add mixes {held[0]} with {holding}")
        if holding.is_finished:
            raise PlanError("Add reads a finished result")
        if replicas & holding.replicas:
            twice = (replicas & holding.replicas).bit_length() - 1
            raise PlanError(f"replica {twice} counts twice")
        replicas |= holding.replicas
    return Holding(held[0].start, held[0].stop, replicas, False)


def _finished(holding: Holding, everyone: int) -> Holding:
    if holding.is_finished:
        raise PlanError("Finish reads a finished result")
    if holding.replicas != everyone:
        lost = (everyone & ~holding.replicas).bit_length() - 1
        raise PlanError(f"replica {lost} is lost")
    return holding._replace(is_finished=True)


def _parts_of(whole: Holding, targets: Sequence[Buffer]) -> list[Holding]:
    edge = whole.start
    for target in targets:
        if target.start != edge or target.stop < edge:
            raise PlanError(f"Split leaves a gap or an overlap at element {edge}")
        edge = target.stop
    if edge != whole.stop:
        raise PlanError(f"Split ends at element {edge}; expected {whole.stop}")
    return [whole._replace(start=target.start, stop=target.stop) for target in targets]


def _joined(held: Sequence[Holding]) -> Holding:
    for left, right in itertools.pairwise(held):
        if left.stop != right.start:
            raise PlanError(f"Join leaves a gap or an overlap at element {left.stop}")
        if (left.replicas, left.is_finished) != (right.replicas, right.is_finished):
            raise PlanError("Join mixes parts in which different replicas count")
    return held[0]._replace(stop=held[-1].stop)


def _read(holdings: dict[int, Holding], buffer: Buffer) -> Holding:
    if buffer.number not in holdings:
        raise PlanError(f"b{buffer.number} is read before it is written")
    return holdings[buffer.number]


def _write(holdings: dict[int, Holding], buffer: Buffer, holding: Holding) -> None:
    if buffer.number in holdings:
        raise PlanError(f"b{buffer.number} is written twice")
    if (buffer.start, buffer.stop) != (holding.start, holding.stop):
        raise PlanError(
            f"b{buffer.number} says it holds elements {buffer.start}:{buffer.stop}; it holds {holding}"
        )
    holdings[buffer.number] = holding
