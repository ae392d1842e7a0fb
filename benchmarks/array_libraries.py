"""JAX's psum and TensorFlow's own ReductionToOneDevice beside ours, on arrays of those libraries.

`python benchmarks/array_libraries.py` prints one line per floor and fails below one. Arrays of both are
immutable, so that all sides may give every device the same result memory: TensorFlow does, JAX's psum
does not, ours does. Ours is `"accurate"`: float32 added in float64, rounded once.

Where both sides read every input once, neither can be faster than reading them: that time is measured in
the same rounds, and a row within LIMIT_MARGIN of it is at the memory's limit, whatever its floor.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray
from resnet50 import gradient_shapes

NUM_DEVICES = 8
MIB = 1 << 18
"""Elements of float32 in a MiB."""


LIMIT_MARGIN = 1.1


class Row(NamedTuple):
    """Two calls that do the same, how many times as fast ours must be, and what both have to read."""

    text: str
    floor: float
    theirs: Callable[[], object]
    ours: Callable[[], object]
    inputs: Sequence[NDArray[Any]]


def seconds(call: Callable[[], object]) -> float:
    """One call with the release of its results, as in a loop in which the next ones replace them."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def folded(words: NDArray[np.int64]) -> np.int64:
    """Reads every word, and does as little with it as may be."""
    found = np.int64(0)
    for word in words:
        found ^= word
    return found


def reading(inputs: Sequence[NDArray[Any]]) -> Callable[[], object]:
    """A call that reads all inputs once, with every processor, and writes nothing."""
    count = len(os.sched_getaffinity(0))
    words = [array.reshape(-1)[: array.size // 2 * 2].view(np.int64) for array in inputs]
    shares = [
        [one[k * one.size // count : (k + 1) * one.size // count] for one in words] for k in range(count)
    ]
    pool = ThreadPoolExecutor(count)
    return lambda: list(pool.map(lambda share: [folded(part) for part in share], shares))


def measured(row: Row, num_rounds: int) -> tuple[float, ...]:
    """Medians of calls that take turns: theirs, ours, and merely reading."""
    calls = (row.theirs, row.ours, reading(row.inputs))
    for call in calls * 2:
        call()
    turns = [[seconds(call) for call in calls] for _ in range(num_rounds)]
    return tuple(statistics.median(found) for found in zip(*turns, strict=True))


def jax_rows() -> Iterator[Row]:
    import jax

    import crossdevice as cd

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    devices = jax.devices("cpu")
    mesh = jax.sharding.Mesh(np.array(devices), ("replicas",))
    split, everywhere = jax.sharding.PartitionSpec("replicas"), jax.sharding.PartitionSpec()
    psum = jax.jit(
        jax.shard_map(
            lambda array: jax.lax.psum(array, "replicas"), mesh=mesh, in_specs=split, out_specs=everywhere
        )
    )
    for size, floor in ((16, 1.7), (100, 6.0)):
        arrays = [jax.device_put(np.full(size * MIB, k, np.float32), d) for k, d in enumerate(devices)]
        sharded = jax.make_array_from_single_device_arrays(
            (NUM_DEVICES * size * MIB,), jax.sharding.NamedSharding(mesh, split), arrays
        )
        value, ops = cd.PerReplica(arrays), cd.ReductionToOneDevice()
        yield Row(
            f"JAX psum under shard_map, 8 x {size} MiB",
            floor,
            lambda sharded=sharded: psum(sharded).block_until_ready(),
            lambda value=value, ops=ops: jax.block_until_ready(ops.reduce("sum", value, value).values),
            [np.asarray(array) for array in arrays],
        )


def tensorflow_rows() -> Iterator[Row]:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf
    from tensorflow.python.distribute.values import PerReplica

    import crossdevice as cd

    host = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration() for _ in range(NUM_DEVICES)]
    tf.config.set_logical_device_configuration(host, logical)
    own, ops = tf.distribute.ReductionToOneDevice(), cd.ReductionToOneDevice()

    def tensors(shape: tuple[int, ...]) -> list[object]:
        made = []
        for number in range(NUM_DEVICES):
            with tf.device(f"/cpu:{number}"):
                made.append(tf.fill(shape, float(number)))
        return made

    for text, floor, shapes in (
        ("8 x 100 MiB", 1.3, [(100 * MIB,)]),
        ("ResNet-50 gradients, 8 replicas", 1 / 1.2, gradient_shapes()),
    ):
        columns = [tensors(shape) for shape in shapes]
        theirs = [(value, value) for value in map(PerReplica, columns)]
        ours = [(value, value) for value in map(cd.PerReplica, columns)]
        yield Row(
            f"TensorFlow ReductionToOneDevice, eager, {text}",
            floor,
            lambda pairs=theirs: own.batch_reduce(tf.distribute.ReduceOp.SUM, pairs),
            lambda pairs=ours: ops.batch_reduce("sum", pairs),
            [np.asarray(tensor) for column in columns for tensor in column],
        )


GROUPS = {"jax": jax_rows, "tensorflow": tensorflow_rows}


def report(library: str, num_rounds: int) -> bool:
    is_good = True
    for row in GROUPS[library]():
        theirs, ours, read = measured(row, num_rounds)
        is_met, is_at_limit = theirs / ours >= row.floor, ours <= read * LIMIT_MARGIN
        is_good &= is_met or is_at_limit
        verdict = "ok" if is_met else "at the memory's limit" if is_at_limit else "BELOW"
        print(
            f"{row.text:60} theirs {theirs * 1e3:8.2f} ms  ours {ours * 1e3:8.2f} ms  "
            f"reading {read * 1e3:8.2f} ms  {theirs / ours:6.2f}x  floor {row.floor:.2f}x  {verdict}",
            flush=True,
        )
    return is_good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--only", choices=GROUPS, help="measure in this process; otherwise in one for each library"
    )
    given = parser.parse_args()
    if given.only:
        return 0 if report(given.only, given.rounds) else 1
    words = [sys.executable, __file__, "--rounds", str(given.rounds), "--only"]
    return max(subprocess.run([*words, library], check=False).returncode for library in GROUPS)


if __name__ == "__main__":
    sys.exit(main())
