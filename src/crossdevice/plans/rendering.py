"""A plan as text that one can read."""

from __future__ import annotations

from crossdevice.plans import steps
from crossdevice.plans.plan import Plan
from crossdevice.plans.steps import Buffer, Step, sources_of, targets_of
from crossdevice.values.quantities import counted, size_text


def render_plan(plan: Plan, item_bytes: int, *, unsummed: bool = False) -> str:
    """Writes one line per step: operation, device, buffers, and the bytes that a copy sends.

    With `unsummed`, copies of partial sums send the contributions these are made of.
    """
    size = size_text(plan.num_elements * item_bytes)
    travelling = size_text(plan.total_traffic(unsummed=unsummed) * item_bytes)
    lines = [
        f"{counted(len(plan.inputs), 'replica')} of {counted(plan.num_elements, 'element')} ({size}), "
        f"{counted(len(plan.outputs), 'result')}, {counted(plan.num_rounds, 'round')}, "
        f"{travelling} between devices"
    ]
    lines += [f"  b{buffer.number} = replica {i} on {buffer.device}" for i, buffer in enumerate(plan.inputs)]
    lines += [f"  {_line(step, item_bytes, unsummed)}" for step in plan.steps]
    results = ", ".join(f"b{buffer.number} on {buffer.device}" for buffer in plan.outputs)
    return "\n".join([*lines, f"  results: {results}"])


def _line(step: Step, item_bytes: int, unsummed: bool) -> str:
    sources = " ".join(_name(buffer) for buffer in sources_of(step))
    targets = " ".join(_name(buffer) for buffer in targets_of(step))
    size = size_text(sum(buffer.length for buffer in targets_of(step)) * item_bytes)
    match step:
        case steps.Copy():
            arrays = step.source.num_replicas if unsummed and not step.source.is_finished else 1
            sent = size if arrays == 1 else f"{arrays} contributions of {size}"
            return f"{targets} = copy {sources} from {step.source.device} to {step.target.device} ({sent})"
        case steps.Add() | steps.Finish() | steps.Split() | steps.Join():
            verb = type(step).__name__.lower()
            return f"{targets} = {verb} {sources} on {targets_of(step)[0].device}"
        case steps.EngineAllReduce():
            return f"{targets} = engine all-reduce {sources} ({size})"


def _name(buffer: Buffer) -> str:
    return f"b{buffer.number}[{buffer.start}:{buffer.stop}]"
