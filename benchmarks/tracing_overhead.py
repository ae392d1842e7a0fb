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
from crossdevice.values.quantities import time_text

ROUNDS, CALLS = 40, 400
STEP_BOUND_SECONDS, CALL_BOUND_SECONDS = 1e-6, 0.3e-6


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
    event, transfer, per_step = append_seconds(), transfer_seconds(), stepped_gap / num_steps
    print(f"two clock readings and an event: {time_text(event)}")
    print(f"a transfer, described and recorded: {time_text(transfer)}")
    print(f"small fused call: {time_text(small)}, of which the recorder {time_text(small_gap)}")
    print(f"stepwise call: {time_text(stepped)}, of which the recorder {time_text(stepped_gap)}")
    print(f"per step: {time_text(per_step)} ({num_steps} steps)")
    return 1 if event > CALL_BOUND_SECONDS or max(per_step, transfer) > STEP_BOUND_SECONDS else 0


if __name__ == "__main__":
    sys.exit(main())
