"""Dense leaves on the host, reduced over all ranks of a group: their arrays, and where results go."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from crossdevice.backends.protocol import HOST_MEMORY, Array, dtype_named
from crossdevice.errors import OutError
from crossdevice.execution.processes.programs import (
    SMALL_TASKS_BYTES,
    Delivery,
    Flat,
    PrepareProgram,
    Program,
    SmallArrays,
)
from crossdevice.execution.processes.reduced_batch import LeafParts, ReducedBatch
from crossdevice.execution.processes.verifying import OwnResult, Verification
from crossdevice.execution.reading.leaf_spec import Columns, LeafSpec, Outs
from crossdevice.execution.reading.outputs import delivered, written_view
from crossdevice.execution.reading.shards import array_of_rows
from crossdevice.execution.tracing import Work, flight_recorder, now
from crossdevice.kernels.host.fused_pass import bound_batch, fused_batch, fused_pass, repeated_pass
from crossdevice.kernels.host.resources.pool import result_pool
from crossdevice.plans.tasks import ReducedLeaf, TaskPlan, aligned
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.values.quantities import counted
from crossdevice.values.recipe import COPYING
from crossdevice.values.weights import Weights

COPIED_OUT_BYTES = 32 << 10
"""Up to here results are copied to `out` when nothing can fail any more."""

EXPLAINED_TASKS = 3
"""So many tasks of each pack are shown to people."""


class _Pack(NamedTuple):
    """Leaves that travel together, and the program that makes their results."""

    leaves: Sequence[ReducedLeaf]
    program: Program

    @property
    def num_elements(self) -> int:
        """Elements of the results of all leaves, each from a cache line on."""
        return sum([aligned(leaf.length) for leaf in self.leaves[:-1]]) + self.leaves[-1].length


class HostReduction:
    """Everything about a batch of dense leaves that does not depend on their elements."""

    is_whole = True
    """True if every rank gets all of each result."""

    def __init__(self, batch: ReducedBatch, prepare: PrepareProgram) -> None:
        """`prepare` is the transport's."""
        specs, group = batch.specs, batch.group
        self._specs, self._rank = specs, group.rank
        self._shares = [batch.options.share_results or spec.backend.is_immutable for spec in specs]
        self._dtypes = list(map(dtype_named, batch.dtypes))
        self._packs = [
            _Pack(pack, prepare(functools.partial(batch.plan, pack), pack, group, batch.devices))
            for pack in batch.packs()
        ]
        self._combining = Work("reduce", "by every process", batch.devices, batch.num_bytes)
        self._small: SmallReduction | None = None
        if batch.parts is None and len(specs) == 1 and specs[0].shares_host_memory:
            self._small = self._small_reduction()

    @property
    def plans(self) -> list[TaskPlan]:
        """The tasks of each pack."""
        return [pack.program.plan for pack in self._packs]

    def run(self, call: GroupCall, columns: Columns, outs: Outs, weights: Weights | None = None) -> Delivery:
        """Exchanges everything with the other ranks; `outs` are written to by whoever calls the delivery.

        Only a large `out` that no input is in comes to hold its result before: should a rank be lost
        meanwhile, all inputs are still there.
        """
        if self._small is not None and call.hops is None:
            return self._small.run(call, columns, outs, weights)
        flats: dict[int, list[Flat]] = {}
        for pack in self._packs:
            first = pack.leaves[0]
            inputs = {leaf.number: self._views(leaf.number, columns, leaf.dtype) for leaf in pack.leaves}
            direct = self._direct_targets(pack, columns, outs[first.number])
            if direct:
                flats[first.number] = []
                pack.program.run(call, inputs, {(first.number, 0): direct}, weights)
                continue
            result = dtype_named(first.result)
            total = result_pool.empty(pack.num_elements, result)
            results: dict[tuple[int, int], list[Flat]] = {}
            start = 0
            for number, length, *_ in pack.leaves:
                whole = total[start : start + length].view(self._dtypes[number])
                flats[number] = [whole] if outs[number] is not None else self._flats(number, whole)
                copies = [flat.view(result) for flat in flats[number] if flat is not whole]
                results[number, 0] = [total[start : start + length], *copies]
                start += aligned(length)
            pack.program.run(call, inputs, results, weights)
        return lambda: [
            self._adopted(leaf, flats[leaf]) if out is None else self._written(leaf, flats[leaf], out)
            for leaf, out in enumerate(outs)
        ]

    def writes_directly(self, columns: Columns, out: Sequence[Array] | None) -> bool:
        """Returns True if `out` of the only leaf comes to hold its result before all ranks have theirs."""
        return bool(self._direct_targets(self._packs[0], columns, out))

    def run_verified(
        self,
        call: GroupCall,
        verification: Verification,
        path: str,
        columns: Columns,
        outs: Outs,
        weights: Weights | None,
    ) -> tuple[Array, ...]:
        """Reduces the only leaf, and has its results checked."""
        ((leaf,), program) = self._packs[0]
        verification.begin_leaf(path, leaf, program.plan)
        (results,) = self.run(call, columns, outs, weights)()
        views = self._views(0, columns, leaf.dtype)
        reals = leaf.length // max(self._specs[0].num_elements, 1)  # two of a complex number
        own = [
            OwnResult(start * reals, flat.view(dtype_named(leaf.result)))
            for start, flat in self._own_results(results)
        ]
        verification.check_leaf(path, leaf, views, own, weights)
        if self.is_whole:
            verification.note_results(path, program.plan, own, results)
        return results

    def _own_results(self, results: Sequence[Array]) -> list[tuple[int, Flat]]:
        """Returns the results of this rank for the only leaf, each with the number of its first element."""
        return [(0, self._specs[0].backend.to_host(results[0]))]

    def repeated(self) -> Callable[[GroupCall, Columns, Outs, Weights | None], Delivery]:
        """As `run`, or a shorter way to do it, for calls like this one."""
        return (self._small or self).run

    def bound(self, columns: Columns, outs: Columns) -> Callable[[GroupCall], None]:
        """A function that reduces these arrays into those of `outs` in a call, whenever it is called."""
        if self._small is not None and self._small.is_in_shared_memory:
            return self._small.bound(columns[0], outs[0])

        def run(call: GroupCall) -> None:
            self.run(call, columns, outs)()

        return run

    def explained(self) -> Iterator[str]:
        """Describes what this process does for each pack, and its first tasks."""
        for number, (leaves, program) in enumerate(self._packs):
            dtype = leaves[0].dtype
            yield f"pack {number} ({counted(len(leaves), 'value')} of {dtype}): {program.explained()}"
            yield from [f"  {line}" for line in program.plan.rendered(self._rank, EXPLAINED_TASKS)]

    def _small_reduction(self) -> SmallReduction | None:
        """The reduction of the only leaf if it is so small that every rank combines everything."""
        ((leaf,), program) = self._packs[0]
        arrays = program.small_arrays() if leaf.partial is None and leaf.length else None
        if arrays is None:
            return None
        return SmallReduction(
            leaf,
            arrays,
            self._specs[0],
            self._dtypes[0],
            shares_results=self._shares[0],
            work=self._combining,
        )

    def _views(self, leaf: int, columns: Columns, dtype: str) -> list[Flat]:
        """The leaf's replicas on the host, flat, in the dtype in which they are combined."""
        spec, element = self._specs[leaf], dtype_named(dtype)
        backend = spec.backend
        if spec.shares_host_memory:
            views = [backend.host_view(array) for array in columns[leaf]]
        else:
            views = [
                backend.host_view(array)
                if backend.memory_of(device) == HOST_MEMORY
                else backend.to_host(array)
                for array, device in zip(columns[leaf], spec.devices, strict=True)
            ]
        return [view if view.dtype == element else view.view(element) for view in views]

    # ---------------------------------------------------------------- results

    def _flats(self, leaf: int, whole: Flat) -> list[Flat]:
        """For each destination the host memory its result is to be in: the whole's own where it can be."""
        spec = self._specs[leaf]
        if len(spec.destinations) == 1:
            return [whole]
        is_host = [spec.backend.memory_of(device) == HOST_MEMORY for device in spec.destinations]
        if self._shares[leaf]:
            return [whole] * len(is_host)
        # The first host destination keeps the memory the result arrives in, others there get copies of it;
        # what goes to a GPU is copied from it later, so it needs none of its own.
        new = iter(result_pool.empty_batch([(whole.size, whole.dtype)] * (sum(is_host) - 1)))
        keeper = is_host.index(True) if any(is_host) else -1
        return [next(new) if here and number != keeper else whole for number, here in enumerate(is_host)]

    def _adopted(self, leaf: int, flats: Sequence[Flat]) -> tuple[Array, ...]:
        """New arrays on each destination."""
        return self._specs[leaf].adopted(flats, is_shared=self._shares[leaf])

    def _direct_targets(self, pack: _Pack, columns: Columns, out: Sequence[Array] | None) -> list[Flat]:
        """The host memory of `out` in which a pack's only leaf can be received; none if it must be copied."""
        if (
            out is None
            or pack.leaves[0].length * dtype_named(pack.leaves[0].result).itemsize <= COPIED_OUT_BYTES
            or len(pack.leaves) > 1
        ):
            return []
        spec = self._specs[pack.leaves[0].number]
        if any(spec.backend.memory_of(device) != HOST_MEMORY for device in spec.destinations):
            return []
        targets = [written_view(spec.backend, array) for array in out]
        inputs = [
            each.backend.host_view(array)
            for each, arrays in zip(self._specs, columns, strict=True)
            for array, device in zip(arrays, each.devices, strict=True)
            if each.backend.memory_of(device) == HOST_MEMORY
        ]
        if any(np.may_share_memory(target, array) for target in targets for array in inputs):
            return []
        return [target.view(dtype_named(pack.leaves[0].result)) for target in targets]

    def _written(self, leaf: int, flats: Sequence[Flat], out: Sequence[Array]) -> tuple[Array, ...]:
        """The arrays of `out`, with the result in them; it is there already if there are no `flats`."""
        spec = self._specs[leaf]
        backend = spec.backend
        if not flats:
            backend.mark_written(tuple(out))
            return tuple(out)
        whole = flats[0]
        on_host = [backend.memory_of(device) == HOST_MEMORY for device in spec.destinations]
        targets = [written_view(backend, array) for array, here in zip(out, on_host, strict=True) if here]
        if whole.nbytes < SMALL_TASKS_BYTES:
            for target in targets:
                target[:] = whole
        elif targets:
            fused_batch([([whole], targets)], COPYING)
        for array, here, device in zip(out, on_host, spec.destinations, strict=True):
            if here:
                backend.mark_written((array,))
            else:
                backend.write(array, backend.from_host(whole, spec.shape, device))
        return tuple(out)


class HostReduceScatter(HostReduction):
    """A reduction of dense leaves of which every replica of every rank gets its own part."""

    is_whole = False

    def __init__(self, batch: ReducedBatch, prepare: PrepareProgram) -> None:
        super().__init__(batch, prepare)
        assert batch.parts is not None
        self._parts = batch.parts

    def writes_directly(self, columns: Columns, out: Sequence[Array] | None) -> bool:  # noqa: ARG002
        """False: parts are put where they are to be when all ranks have theirs."""
        return False

    def run(self, call: GroupCall, columns: Columns, outs: Outs, weights: Weights | None = None) -> Delivery:
        """Exchanges everything with the other ranks; `outs` are written to by whoever calls the delivery."""
        made = [
            [result_pool.empty(stop - start, dtype) for start, stop in leaf.own_ranges]
            for leaf, dtype in zip(self._parts, self._dtypes, strict=True)
        ]
        for leaves, program in self._packs:
            inputs = {leaf.number: self._views(leaf.number, columns, leaf.dtype) for leaf in leaves}
            results = {
                (leaf.number, replica): [part.view(dtype_named(leaf.result))]
                for leaf in leaves
                for replica, part in enumerate(made[leaf.number])
            }
            program.run(call, inputs, results, weights)
        return lambda: [
            delivered(_placed(leaf, flats), out, leaf.spec.backend)
            for leaf, flats, out in zip(self._parts, made, outs, strict=True)
        ]

    def _views(self, leaf: int, columns: Columns, dtype: str) -> list[Flat]:
        views, axis = super()._views(leaf, columns, dtype), self._parts[leaf].axis
        if axis == 0:
            return views
        shape = self._specs[leaf].shape
        # One or, of a complex number, two of the tasks' elements stand for one of the array's.
        shape = (*shape, views[0].size // max(math.prod(shape), 1))
        return [np.moveaxis(view.reshape(shape), axis, 0).reshape(-1) for view in views]

    def _own_results(self, results: Sequence[Array]) -> list[tuple[int, Flat]]:
        (leaf,) = self._parts
        found = []
        for (start, _), rows, array in zip(leaf.own_ranges, leaf.own_rows, results, strict=True):
            flat = leaf.spec.backend.to_host(array)
            if leaf.axis:
                length, *rest = rows
                shape = (*rest[: leaf.axis], length, *rest[leaf.axis :])
                flat = np.moveaxis(flat.reshape(shape), leaf.axis, 0).reshape(-1)
            found.append((start, flat))
        return found


def _placed(leaf: LeafParts, flats: Sequence[Flat]) -> list[Array]:
    """Parts as arrays on the devices of their replicas."""
    backend, devices = leaf.spec.backend, leaf.spec.destinations
    return [
        array_of_rows(flat, shape, leaf.axis, backend, device)
        for flat, shape, device in zip(flats, leaf.own_rows, devices, strict=True)
    ]


class SmallReduction:
    """Everything but the arrays, laid out before: NumPy copies them as they are, and a kernel finds them.

    After arrival nothing can fail, so `outs` is written at once.
    """

    def __init__(
        self,
        leaf: ReducedLeaf,
        arrays: SmallArrays,
        spec: LeafSpec,
        result: np.dtype[Any],
        *,
        shares_results: bool,
        work: Work,
    ) -> None:
        """`result` is the dtype of results, and `work` what is recorded."""
        self._shared, self._of_ranks = arrays.shared, arrays.of_ranks
        self._spec, self._result, self._work = spec, result, work
        self._recipe, self._written = leaf.of_ranks, dtype_named(leaf.result)
        self._shares_results = shares_results
        self._num_results = 1 if shares_results else len(spec.destinations)
        is_numpy = spec.backend.name == "numpy"
        self._dtype, self._brings_arrays = dtype_named(spec.dtype), is_numpy
        self._writes_arrays = is_numpy and result == self._written
        self._shape = spec.shape if is_numpy else (spec.num_elements,)
        self._own = [
            [buffer.view(self._dtype).reshape(self._shape) for buffer in buffers] for buffers in arrays.own
        ]
        self._inputs = [tuple(inputs) for inputs in arrays.inputs]

    @property
    def is_in_shared_memory(self) -> bool:
        """True if arrays are shown in shared memory."""
        return self._shared is not None

    def run(self, call: GroupCall, columns: Columns, outs: Outs, weights: Weights | None = None) -> Delivery:
        """As `HostReduction.run`, but `outs` have their results already."""
        (arrays,), (out,) = columns, outs
        shared = self._shared
        parity = 0 if shared is None else shared.steps.parity
        started = now()
        try:
            own = self._own[parity]
            for buffer, array in zip(own, arrays, strict=True):
                buffer[...] = array if self._brings_arrays else self._host_view(array)
            if shared is None:
                call.all_gather_into(self._of_ranks)
            else:
                if shared.on_shown is not None:
                    self._tell_of(own)
                call.step()
            combine = self._combine if weights is None else self._combine_with(weights)
            if out is None:
                flats = [np.empty(self._shape, self._result) for _ in range(self._num_results)]
                targets = flats if self._writes_arrays else [self._as_written(flat) for flat in flats]
                combine(self._inputs[parity], tuple(targets))
            else:
                combine(self._inputs[parity], self._targets(out))
        except OutError as error:  # it has become read-only: the call is done all the same
            return functools.partial(refuse, error)
        except BaseException as error:
            flight_recorder.events.append((self._work, started, now(), 1))
            flight_recorder.dump_after(error)
            raise
        flight_recorder.events.append((self._work, started, now(), 1))
        if out is not None:
            if self._spec.backend.counts_writes:
                self._spec.backend.mark_written(out)
            return lambda: [tuple(out)]
        if self._shares_results:
            flats *= len(self._spec.destinations)
        return lambda: [self._spec.adopted(flats, is_shared=self._shares_results)]

    def bound(self, arrays: Sequence[Array], out: Sequence[Array]) -> Callable[[GroupCall], None]:
        """A function that reduces these arrays into those of `out` in a call, whenever it is called."""
        shared, written, backend = self._shared, tuple(out), self._spec.backend
        assert shared is not None, "elsewhere `run` is as short"
        views = [array if self._brings_arrays else self._host_view(array) for array in arrays]
        copies = [list(zip(own, views, strict=True)) for own in self._own]
        targets = [self._as_written(written_view(backend, array)) for array in written]
        passes = [bound_batch([(inputs, targets)], self._recipe) for inputs in self._inputs]
        steps = shared.steps

        def reduce(call: GroupCall) -> None:
            started, parity = now(), steps.parity
            for buffer, view in copies[parity]:
                buffer[...] = view
            if shared.on_shown is not None:
                self._tell_of(self._own[parity])
            call.step()
            # An input in `out` is written to when all have come: nothing can fail any more.
            for work in passes[parity]:
                work()
            if backend.counts_writes:
                backend.mark_written(written)
            flight_recorder.events.append((self._work, started, now(), 1))

        return reduce

    def _tell_of(self, shown: Sequence[Flat]) -> None:
        """Calls `on_shown` with what others are about to read."""
        assert self._shared is not None
        assert self._shared.on_shown is not None
        for array in shown:
            self._shared.on_shown(array)

    @functools.cached_property
    def _combine(self) -> Callable[[Any, Any], None]:
        results = [np.empty(self._inputs[0][0].size, self._written)] * self._num_results
        return repeated_pass(self._inputs[0], results, self._recipe)

    def _combine_with(self, weights: Weights) -> Callable[[Any, Any], None]:
        return functools.partial(fused_pass, recipe=self._recipe.with_weights(weights))

    def _host_view(self, array: Array) -> Flat:
        return self._spec.backend.host_view(array).view(self._dtype)

    def _targets(self, out: Sequence[Array]) -> tuple[Flat, ...]:
        """The memory of `out`, which a kernel writes to without asking."""
        if self._writes_arrays:
            for array in out:
                if not array.flags.writeable:
                    break
            else:
                return tuple(out)
        return tuple(self._as_written(written_view(self._spec.backend, array)) for array in out)

    def _as_written(self, array: Flat) -> Flat:
        # NumPy gives arrays without axes no view of another size.
        return array.reshape(-1).view(self._written)


def refuse(error: OutError) -> list[tuple[Array, ...]]:
    """Raises the error, where results would be delivered."""
    raise error
