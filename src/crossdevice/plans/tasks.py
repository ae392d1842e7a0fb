"""Work that processes do for each other, as data: ranges of arrays that make ranges of results.

A layout emits the tasks of a collective, a transport runs them, and a ledger proves them before anything
travels (`task_ledger.py`). Layouts of reductions get each leaf as a `ReducedLeaf`.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from crossdevice.errors import PlanError
from crossdevice.values.dtypes import ITEM_BYTES
from crossdevice.values.recipe import COPYING, Recipe

Role: TypeAlias = Literal["input", "partial", "result"]
"""An array of a replica; one array that stands for all replicas of a rank; an array that is delivered."""

MAX_REFS = 8
"""More ranges of a task than this are counted, not listed."""

LINE_ELEMENTS = 64
"""Number of elements that fills whole cache lines in any dtype."""


class Buffer(NamedTuple):
    """An array of a rank, flat; of a partial, and of a result that all replicas share, the replica is 0."""

    role: Role
    rank: int
    leaf: int
    replica: int
    dtype: str
    length: int

    def __str__(self) -> str:
        return f"{self.role} {self.rank}.{self.leaf}.{self.replica}"


class Ref(NamedTuple):
    """The elements `start` to `stop` of a buffer."""

    buffer: Buffer
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Bytes of these elements."""
        return (self.stop - self.start) * ITEM_BYTES[self.buffer.dtype]

    @classmethod
    def whole(cls, buffer: Buffer) -> Ref:
        """Refers to all of a buffer."""
        return cls(buffer, 0, buffer.length)

    def narrowed(self, start: int, stop: int) -> Ref:
        """Narrows the range, counted from its first element."""
        return Ref(self.buffer, self.start + start, self.start + stop)

    def __str__(self) -> str:
        return f"{self.buffer}[{self.start}:{self.stop}]"


class Task(NamedTuple):
    """A rank's combination of ranges of equal length, and where the result goes.

    Stage 0 makes partials of the worker's own replicas; stage 1 makes results, of what all ranks have.
    """

    stage: int
    worker: int
    inputs: tuple[Ref, ...]
    recipe: Recipe
    outputs: tuple[Ref, ...]

    @property
    def length(self) -> int:
        """Elements that it makes."""
        start, stop = (self.outputs or self.inputs)[0][1:]
        return stop - start

    @property
    def is_copy(self) -> bool:
        """True if elements stay as they are: a fast sum of several has the same recipe."""
        return self.recipe == COPYING and len(self.inputs) == 1

    def narrowed(self, start: int, stop: int) -> Task:
        """Narrows all ranges of the task, counted from their first elements: this cuts tasks into chunks."""
        inputs, outputs = (
            tuple([ref.narrowed(start, stop) for ref in refs]) for refs in (self.inputs, self.outputs)
        )
        return self._replace(inputs=inputs, outputs=outputs)

    def __str__(self) -> str:
        verb = "copies" if self.is_copy else f"{self.recipe.op.name.lower()}s"
        sources, targets = map(_listed, (self.inputs, self.outputs))
        return f"rank {self.worker} {verb} {sources} to {targets}"


@dataclasses.dataclass(frozen=True)
class TaskPlan:
    """The tasks of a collective between `size` ranks.

    With `seen_by`, as that rank sees them: its own tasks as they are, and of the tasks of others those that
    touch its arrays, with only these. All that a rank sends, receives, makes and gets is there; to emit
    everybody's tasks on each of a thousand ranks would take seconds.
    """

    size: int
    tasks: tuple[Task, ...]
    seen_by: int | None = None
    is_brought_to_all: bool = False
    """True if all ranks read the same of each rank, so that engines need send it to each host only once."""

    @functools.cached_property
    def partials(self) -> dict[Buffer, Task]:
        """The task that makes each partial as a whole."""
        return {ref.buffer: task for task in self.tasks if task.stage == 0 for ref in task.outputs}

    @functools.cached_property
    def results(self) -> tuple[Task, ...]:
        """The tasks that make results."""
        return tuple([task for task in self.tasks if task.stage])

    def making(self, ref: Ref) -> Task:
        """Returns the task that makes a range of a partial."""
        return self.partials[ref.buffer].narrowed(ref.start, ref.stop)

    @functools.cached_property
    def are_combined_by_all(self) -> bool:
        """True if results stay on the ranks that make them."""
        return all(ref.buffer.rank == task.worker for task in self.results for ref in task.outputs)

    def brought(self) -> dict[tuple[int, int], tuple[Ref, ...]]:
        """Returns one message per pair of ranks: what the second reads of the first, each range once."""
        found: dict[tuple[int, int], dict[Ref, None]] = collections.defaultdict(dict)
        for task in self.results:
            for ref in task.inputs:
                if ref.buffer.rank != task.worker and ref.start < ref.stop:
                    found[ref.buffer.rank, task.worker][ref] = None
        return {pair: tuple(refs) for pair, refs in found.items()}

    def delivered(self) -> dict[tuple[int, int], tuple[tuple[Task, Ref], ...]]:
        """Returns one message per pair of ranks: the first's results for the second, a range per task."""
        found: dict[tuple[int, int], list[tuple[Task, Ref]]] = collections.defaultdict(list)
        for task in self.results:
            ranks = set()
            for ref in task.outputs:
                rank = ref.buffer.rank
                if rank != task.worker and rank not in ranks and ref.start < ref.stop:
                    ranks.add(rank)
                    found[task.worker, rank].append((task, ref))
        return {pair: tuple(each) for pair, each in found.items()}

    @property
    def travelling(self) -> str:
        """Describes what tasks read from other ranks."""
        dtypes = dict.fromkeys(buffer.dtype for buffer in self.partials)
        return f"one partial result in {' or '.join(dtypes)}" if dtypes else "its arrays"

    def rendered(self, worker: int, most: int) -> Iterator[str]:
        """Renders the first tasks of one rank, a line each."""
        tasks = [task for task in self.tasks if task.worker == worker]
        yield from map(str, tasks[:most])
        if len(tasks) > most:
            yield f"and {len(tasks) - most} more of rank {worker}"

    def bytes_sent(self, rank: int, hosts: Sequence[Sequence[int]] | None = None) -> int:
        """Counts the bytes a rank sends to all others, from the tasks, without bytes that it only passes on.

        With the ranks of each of several `hosts`, what leaves its own: the same goes to a host once.
        """
        far = [ranks for ranks in hosts or [(peer,) for peer in range(self.size)] if rank not in ranks]
        host_of = {peer: number for number, ranks in enumerate(far) for peer in ranks}
        sent: dict[Hashable, int] = {}
        for (sender, worker), refs in self.brought().items():
            if sender == rank and worker in host_of:
                sent.update(((host_of[worker], ref), ref.num_bytes) for ref in refs)
        for (maker, peer), each in self.delivered().items():
            if maker == rank and peer in host_of:
                sent.update(
                    ((host_of[peer], ref._replace(buffer=task.outputs[0].buffer)), ref.num_bytes)
                    for task, ref in each
                )
        return sum(sent.values())


def _listed(refs: Sequence[Ref]) -> str:
    more = f" and {len(refs) - MAX_REFS} more" if len(refs) > MAX_REFS else ""
    return " ".join(map(str, refs[:MAX_REFS])) + more


def shard_edges(num_elements: int, num_shards: int) -> list[int]:
    """Splits a length into shards of nearly equal length, on whole cache lines of any dtype.

    >>> shard_edges(200, 3)
    [0, 128, 192, 200]
    """
    lines = -(-num_elements // LINE_ELEMENTS)
    return [
        min(-(-lines * shard // num_shards) * LINE_ELEMENTS, num_elements) for shard in range(num_shards + 1)
    ]


class Piece(NamedTuple):
    """The elements `start` to `stop` of a leaf, which one rank combines."""

    worker: int
    leaf: int
    start: int
    stop: int


def pieces_of(lengths: Sequence[int], workers: Sequence[int], *, is_even: bool = False) -> Iterator[Piece]:
    """Leaves laid end to end, each from a cache line on, and cut into a shard for each worker.

    With `is_even` all shards but the last ones have as many elements, an even number, and leaves follow each
    other without gaps.

    >>> [tuple(piece) for piece in pieces_of([3, 130], [0, 1])]
    [(0, 0, 0, 3), (0, 1, 0, 64), (1, 1, 64, 130)]
    >>> [tuple(piece) for piece in pieces_of([3, 130], [0, 1], is_even=True)]
    [(0, 0, 0, 3), (0, 1, 0, 65), (1, 1, 65, 130)]
    """
    firsts = list(itertools.accumulate(lengths if is_even else map(aligned, lengths), initial=0))
    end = firsts[-2] + lengths[-1] if lengths else 0
    if is_even:
        each = -(-end // (2 * len(workers))) * 2
        edges = [min(each * shard, end) for shard in range(len(workers) + 1)]
    else:
        edges = shard_edges(end, len(workers))
    leaf = 0
    for worker, (low, high) in zip(workers, itertools.pairwise(edges), strict=True):
        while leaf < len(lengths) and firsts[leaf] < high:
            start, stop = max(low - firsts[leaf], 0), min(high - firsts[leaf], lengths[leaf])
            if start < stop:
                yield Piece(worker, leaf, start, stop)
            if firsts[leaf] + lengths[leaf] > high:
                break
            leaf += 1


def aligned(num_elements: int) -> int:
    """Rounds up to whole cache lines."""
    return -(-num_elements // LINE_ELEMENTS) * LINE_ELEMENTS


class Round(NamedTuple):
    """Tasks with ranges that fit the windows together, and their offsets there, in bytes.

    Each rank has a window for what it brings, by range, and one for what it makes for others, by task.
    """

    tasks: tuple[Task, ...]
    brought: Mapping[Ref, int]
    made: Mapping[int, int]


def rounds_of(plan: TaskPlan, window_bytes: int, *, brings_own: bool = False) -> list[Round]:
    """Cuts a plan into chunks that fit the windows: all ranks have work in every round.

    Partials are brought by who makes them, also for own tasks; with `brings_own` so is everything.
    """
    tasks = plan.results

    def is_brought(ref: Ref, worker: int) -> bool:
        return brings_own or ref.buffer.rank != worker or ref.buffer.role == "partial"

    reads = [[ref for ref in task.inputs if is_brought(ref, task.worker)] for task in tasks]
    line_bytes = [_line_bytes(refs) for refs in reads]
    made_bytes = [
        ITEM_BYTES[task.outputs[0].buffer.dtype] * LINE_ELEMENTS
        if brings_own or any(ref.buffer.rank != task.worker for ref in task.outputs)
        else 0
        for task in tasks
    ]
    share = _shares(plan.size, tasks, reads, window_bytes)
    left = dict.fromkeys((number for number, task in enumerate(tasks) if task.length), 0)
    rounds = []
    while left:
        room = dict.fromkeys(range(plan.size), window_bytes)
        room_made = dict(room)
        allowed: dict[tuple[int, int], int] = {}
        chunks: list[Task] = []
        brought: dict[Ref, int] = {}
        made: dict[int, int] = {}
        for number, done in list(left.items()):
            task, worker = tasks[number], tasks[number].worker
            lines = -(-(task.length - done) // LINE_ELEMENTS)
            for rank, each in line_bytes[number].items():
                lines = min(lines, allowed.get((worker, rank), share[rank]) // each)
            if made_bytes[number]:
                lines = min(lines, room_made[worker] // made_bytes[number])
            stop = min(done + lines * LINE_ELEMENTS, task.length)
            chunk = task.narrowed(done, stop)
            new = [
                ref for ref in dict.fromkeys(chunk.inputs) if is_brought(ref, worker) and ref not in brought
            ]
            needed = _line_bytes(new)
            if not lines or any(room[rank] < lines * each for rank, each in needed.items()):
                continue
            for ref in new:
                rank, size = ref.buffer.rank, lines * LINE_ELEMENTS * ITEM_BYTES[ref.buffer.dtype]
                brought[ref] = window_bytes - room[rank]
                room[rank] -= size
            for rank, each in line_bytes[number].items():
                allowed[worker, rank] = allowed.get((worker, rank), share[rank]) - lines * each
            if made_bytes[number]:
                made[len(chunks)] = window_bytes - room_made[worker]
                room_made[worker] -= lines * made_bytes[number]
            chunks.append(chunk)
            left[number] = stop
            if stop == task.length:
                del left[number]
        if not chunks:
            raise PlanError(
                f"a line of {tasks[next(iter(left))]} does not fit into windows of {window_bytes} bytes"
            )
        rounds.append(Round(tuple(chunks), brought, made))
    return rounds


def _line_bytes(refs: Iterable[Ref]) -> dict[int, int]:
    """Returns the bytes of an aligned block of these elements in each rank's window."""
    found: collections.Counter[int] = collections.Counter()
    for ref in refs:
        found[ref.buffer.rank] += LINE_ELEMENTS * ITEM_BYTES[ref.buffer.dtype]
    return dict(found)


def _shares(
    size: int, tasks: Sequence[Task], reads: Sequence[Sequence[Ref]], window_bytes: int
) -> dict[int, int]:
    """Divides each rank's window among workers: how much one may fill in a round."""
    wanted: collections.Counter[int] = collections.Counter()
    readers: dict[int, set[int]] = collections.defaultdict(set)
    for task, refs in zip(tasks, reads, strict=True):
        for ref in refs:
            wanted[ref.buffer.rank] += ref.num_bytes
            readers[ref.buffer.rank].add(task.worker)
    distinct: collections.Counter[int] = collections.Counter()
    for ref in dict.fromkeys(ref for refs in reads for ref in refs):
        distinct[ref.buffer.rank] += ref.num_bytes
    return {
        rank: min(window_bytes * wanted[rank] // max(distinct[rank] * len(readers[rank]), 1), window_bytes)
        for rank in range(size)
    }


class ReducedLeaf(NamedTuple):
    """A leaf that is reduced over the replicas of all ranks, by its number in the call.

    Complex numbers are pairs of reals here, unless they are multiplied. `counts` has the replicas of each
    rank. With a `partial` dtype, one partial per rank travels in place of the arrays of its replicas.
    """

    number: int
    length: int
    counts: tuple[int, ...]
    dtype: str
    partial: str | None
    result: str
    of_replicas: Recipe
    """Makes partials."""
    of_ranks: Recipe
    """Makes results, of whatever travels."""

    @property
    def travelling(self) -> str:
        """The dtype of the exchanged arrays."""
        return self.partial or self.dtype

    def num_arrays(self, rank: int) -> int:
        """Returns the number of arrays that a rank sends."""
        return self.counts[rank] if self.partial is None else 1

    def inputs(self, rank: int) -> list[Buffer]:
        """Returns the arrays of a rank's replicas."""
        return [
            Buffer("input", rank, self.number, replica, self.dtype, self.length)
            for replica in range(self.counts[rank])
        ]

    def contributions(self, rank: int) -> list[Buffer]:
        """Lists the arrays that a rank sends: those of its replicas, or its partial."""
        if self.partial is None:
            return self.inputs(rank)
        return [Buffer("partial", rank, self.number, 0, self.partial, self.length)]

    def result_of(self, rank: int) -> Buffer:
        """Returns the result, which all replicas of a rank share."""
        return Buffer("result", rank, self.number, 0, self.result, self.length)

    def partial_tasks(self) -> Iterator[Task]:
        """Yields tasks that combine the arrays of each rank's own replicas, if partials are exchanged."""
        if self.partial is not None and self.length:
            for rank in range(len(self.counts)):
                inputs = tuple(map(Ref.whole, self.inputs(rank)))
                (partial,) = self.contributions(rank)
                yield Task(0, rank, inputs, self.of_replicas, (Ref.whole(partial),))


def packed_bytes(leaves: Sequence[ReducedLeaf]) -> int:
    """Computes the bytes of one array of each leaf, in a pack: all but the last end with a line."""
    elements = sum([aligned(leaf.length) for leaf in leaves[:-1]]) + leaves[-1].length
    return elements * ITEM_BYTES[leaves[0].travelling]


class ContributionsOfRanks:
    """The contributions to a leaf of all ranks in order, or of one rank that sees only its own."""

    def __init__(self, leaf: ReducedLeaf) -> None:
        self._of_ranks = [leaf.contributions(rank) for rank in range(len(leaf.counts))]
        self._of_all = list(itertools.chain.from_iterable(self._of_ranks))

    def between(self, start: int, stop: int, seen_by: int | None = None) -> tuple[Ref, ...]:
        """Returns these elements of all contributions, or of those of one rank."""
        buffers: Sequence[Buffer] = self._of_all if seen_by is None else self._of_ranks[seen_by]
        return tuple([Ref(buffer, start, stop) for buffer in buffers])
