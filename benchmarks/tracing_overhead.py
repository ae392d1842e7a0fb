"""What the flight recorder costs: a small fused call and a step of a plan, recorded and not, side by side.

    python benchmarks/tracing_overhead.py

Exits with 1 if a step costs more than 1 us or a small call more than 0.3 us. Run it on a quiet machine.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

import crossdevice as cd
from crossdevice.execution import tracing
from crossdevice.execution.local import executor
from crossdevice.execution.local import prepared as reduction

ROUNDS, CALLS = 40, 400
STEP_BOUND_MICROSECONDS, CALL_BOUND_MICROSECONDS = 1.0, 0.3


class Nowhere:
    """A recorder that keeps nothing, used with a clock that stands still."""

    class events:  # noqa: N801
        @staticmethod
        def append(_: object) -> None:
            pass


def seconds_of(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - started) / CALLS


def difference(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds of a call with the recorder, and how much more that is than without."""
    recorder, clock = tracing.flight_recorder, time.perf_counter
    with_it, without = [], []
    for _ in range(ROUNDS):
        for module in (executor, reduction):
            module.flight_recorder, module.now = recorder, clock  # type: ignore[attr-defined]
        with_it.append(seconds_of(call))
        for module in (executor, reduction):
            module.flight_recorder, module.now = Nowhere, float  # type: ignore[attr-defined]
        without.append(seconds_of(call))
    for module in (executor, reduction):
        module.flight_recorder, module.now = recorder, clock  # type: ignore[attr-defined]
    gaps = [a - b for a, b in zip(with_it, without, strict=True)]
    return statistics.median(with_it), statistics.median(gaps)


def append_seconds() -> float:
    """Two clock readings and one event, alone."""
    recorder, clock, work = tracing.flight_recorder, tracing.now, tracing.Work("reduce", "x", ())

    def record() -> None:
        started = clock()
        recorder.events.append((work, started, clock(), 1))

    def nothing() -> None:
        pass

    return min(seconds_of(record) for _ in range(ROUNDS)) - min(seconds_of(nothing) for _ in range(ROUNDS))


def transfer_seconds() -> float:
    """What a broadcast, a gather and a sparse reduction do for every array that they copy."""
    device = cd.Device.parse("cpu:0")

    def record() -> None:
        with tracing.recorded(tracing.transfer(device, device, 1)):
            pass

    return min(seconds_of(record) for _ in range(ROUNDS))


def main() -> int:
    value = cd.PerReplica([np.ones(16, np.float32) for _ in range(2)])
    ops, stepwise = cd.RingAllReduce(), cd.CommunicationOptions(lowering="off")
    ops.reduce("sum", value, value)
    ops.reduce("sum", value, value, stepwise)
    tracing.flight_recorder.events.clear()
    ops.reduce("sum", value, value, stepwise)
    num_steps = sum(record.plan == "step by step" for record in cd.flight_record())
    small, small_gap = difference(lambda: ops.reduce("sum", value, value))
    stepped, stepped_gap = difference(lambda: ops.reduce("sum", value, value, stepwise))
    event = append_seconds() * 1e6
    transfer = transfer_seconds() * 1e6
    print(f"two clock readings and an event: {event:.2f} us")
    print(f"a transfer, described and recorded: {transfer:.2f} us")
    print(f"small fused call: {small * 1e6:.2f} us, of which the recorder {small_gap * 1e6:+.2f} us")
    print(f"stepwise call: {stepped * 1e6:.1f} us, of which the recorder {stepped_gap * 1e6:+.2f} us")
    print(f"per step: {stepped_gap * 1e6 / num_steps:.2f} us ({num_steps} steps)")
    steps = max(stepped_gap * 1e6 / num_steps, transfer)
    return 1 if event > CALL_BOUND_MICROSECONDS or steps > STEP_BOUND_MICROSECONDS else 0


if __name__ == "__main__":
    sys.exit(main())
