"""Tasks over arrays on GPUs that do not reach each other: through windows of the host's shared memory.

While the host combines what is in windows, the GPU copies the next round to them, and the results of the last
one back. The bits are those of any other transport through the host: the kernels are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from crossdevice.backends.protocol import Array, dtype_named
from crossdevice.execution.processes.gpu_peers import known_peers
from crossdevice.execution.processes.programs import ALONE_BYTES, Delivery
from crossdevice.execution.processes.reduced_batch import ReducedBatch, Wanted, not_shared, partial_dtype
from crossdevice.execution.reading.leaf_spec import Columns, Outs
from crossdevice.execution.reading.outputs import delivered
from crossdevice.execution.signature_cache import SignatureCache
from crossdevice.execution.tracing import Work, recorded
from crossdevice.kernels.host.fused_pass import bound_batch
from crossdevice.plans.tasks import ReducedLeaf, Ref, Round, TaskPlan, aligned, rounds_of
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.process_groups.shared.shared_memory import WINDOW_BYTES
from crossdevice.values.dtypes import ITEM_BYTES
from crossdevice.values.quantities import counted
from crossdevice.values.weights import Weights


def staged_unavailable(wanted: Wanted) -> str | None:
    """Reason a leaf cannot be staged; None if all ranks have theirs on GPUs, and share memory of the host."""
    spec, op, options, group, counts, is_weighted, _ = wanted
    peers = known_peers(group)
    if peers is None or not peers.are_on_gpus:
        return "not all ranks have their arrays on GPUs"
    if group.shared is None:
        return not_shared(group)
    if spec.backend.name != "torch" or spec.shared_gpu is None or not spec.num_elements:
        return "its arrays are not PyTorch's, on one GPU"
    if counts is not None:
        if spec.own_op is not None:
            op, is_weighted = spec.own_op, False
        if partial_dtype(spec.dtype, op, options.precision, max(counts), is_weighted=is_weighted) is not None:
            return "one partial result of each process travels, which the host makes"
        if WINDOW_BYTES // group.size < max(counts) * 64 * ITEM_BYTES[spec.dtype]:
            return f"a window cannot show parts of {counted(max(counts), 'array')} at once"
    return None


class _Windows:
    """The windows of one parity: their memory, and where it is."""

    def __init__(self, brought: Sequence[NDArray[np.uint8]], made: Sequence[NDArray[np.uint8]]) -> None:
        self.brought, self.made = brought, made
        self.brought_at, self.made_at = (
            [int(window.__array_interface__["data"][0]) for window in windows] for windows in (brought, made)
        )


class _Own(NamedTuple):
    """A rank's work in one round, by places in windows."""

    fetched: Sequence[tuple[Ref, int]]
    combined: tuple[tuple[tuple[tuple[int, int], ...], int, int], ...]
    """For each own task the ranks and places of its inputs, that of its result, and its length."""
    put: Sequence[tuple[int, int, Ref]]
    """The rank that makes it, its place there, and what it is."""


class StagedReduction:
    """Dense leaves of a batch, on one GPU of each process, combined by the host's kernels."""

    def __init__(self, batch: ReducedBatch) -> None:
        shared = batch.group.shared
        assert shared is not None
        # Only now: importing PyTorch takes seconds.
        from crossdevice.kernels.cuda import staging, tensors

        self._tensors, self._batch = tensors, batch
        self._rank, self._steps = batch.group.rank, shared.steps
        self.plans: list[TaskPlan] = []
        self._packs = [self._prepared(pack) for pack in batch.packs()]
        self._windows = list(map(_Windows, shared.brought, shared.made))
        self._passes: SignatureCache[list[Callable[[], None]]] = SignatureCache()
        device = batch.specs[0].devices[0]
        self._place = tensors.device_named(device.type, device.index)
        self._copies = staging.Staging(self._place)
        if not device.is_host:
            for windows in self._windows:
                for address in (*windows.brought_at, *windows.made_at):
                    staging.pin(shared, address, WINDOW_BYTES)
        self._work = Work("reduce", "through shared memory, in chunks", (device,), batch.num_bytes)

    def run(self, call: GroupCall, columns: Columns, outs: Outs, weights: Weights | None = None) -> Delivery:
        """Reduces with the other ranks; `outs` are written to by whoever calls the delivery."""
        tensors, batch = self._tensors, self._batch
        with tensors.on_device(self._place):
            results = [
                [tensors.empty(shape, dtype, self._place) for shape in shapes]
                for shapes, dtype in zip(self._shapes(), batch.dtypes, strict=True)
            ]
            inputs = [tensors.tensors_of(self._rows(leaf, column)) for leaf, column in enumerate(columns)]
            with recorded(self._work):
                sources = list(map(tensors.addresses_of, inputs))
                targets = list(map(tensors.addresses_of, results))
                self._copies.begin()
                try:
                    for number in range(len(self._packs)):
                        self._run_pack(call, number, sources, targets, weights)
                finally:
                    self._copies.wait()  # of memory that is free from now on
        return lambda: [
            self._delivered(leaf, made, out)
            for leaf, (made, out) in enumerate(zip(results, outs, strict=True))
        ]

    def _prepared(self, pack: Sequence[ReducedLeaf]) -> tuple[Sequence[ReducedLeaf], list[_Own], bool]:
        """Prepares this rank's work in each round of a pack; tells if others make some of its results."""
        elements = sum([aligned(leaf.length) for leaf in pack])
        is_small = elements * ITEM_BYTES[pack[0].dtype] * sum(pack[0].counts) <= ALONE_BYTES
        plan = self._batch.plan(pack, is_small=is_small)
        self.plans.append(plan)
        rounds = rounds_of(plan, WINDOW_BYTES, brings_own=True)
        return pack, [self._own(each) for each in rounds], not plan.are_combined_by_all

    def _own(self, now: Round) -> _Own:
        combined, put = [], []
        for number, task in enumerate(now.tasks):
            place = now.made[number]
            if task.worker == self._rank:
                inputs = tuple([(ref.buffer.rank, now.brought[ref]) for ref in task.inputs])
                combined.append((inputs, place, task.length))
            put += [(task.worker, place, ref) for ref in task.outputs if ref.buffer.rank == self._rank]
        fetched = [(ref, place) for ref, place in now.brought.items() if ref.buffer.rank == self._rank]
        return _Own(fetched, tuple(combined), put)

    def _run_pack(
        self,
        call: GroupCall,
        number: int,
        sources: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
        weights: Weights | None,
    ) -> None:
        """One step for each round, and one at the end unless results stay with those who make them.

        Whoever comes to a step has copied back what was made before the last one, so a window is never
        written to while it is read (see shared_steps).
        """
        (_, rounds, is_made_by_others), steps = self._packs[number], self._steps
        self._fetch(rounds[0], self._windows[steps.parity], sources)
        for position, now in enumerate(rounds):
            self._copies.wait()
            call.step()
            parity = steps.number & 1
            if position + 1 < len(rounds):
                self._fetch(rounds[position + 1], self._windows[1 - parity], sources)
            if position:
                self._put(rounds[position - 1], self._windows[1 - parity], targets)
            self._combine(number, now, parity, weights)
        parity = steps.number & 1
        if is_made_by_others:
            self._copies.wait()
            call.step()
        self._put(rounds[-1], self._windows[parity], targets)
        self._copies.wait()

    def _fetch(self, now: _Own, windows: _Windows, sources: Sequence[Sequence[int]]) -> None:
        """Starts to bring this rank's arrays to its window."""
        window = windows.brought_at[self._rank]
        for ref, place in now.fetched:
            buffer = ref.buffer
            source = sources[buffer.leaf][buffer.replica] + ref.start * ITEM_BYTES[buffer.dtype]
            self._copies.fetch(window + place, source, ref.num_bytes)

    def _put(self, now: _Own, windows: _Windows, targets: Sequence[Sequence[int]]) -> None:
        """Starts to copy what all ranks have made for this one to its results."""
        for maker, place, ref in now.put:
            buffer = ref.buffer
            target = targets[buffer.leaf][buffer.replica] + ref.start * ITEM_BYTES[buffer.dtype]
            self._copies.put(target, windows.made_at[maker] + place, ref.num_bytes)

    def _combine(self, number: int, now: _Own, parity: int, weights: Weights | None) -> None:
        """Runs the own tasks of a round; of rounds that are alike they are laid out once."""
        key = (number, parity, now.combined)
        works = None if weights is not None else self._passes.get(key)
        if works is None:
            (leaf, *_), _, _ = self._packs[number]
            stored, made = dtype_named(leaf.dtype), dtype_named(leaf.result)
            windows = self._windows[parity]
            tasks = [
                (
                    [_array(windows.brought[rank], at, length, stored) for rank, at in inputs],
                    [_array(windows.made[self._rank], place, length, made)],
                )
                for inputs, place, length in now.combined
            ]
            works = bound_batch(tasks, leaf.of_ranks.with_weights(weights))
            if weights is None:
                self._passes[key] = works
        for work in works:
            work()

    # ---------------------------------------------------------------- results

    def _shapes(self) -> list[list[tuple[int, ...]]]:
        """The shapes of the results of each leaf."""
        if self._batch.parts is None:
            return [[spec.shape] for spec in self._batch.specs]
        return [list(leaf.own_rows) for leaf in self._batch.parts]

    def _rows(self, leaf: int, tensors: Sequence[Any]) -> Sequence[Any]:
        """The same tensors with the axis first, if there are parts."""
        axis = 0 if self._batch.parts is None else self._batch.parts[leaf].axis
        return tensors if axis == 0 else [tensor.movedim(axis, 0) for tensor in tensors]

    def _delivered(self, leaf: int, results: Sequence[Any], out: Sequence[Array] | None) -> tuple[Array, ...]:
        spec = self._batch.specs[leaf]
        if self._batch.parts is not None:
            axis = self._batch.parts[leaf].axis
            parts = [part.movedim(0, axis).contiguous() for part in results] if axis else results
            return delivered(parts, out, spec.backend)
        (result,) = results
        if out is not None:
            return delivered([result] * len(out), out, spec.backend)
        return (result, *(spec.backend.copy(result, device) for device in spec.destinations[1:]))


def _array(window: NDArray[np.uint8], start: int, length: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    return window[start : start + length * dtype.itemsize].view(dtype)
