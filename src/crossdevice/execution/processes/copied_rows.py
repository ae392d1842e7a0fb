"""Calls that copy between processes: rows of all ranks, arrays of one rank, a part of each replica for each.

Rows are arrays with the axis first: NumPy's on the host, or PyTorch's on one GPU, which stay there if ranks
reach each other's. How many there are is known only in the call; what was prepared for lengths is kept.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from crossdevice.backends.registry import backend_named
from crossdevice.execution.processes.agreement import Course, compare_once
from crossdevice.execution.processes.choice import prepare_copies, transport_of_copies
from crossdevice.execution.processes.gpu_peers import are_reached, known_peers, offered_gpu
from crossdevice.execution.processes.layouts.all_to_all import all_to_all
from crossdevice.execution.processes.layouts.broadcast import broadcast
from crossdevice.execution.processes.layouts.gather import gather
from crossdevice.execution.processes.programs import Program
from crossdevice.execution.processes.reduced_batch import WantedCopies
from crossdevice.execution.reading.shards import Rows, part_lengths
from crossdevice.execution.signature_cache import SignatureCache
from crossdevice.plans.task_ledger import (
    Meaning,
    check_tasks,
    meaning_of_all_to_all,
    meaning_of_broadcast,
    meaning_of_gather,
)
from crossdevice.plans.tasks import TaskPlan
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.group_call import GroupCall, check_announced, receive_buffer
from crossdevice.values.device import Device

Place: TypeAlias = tuple[int, int]
"""The leaf and the replica of a result of this rank."""


class Copied(NamedTuple):
    """A collective that copies, of given lengths: its layout, and what it means."""

    key: Hashable
    counts: Sequence[Sequence[int]]
    """For each leaf, the number of arrays of each rank."""
    layout: Callable[..., TaskPlan]
    meaning: Callable[[], Meaning]

    def proved(self, *, is_small: bool = False, seen_by: int | None) -> TaskPlan:
        """Its tasks; of copies nothing is combined by all."""
        del is_small
        plan = self.layout(seen_by=seen_by)
        check_tasks(plan, self.meaning())
        return plan


class LeafRows(NamedTuple):
    """One leaf of this rank: its replicas as rows along the axis, and the replicas that each rank has."""

    replicas: Sequence[Rows]
    sizes: Sequence[Sequence[int] | None]
    counts: Sequence[int]

    def lengths(self) -> NDArray[np.int64]:
        """The lengths of the parts of each replica here, one for each replica there is."""
        number = sum(self.counts)
        pairs = zip(self.replicas, self.sizes, strict=True)
        return np.array([part_lengths(len(rows), number, own) for rows, own in pairs], np.int64)


class _Ready(NamedTuple):
    """A call of given lengths, proved: its program, and the shape of each result of this rank."""

    name: str
    """That of its transport."""
    program: Program
    shapes: Mapping[Place, tuple[int, ...]]
    is_on_gpu: bool
    key: Hashable
    """The same on all ranks."""


class Copies:
    """The copying calls of one group; what was prepared for lengths is kept."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._ready: SignatureCache[_Ready] = SignatureCache()
        """By what all ranks say of their rows, and by the rows of this rank."""

    def gathered(self, call: GroupCall, rows: Sequence[Rows]) -> list[Rows]:
        """For each leaf the rows of all ranks, end to end: as many as each brings, but alike."""
        gpu = None if call.hops is not None or are_on_host(rows) else offered_gpu(rows, self._group)
        records = call.all_gather(np.array([*map(len, rows), gpu is not None], np.int64).tobytes())
        if not rows:
            return []
        key = ("gather", call.hops is None, tuple(records), _kinds_of(rows))
        ready = self._ready.get(key)
        if ready is None:
            found = [np.frombuffer(record, np.int64).tolist() for record in records]
            is_on_gpu = are_reached(call, gpu, [bool(numbers[-1]) for numbers in found])
            ready = self._ready[key] = self._gathering(call, found, rows, is_on_gpu)
        return list(self._made(call, ready, [[array] for array in rows]).values())

    def _gathering(
        self, call: GroupCall, lengths: Sequence[Sequence[int]], rows: Sequence[Rows], is_on_gpu: bool
    ) -> _Ready:
        row_bytes = list(map(_row_bytes, rows))
        for member, found in zip(self._group.members, lengths, strict=True):
            for length, array in zip(found[:-1], rows, strict=True):
                check_announced(member, (length, *array.shape[1:]), array.itemsize)
        num_bytes = tuple(
            tuple([found[leaf] * each for found in lengths]) for leaf, each in enumerate(row_bytes)
        )
        copied = Copied(
            ("gather", num_bytes),
            [(1,) * self._group.size] * len(rows),
            functools.partial(gather, num_bytes),
            functools.partial(meaning_of_gather, num_bytes),
        )
        totals = [sum(found[leaf] for found in lengths) for leaf in range(len(rows))]
        shapes = {(leaf, 0): (totals[leaf], *array.shape[1:]) for leaf, array in enumerate(rows)}
        return self._prepared(call, copied, shapes, is_on_gpu)

    def of_rank(self, call: GroupCall, arrays: Sequence[Rows], root: int) -> list[Rows]:
        """The flat arrays of one rank, which every rank has in the same lengths and dtypes."""
        group, peers = self._group, known_peers(self._group)
        is_on_gpu = False
        if (
            call.hops is None and peers is not None and peers.unavailable is None
        ):  # which all ranks know, or none
            gpu = offered_gpu(arrays, group)
            answers = call.all_gather(b"0" if gpu is None else b"1")
            is_on_gpu = are_reached(call, gpu, [answer == b"1" for answer in answers])
        is_root = group.rank == root
        key = ("broadcast", call.hops is None, root, is_on_gpu, tuple(map(len, arrays)), _kinds_of(arrays))
        ready = self._ready.get(key)
        if ready is None:
            num_bytes = tuple([len(array) * _row_bytes(array) for array in arrays])
            copied = Copied(
                ("broadcast", root, num_bytes),
                [(1,) * group.size] * len(arrays),
                functools.partial(broadcast, num_bytes, group.size, root),
                functools.partial(meaning_of_broadcast, num_bytes, group.size, root),
            )
            shapes = {} if is_root else {(leaf, 0): tuple(array.shape) for leaf, array in enumerate(arrays)}
            ready = self._ready[key] = self._prepared(call, copied, shapes, is_on_gpu)
        results = self._made(call, ready, [[array] for array in arrays])
        return list(arrays) if is_root else list(results.values())

    def exchanged(
        self,
        call: GroupCall,
        leaves: Sequence[LeafRows],
        lengths: Sequence[NDArray[np.int64]],
        gpu: Device | None = None,
    ) -> list[list[Rows]]:
        """For each leaf, what each replica of this rank gets: its parts of all replicas, end to end.

        Rows may be PyTorch's on this GPU, and results are there too if ranks reach each other's.
        """
        own = b"".join([bytes([gpu is not None]), *[of_leaf.tobytes() for of_leaf in lengths]])
        counts = tuple([tuple(leaf.counts) for leaf in leaves])
        of_all = list(map(sum, counts))
        numbers = [sum(map(operator.mul, of_rank, of_all)) for of_rank in zip(*counts, strict=True)]
        records = call.all_gather_of(own, [1 + 8 * number for number in numbers or [0] * self._group.size])
        if not leaves:
            return []
        inputs = [leaf.replicas for leaf in leaves]
        kinds = _kinds_of([replicas[0] for replicas in inputs])
        key = ("all to all", call.hops is None, tuple(records), counts, kinds)
        ready = self._ready.get(key)
        if ready is None:
            is_on_gpu = call.hops is None and are_reached(call, gpu, [record[0] == 1 for record in records])
            ready = self._ready[key] = self._exchange(call, records, leaves, is_on_gpu)
        results = iter(self._made(call, ready, inputs).values())
        return [list(itertools.islice(results, len(replicas))) for replicas in inputs]

    def _exchange(
        self, call: GroupCall, records: Sequence[bytes], leaves: Sequence[LeafRows], is_on_gpu: bool
    ) -> _Ready:
        rank, members = call.group.rank, call.group.members
        of_peers = [_lengths_of(peer, leaves, record) for peer, record in enumerate(records)]
        all_lengths = [
            np.concatenate([found[leaf] for found in of_peers]).tolist() for leaf in range(len(leaves))
        ]
        for member, found in zip(members, of_peers, strict=True):
            for leaf, of_leaf in zip(leaves, found, strict=True):
                for length in of_leaf.reshape(-1).tolist():
                    check_announced(member, (length, *leaf.replicas[0].shape[1:]), leaf.replicas[0].itemsize)
        num_bytes = tuple(
            tuple([tuple([part * _row_bytes(leaf.replicas[0]) for part in parts]) for parts in of_leaf])
            for leaf, of_leaf in zip(leaves, all_lengths, strict=True)
        )
        counts = tuple([tuple(leaf.counts) for leaf in leaves])
        copied = Copied(
            ("all to all", num_bytes, counts),
            counts,
            functools.partial(all_to_all, num_bytes, counts),
            functools.partial(meaning_of_all_to_all, num_bytes, counts),
        )
        shapes: dict[Place, tuple[int, ...]] = {}
        for number, (leaf, of_leaf) in enumerate(zip(leaves, all_lengths, strict=True)):
            first, rest = sum(leaf.counts[:rank]), leaf.replicas[0].shape[1:]
            for replica in range(leaf.counts[rank]):
                total = sum([parts[first + replica] for parts in of_leaf])
                shapes[number, replica] = (total, *rest)
        return self._prepared(call, copied, shapes, is_on_gpu)

    def _prepared(
        self, call: GroupCall, copied: Copied, shapes: Mapping[Place, tuple[int, ...]], is_on_gpu: bool
    ) -> _Ready:
        """A call with results of these shapes."""
        wanted = WantedCopies(self._group, is_on_gpu, is_verified=call.hops is not None)
        name = transport_of_copies(wanted).name
        program = prepare_copies(name, copied.proved, copied.counts, self._group)
        return _Ready(name, program, shapes, is_on_gpu, (copied.key, is_on_gpu, wanted.is_verified))

    def _made(self, call: GroupCall, ready: _Ready, inputs: Sequence[Sequence[Rows]]) -> dict[Place, Rows]:
        """New rows, with what the call brings to them."""
        if self._group.checks != "off":
            compare_once(
                call, ready.key, lambda: [Course(ready.name, range(len(inputs)), [ready.program.plan])]
            )
        if ready.is_on_gpu:
            results = {place: inputs[place[0]][0].new_empty(shape) for place, shape in ready.shapes.items()}
            as_bytes: Callable[[Rows], Rows] = _tensor_bytes
        else:
            inputs = [
                replicas if are_on_host(replicas) else list(map(_on_host, replicas)) for replicas in inputs
            ]
            results = {
                place: receive_buffer("the group", shape, inputs[place[0]][0].dtype)
                for place, shape in ready.shapes.items()
            }
            as_bytes = _array_bytes
        ready.program.run(
            call,
            {leaf: list(map(as_bytes, replicas)) for leaf, replicas in enumerate(inputs)},
            {place: [as_bytes(rows)] for place, rows in results.items()},
        )
        return results


def are_on_host(rows: Sequence[Rows]) -> bool:
    """Returns True if all rows are NumPy's."""
    return {type(array) for array in rows} <= {np.ndarray}


def _kinds_of(rows: Sequence[Rows]) -> tuple[Any, ...]:
    return tuple([(array.shape[1:], array.dtype) for array in rows])


def _lengths_of(peer: int, leaves: Sequence[LeafRows], record: bytes) -> list[NDArray[np.int64]]:
    """Reads for each leaf the lengths of the parts of a peer's replicas."""
    found, start = [], 1
    for leaf in leaves:
        shape = leaf.counts[peer], sum(leaf.counts)
        found.append(np.frombuffer(record, np.int64, math.prod(shape), start).reshape(shape))
        start += 8 * math.prod(shape)
    return found


def _row_bytes(rows: Rows) -> int:
    return int(math.prod(rows.shape[1:]) * rows.itemsize)


def _array_bytes(rows: NDArray[Any]) -> NDArray[np.uint8]:
    return rows.reshape(-1).view(np.uint8)


def _tensor_bytes(rows: Any) -> Any:
    from crossdevice.kernels.cuda.tensors import bytes_of

    return bytes_of(rows)


def _on_host(rows: Rows) -> NDArray[Any]:
    if isinstance(rows, np.ndarray):
        return rows
    return backend_named("torch").to_host(rows).reshape(tuple(rows.shape))
