"""A plan as text that one can read."""

from __future__ import annotations

from crossdevice.plans import steps
from crossdevice.plans.plan import Plan
from crossdevice.plans.steps import Buffer, Step, sources_of, targets_of


def render_plan(plan: Plan, item_bytes: int) -> str:
    """One line per step: what it does, where, with which buffers, and how many bytes cross a link."""
    size = size_text(plan.num_elements * item_bytes)
    lines = [
        f"{len(plan.inputs)} replicas of {plan.num_elements} elements ({size}), "
        f"{len(plan.outputs)} results, {plan.num_rounds} rounds, "
        f"{size_text(plan.total_traffic() * item_bytes)} between devices"
    ]
    lines += [f"  b{buffer.number} = replica {i} on {buffer.device}" for i, buffer in enumerate(plan.inputs)]
    lines += [f"  {_line(step, item_bytes)}" for step in plan.steps]
    results = ", ".join(f"b{buffer.number} on {buffer.device}" for buffer in plan.outputs)
    return "\n".join([*lines, f"  results: {results}"])


def _line(step: Step, item_bytes: int) -> str:
    sources = " ".join(_name(buffer) for buffer in sources_of(step))
    targets = " ".join(_name(buffer) for buffer in targets_of(step))
    size = size_text(sum(buffer.length for buffer in targets_of(step)) * item_bytes)
    match step:
        case steps.Copy():
            return f"{targets} = copy {sources} from {step.source.device} to {step.target.device} ({size})"
        case steps.Add() | steps.Finish() | steps.Split() | steps.Join():
            verb = type(step).__name__.lower()
            return f"{targets} = {verb} {sources} on {targets_of(step)[0].device}"
        case steps.EngineAllReduce():
            return f"{targets} = engine all-reduce {sources} ({size})"


def _name(buffer: Buffer) -> str:
    return f"b{buffer.number}[{buffer.start}:{buffer.stop}]"


def devices_text(number: int) -> str:
    """Formats a number of devices.

    >>> devices_text(1), devices_text(8)
    ('1 device', '8 devices')
    """
    return "1 device" if number == 1 else f"{number} devices"


def size_text(num_bytes: int) -> str:
    """Bytes in powers of two, as one reads them aloud.

    >>> size_text(512), size_text(1536), size_text(1000 << 20)
    ('512 B', '1.5 KiB', '1000 MiB')
    """
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 1 << power:
            return f"{num_bytes / (1 << power):.4g} {unit}"
    return f"{num_bytes} B"
