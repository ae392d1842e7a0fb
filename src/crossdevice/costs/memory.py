"""The memory a plan needs on each device when its steps run in order."""

from __future__ import annotations

import collections

from crossdevice.plans.plan import Plan
from crossdevice.plans.steps import Add, Buffer, Finish, Split, sources_of, targets_of
from crossdevice.values.device import Device


def peak_bytes(plan: Plan, item_bytes: int, *, unsummed: bool = False) -> dict[Device, int]:
    """The most bytes that inputs and buffers occupy on each device at one time.

    Inputs stay. Parts are views, and results are rounded in place of their sum. With `unsummed` a partial sum
    is the list of its contributions: adding to it allocates nothing, finishing it allocates one array.
    """
    inputs = {buffer.number for buffer in plan.inputs}
    held: collections.Counter[Device] = collections.Counter()
    for buffer in plan.inputs:
        held[buffer.device] += buffer.length * item_bytes
    peak = collections.Counter(held)
    owned = dict.fromkeys(inputs, 0)  # what is given back when a buffer is no longer needed
    for step, last_uses in zip(plan.steps, plan.last_uses, strict=True):
        targets = targets_of(step)
        takes_over = isinstance(step, (Split, Add) if unsummed else (Split, Finish))
        taken = sum(owned.pop(b.number, 0) for b in sources_of(step) if takes_over and b.number in last_uses)
        for buffer in targets:
            if takes_over:
                made = _share(buffer, targets, taken)
            else:
                arrays = buffer.num_replicas if unsummed and not buffer.is_finished else 1
                made = arrays * buffer.length * item_bytes
                held[buffer.device] += made
            owned[buffer.number] = made
            peak[buffer.device] = max(peak[buffer.device], held[buffer.device])
        devices = {b.number: b.device for b in (*sources_of(step), *targets)}
        for number in last_uses:
            held[devices[number]] -= owned.pop(number, 0)
    return dict(peak)


def _share(buffer: Buffer, targets: tuple[Buffer, ...], taken: int) -> int:
    """A part's share of the memory that its whole gives up."""
    whole = sum(target.length for target in targets)
    return taken * buffer.length // whole if whole else 0
