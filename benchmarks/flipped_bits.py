"""Which flipped bits `CommunicationOptions(verify=True)` sees, by place and by position in the element.

`python benchmarks/flipped_bits.py` flips one bit in each call of two ranks, in an element at random, and
prints the share of calls that raise CorruptionError. With `--processes` ranks share memory.
`--times 64` prints what verified sums of 64 MiB cost in shared memory, beside plain ones in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

import crossdevice as cd
from crossdevice.backends.protocol import dtype_named
from crossdevice.errors import CorruptionError
from crossdevice.execution.processes.transports import messages, windows
from crossdevice.kernels.host.fused_pass import fused_batch
from crossdevice.kernels.host.summed_pass import bound_sums
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.testing import faults, run_ranks
from crossdevice.values.recipe import COPYING, Recipe

LENGTH = 1 << 18
SMALLEST_BYTES = 1 << 17
"""Of a message that brings a part of the array: others are notes."""

FIELDS = {
    "float32": {"sign": (31,), "exponent": range(23, 31), "mantissa": range(23)},
    "int32": {"highest": (31,), "middle": range(8, 31), "lowest": range(8)},
}
OPTIONS = cd.CommunicationOptions(verify=True, timeout_seconds=60)

Flip = Callable[[NDArray[Any]], None]


def flip(bit: int, random: np.random.Generator, memory: NDArray[Any]) -> None:
    """Flips a bit of an element at random."""
    words = memory.reshape(-1).view(np.uint32)
    words[random.integers(words.size)] ^= np.uint32(1 << bit)


@contextlib.contextmanager
def in_message(group: ProcessGroup, number: int, flip_in: Flip) -> Iterator[None]:
    """Flips a bit in the n-th large message of rank 1, or in what it shows in shared memory."""
    count = itertools.count()

    def corrupt(sent: NDArray[np.uint8]) -> NDArray[np.uint8]:
        if sent.size >= SMALLEST_BYTES and next(count) == number:
            flip_in(sent)
        return sent

    with faults(group, rank=1, corrupt=corrupt):
        yield


@contextlib.contextmanager
def in_kernel(group: ProcessGroup, flip_in: Flip) -> Iterator[None]:
    """Flips a bit in what the kernel of rank 1 makes, wherever that goes."""
    if group.rank != 1:
        yield
        return

    def wrong(right: Callable[..., None], tasks: Any, *rest: Any, **more: Any) -> None:
        right(tasks, *rest, **more)
        ((_, outputs),) = tasks
        flip_in(outputs[0])
        for output in outputs[1:]:
            output[:] = outputs[0]

    def wrong_and_summed(tasks: Any, summed: Any, recipe: Recipe) -> Callable[[], None]:
        if recipe is COPYING:
            return bound_sums(tasks, summed, recipe)

        def run() -> None:
            wrong(lambda tasks: fused_batch(tasks, recipe), tasks)
            for each in itertools.chain.from_iterable(summed):
                each.add()

        return run

    with (
        # Under another name of the kernels, nothing that was laid out before is used.
        mock.patch.object(windows, "selected_kernels", return_value="wrong"),
        mock.patch.object(windows, "bound_sums", wrong_and_summed),
        mock.patch.object(messages.Messages, "_combine", _combining(messages.Messages._combine, wrong)),
    ):
        yield


def _combining(right: Any, wrong: Any) -> Any:
    """The combining of messages, with a kernel that is wrong on the rank that wants it to be."""

    def combine(self: Any, *arguments: Any) -> Any:
        if self._group.rank != 1:
            return right(self, *arguments)
        with mock.patch.object(messages, "fused_batch", functools.partial(wrong, messages.fused_batch)):
            return right(self, *arguments)

    return combine


def measured(group: ProcessGroup, rounds: int) -> dict[str, dict[str, float]]:
    """The share of flipped bits that were seen, by place and field."""
    ops = cd.CollectiveAllReduce(group=group, options=OPTIONS)
    random = np.random.default_rng(0)
    found: dict[str, dict[str, float]] = {}
    for dtype, fields in FIELDS.items():
        own = np.arange(LENGTH, dtype=dtype)
        places: dict[str, Callable[[Flip], Any]] = {
            "what is sent to be combined": functools.partial(in_message, group, 0),
            "what is sent of results": functools.partial(in_message, group, 1),
            "the result of a kernel": functools.partial(in_kernel, group),
        }
        for place, fault in places.items():
            for field, bits in fields.items():
                seen = []
                for bit, _ in itertools.product(bits, range(max(1, rounds // len(bits)))):
                    with fault(functools.partial(flip, bit, random)):
                        try:
                            ops.reduce("sum", own, "cpu:0")
                            seen.append(False)
                        except CorruptionError:
                            seen.append(True)
                found.setdefault(f"{dtype}: {place}", {})[field] = float(np.mean(seen))
    return found


def timed(group: ProcessGroup, mib: int, rounds: int) -> list[str]:
    """The times of plain and verified sums, of arrays of 1 and of 4 replicas on each rank."""
    plain = cd.CollectiveAllReduce(group=group)
    verified = cd.CollectiveAllReduce(group=group, options=OPTIONS)
    lines = []
    for dtype, replicas in itertools.product(("float32", "bfloat16", "int64"), (1, 4)):
        element = dtype_named(dtype)
        arrays = [np.ones((mib << 20) // element.itemsize, element) for _ in range(replicas)]
        value = cd.PerReplica(arrays)
        times: list[list[float]] = [[], []]
        for _ in range(rounds + 1):
            for of_ops, ops in zip(times, (plain, verified), strict=True):
                begin = time.perf_counter()
                ops.reduce("sum", value, "cpu:0")
                of_ops.append(time.perf_counter() - begin)
        fast, checked = (min(each[1:]) for each in times)
        size = f"{group.size * replicas} x {mib} MiB"
        lines.append(
            f"{dtype:8} {size:11} plain {fast * 1e3:5.1f} ms  verified {checked * 1e3:5.1f} ms  "
            f"{checked / fast:.2f}x"
        )
    return lines


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=32, help="calls for each field (%(default)s)")
    parser.add_argument("--processes", action="store_true", help="ranks are processes that share memory")
    parser.add_argument("--times", type=int, metavar="MIB", help="measure sums of arrays of this size")
    arguments = parser.parse_args()
    if arguments.times:
        program = functools.partial(timed, mib=arguments.times, rounds=arguments.rounds)
        print("\n".join(run_ranks(2, program, processes=True)[0]))
        return
    found = functools.partial(measured, rounds=arguments.rounds)
    table, *others = run_ranks(2, found, processes=arguments.processes)
    assert others == [table], "ranks do not agree"
    for place, fields in table.items():
        print(f"{place:40}" + "".join(f"  {field} {share:6.1%}" for field, share in fields.items()))


if __name__ == "__main__":
    main()
