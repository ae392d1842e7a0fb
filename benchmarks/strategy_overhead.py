"""What a strategy adds to a step: microseconds of a `run` over 8 devices whose function does nothing.

    python benchmarks/strategy_overhead.py [--devices N] [--rounds N]

The second row is a step that also averages one number per replica: a run with one meeting. TensorFlow's
MirroredStrategy over logical CPU devices stands beside it if it is installed, in a process of its own.
Rounds are short and the median counts. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

STEPS_PER_ROUND = 50
LIMIT_MICROSECONDS = 150


def measured(step: Callable[[], object], rounds: int) -> dict[str, float]:
    for _ in range(STEPS_PER_ROUND):
        step()
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        for _ in range(STEPS_PER_ROUND):
            step()
        times.append((time.perf_counter() - started) / STEPS_PER_ROUND * 1e6)
    return {"median": statistics.median(times), "best": min(times)}


def of_crossdevice(devices: int, rounds: int) -> dict[str, dict[str, float]]:
    import numpy as np

    import crossdevice as cd

    strategy = cd.MirroredStrategy([f"cpu:{device}" for device in range(devices)])
    one = np.ones((), np.float32)

    def meet() -> object:
        return cd.get_replica_context().all_reduce("mean", one)

    return {
        "does nothing": measured(lambda: strategy.run(nothing), rounds),
        "averages a number": measured(lambda: strategy.run(meet), rounds),
    }


def of_tensorflow(devices: int, rounds: int) -> dict[str, dict[str, float]]:
    import tensorflow as tf

    logical = [tf.config.LogicalDeviceConfiguration() for _ in range(devices)]
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], logical)
    strategy = tf.distribute.MirroredStrategy([f"/cpu:{device}" for device in range(devices)])
    one = tf.ones(())

    def meet() -> object:
        # The addition makes a tensor per replica: a constant that all share would not be reduced at all.
        return tf.distribute.get_replica_context().all_reduce("MEAN", one + 0.0)

    in_graph = tf.function(lambda: strategy.run(meet))
    return {
        "does nothing": measured(lambda: strategy.run(nothing), rounds),
        "averages a number": measured(lambda: strategy.run(meet), max(1, rounds // 10)),
        "averages a number, in a tf.function": measured(in_graph, rounds),
    }


def nothing() -> None:
    return None


def beside(devices: int, rounds: int) -> dict[str, dict[str, float]] | None:
    """TensorFlow's figures, from a process of their own; None if it is not installed."""
    if importlib.util.find_spec("tensorflow") is None:
        return None
    command = [sys.executable, __file__, "--child", f"--devices={devices}", f"--rounds={rounds}"]
    quiet = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    answer = subprocess.run(
        command, env=quiet, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True
    )
    figures: dict[str, dict[str, float]] = json.loads(answer.stdout.splitlines()[-1])
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        print(json.dumps(of_tensorflow(asked.devices, asked.rounds)))
        return 0
    print(f"{asked.devices} logical devices, {os.cpu_count()} cores, microseconds per run: median (best)")
    ours = of_crossdevice(asked.devices, asked.rounds)
    for library, figures in (("crossdevice", ours), ("tensorflow", beside(asked.devices, asked.rounds))):
        if figures is None:
            print(f"{library:12} not installed")
        for name, figure in (figures or {}).items():
            print(f"{library:12} {name:36} {figure['median']:9.0f} ({figure['best']:.0f})")
    return 0 if ours["does nothing"]["median"] < LIMIT_MICROSECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
