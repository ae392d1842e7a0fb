"""The part of a batch that shares the host's memory: its plans, lowered to fused passes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crossdevice.backends.protocol import Array, Backend, dtype_named
from crossdevice.execution.local.passes import LeafRange, Passes, Results, in_sequence, is_view_of
from crossdevice.execution.reading.leaf_spec import Columns, LeafSpec, Out, Outs
from crossdevice.execution.tracing import Work, flight_recorder, now
from crossdevice.kernels.host.fused_pass import (
    AddressTable,
    PassLayout,
    Pointers,
    RepeatedPasses,
    bound_batch,
    fused_batch,
    fused_pass,
    give_back,
    pointers_of,
)
from crossdevice.kernels.host.resources.pool import (
    SMALLEST_POOLED_BYTES,
    SMALLEST_SHARING_BYTES,
    result_pool,
)
from crossdevice.values.device import host_device
from crossdevice.values.recipe import Recipe
from crossdevice.values.weights import Weights


class HostPasses(Passes):
    """Passes over leaves in host memory, prepared before there are arrays.

    With `shares_results`, and always where arrays are immutable, all destinations of a leaf get one
    memory; NumPy marks it read-only.
    """

    def __init__(
        self, specs: Mapping[int, LeafSpec], dtypes: Mapping[int, str], *, shares_results: bool
    ) -> None:
        super().__init__(specs)
        self._dtypes = {number: dtype_named(name) for number, name in dtypes.items()}
        self._shares = {number: shares_results or spec.backend.is_immutable for number, spec in specs.items()}
        devices = tuple(dict.fromkeys(device for spec in specs.values() for device in spec.devices))
        self._packing = Work("pack", "views of inputs, memory for results", devices)
        self._reducing = Work("reduce", "fused passes", devices)
        self._unpacking = Work("unpack", "results as arrays", devices)

    def run(self, columns: Columns, outs: Outs, weights: Weights | None = None) -> Results:
        """The results of each leaf, in new memory or in `outs`.

        `outs` were checked in this call, so views of them are not copies, and can be written to.
        """
        started = now()
        inputs = {
            number: list(map(spec.backend.host_view, columns[number])) for number, spec in self._specs.items()
        }
        outputs = self._outputs(columns, outs, inputs)
        packed = now()
        for recipe, tasks in self._passes.items():
            arrays = [made for task in tasks for made in _arrays_of(task, inputs, outputs)]
            fused_batch(arrays, recipe.with_weights(weights))
        reduced = now()
        adopted = {number: self._adopted(number, flats, outs[number]) for number, flats in outputs.items()}
        if self._specs:
            record = flight_recorder.events.append
            record((self._packing, started, packed, 1))
            record((self._reducing, packed, reduced, 1))
            record((self._unpacking, reduced, now(), 1))
        return adopted

    def flat_passes(self, work: Work) -> FlatPasses | None:
        """The same passes over arrays that kernels read where they are; None where that cannot be."""
        backends = {spec.backend for spec in self._specs.values()}
        if len(backends) != 1 or self._read_twice or any(self._shares.values()):
            return None
        specs = [self._specs[number] for number in range(len(self._specs))]
        try:
            return FlatPasses(backends.pop(), specs, self._dtypes, self._passes, work)
        except LookupError:  # no kernels
            return None

    @property
    def is_alone(self) -> bool:
        """True for a single leaf in a single pass."""
        return len(self._specs) == 1 and [len(tasks) for tasks in self._passes.values()] == [1]

    def run_alone(self, arrays: Sequence[Array], out: Out, weights: Weights | None) -> tuple[Array, ...]:
        """The short way for a single leaf in a single pass."""
        ((recipe, (task,)),) = self._passes.items()
        size, spec, dtype = task.stop, self._specs[0], self._dtypes[0]
        views = list(map(spec.backend.host_view, arrays))
        if out is None:
            num_results = 1 if self._shares[0] else len(spec.destinations)
            # A library that adopts memory does so only where that starts on a line.
            flats = result_pool.empty_batch([(size, dtype)] * num_results, on_lines=spec.backend.is_immutable)
        else:
            # In place, the inputs' views are the outputs': no second look at each array.
            flats = views if out is arrays else list(map(spec.backend.host_view, out))
        fused_pass(views, flats, recipe.with_weights(weights))
        return self._adopted(0, flats, out)

    def bound(self, columns: Columns, outs: Columns, weights: Weights | None = None) -> Callable[[], Any]:
        """A function that reduces these arrays into those of `outs` whenever it is called."""
        inputs = {n: list(map(spec.backend.host_view, columns[n])) for n, spec in self._specs.items()}
        outputs = {n: list(map(spec.backend.host_view, outs[n])) for n, spec in self._specs.items()}
        if self._read_twice or not all(
            is_view_of(view, array, spec.backend)
            for number, spec in self._specs.items()
            for view, array in zip(inputs[number], columns[number], strict=True)
        ):
            # Some inputs are read through copies, which have to be made again in each call.
            return functools.partial(self.run, columns, outs, weights)
        works = [
            work
            for recipe, tasks in self._passes.items()
            for work in bound_batch(
                [made for task in tasks for made in _arrays_of(task, inputs, outputs)],
                recipe.with_weights(weights),
            )
        ]
        counted: dict[Backend, list[Array]] = {}
        for number, spec in self._specs.items():
            if spec.backend.counts_writes:
                counted.setdefault(spec.backend, []).extend(outs[number])
        works += [functools.partial(backend.mark_written, arrays) for backend, arrays in counted.items()]
        return in_sequence(works)

    def _outputs(
        self, columns: Columns, outs: Outs, inputs: Mapping[int, list[NDArray[Any]]]
    ) -> dict[int, list[NDArray[Any]]]:
        outputs: dict[int, list[NDArray[Any]]] = {}
        wanted: list[tuple[int, tuple[int, np.dtype[Any]]]] = []
        for number, spec in self._specs.items():
            out = outs[number]
            if out is None or number in self._read_twice:
                num_results = 1 if self._shares[number] else len(spec.destinations)
                wanted += [(number, (spec.num_elements, self._dtypes[number]))] * num_results
            else:
                outputs[number] = (
                    inputs[number] if out is columns[number] else list(map(spec.backend.host_view, out))
                )
        adopts = any(self._specs[number].backend.is_immutable for number, _ in wanted)
        made = result_pool.empty_batch([size for _, size in wanted], on_lines=adopts)
        for (number, _), flat in zip(wanted, made, strict=True):
            outputs.setdefault(number, []).append(flat)
        return outputs

    def _adopted(self, number: int, flats: Sequence[NDArray[Any]], out: Out) -> tuple[Array, ...]:
        spec = self._specs[number]
        backend = spec.backend
        if out is not None:
            if number in self._read_twice:
                for target, flat in zip(out, flats, strict=True):
                    backend.host_view(target)[:] = flat
            backend.mark_written(out)
            return tuple(out)
        if self._shares[number]:
            flats = [flats[0]] * len(spec.destinations)
        return spec.adopted(flats, is_shared=self._shares[number])


class FlatPasses:
    """Passes over all leaves of a batch, laid out once for arrays that kernels read where they are.

    Arrays come in one tuple, leaf by leaf, with one for each replica; outputs and results likewise.
    """

    def __init__(
        self,
        backend: Backend,
        specs: Sequence[LeafSpec],
        dtypes: Mapping[int, np.dtype[Any]],
        passes: Mapping[Recipe, Sequence[LeafRange]],
        work: Work,
    ) -> None:
        """Raises LookupError if no kernel does one of the passes."""
        self._backend, self._work = backend, work
        first_input = [0, *itertools.accumulate(len(spec.devices) for spec in specs)]
        first_output = [0, *itertools.accumulate(len(spec.destinations) for spec in specs)]
        groups: dict[tuple[Recipe, np.dtype[Any], np.dtype[Any]], list[PassLayout]] = {}
        for recipe, tasks in passes.items():
            for leaf, start, stop, positions in tasks:
                layout = PassLayout(
                    range(first_input[leaf], first_input[leaf + 1]),
                    [first_output[leaf] + position for position in positions],
                    start,
                    stop,
                )
                key = recipe, dtype_named(specs[leaf].dtype), dtypes[leaf]
                groups.setdefault(key, []).append(layout)
        self._passes = [
            RepeatedPasses(layouts, recipe, dtype, into) for (recipe, dtype, into), layouts in groups.items()
        ]
        wanted = [(spec, dtypes[leaf]) for leaf, spec in enumerate(specs) for _ in spec.destinations]
        self._shapes, self._dtypes = [spec.shape for spec, _ in wanted], [dtype for _, dtype in wanted]
        self._sizes = [(spec.num_elements, dtype) for spec, dtype in wanted]
        lengths = [size * dtype.itemsize for size, dtype in self._sizes]
        self._are_small = sum(lengths) < SMALLEST_POOLED_BYTES or max(lengths) < SMALLEST_SHARING_BYTES

    def run(
        self,
        inputs: tuple[Array, ...],
        outs: tuple[Array, ...] | None,
        weights: Weights | None,
        pointers: Pointers | None = None,
    ) -> tuple[Array, ...] | None:
        """The results of all leaves, in new memory or in `outs`; None if kernels cannot read some array.

        `pointers` are those to inputs and then to `outs`, which have been announced, if they are known; in
        place, those to inputs serve for both.
        """
        started = now()
        backend, first_written = self._backend, 0
        written: Pointers | None
        if outs is None:
            read = pointers_of(backend.pointers_to(inputs))
            if self._are_small:
                memory = tuple(map(np.empty, self._shapes, self._dtypes))
            else:
                flats = result_pool.empty_batch(self._sizes)
                memory = tuple(map(np.ndarray.reshape, flats, self._shapes))
            written, results = memory, backend.adopted(memory)
        else:
            if pointers is None and backend.announce_write(outs):
                pointers = pointers_of(backend.pointers_to(inputs + outs))
            read = written = pointers
            first_written, results = 0 if outs is inputs else len(inputs), outs
        if read is None or written is None:
            return None
        packed = now()
        try:
            for passes in self._passes:
                passes(read, written, first_written, weights, backend, inputs, results)
        except Exception as error:
            flight_recorder.events.append((self._work, started, now(), 1))
            flight_recorder.dump_after(error)
            raise
        if type(read) is AddressTable:
            give_back(read)
        stopped = now()
        if len(inputs) > MANY_ARRAYS:
            flight_recorder.events.append((_MEMORY, started, packed, 1))
            flight_recorder.events.append((_REDUCING, packed, stopped, 1))
        flight_recorder.events.append((self._work, started, stopped, 1))
        return results


MANY_ARRAYS = 64
"""Above this, a trace shows what a call spends on memory, and what on its passes."""

_MEMORY = Work("pack", "memory for results", (host_device(0),))
_REDUCING = Work("reduce", "fused passes", (host_device(0),))


def _arrays_of(
    task: LeafRange, inputs: Mapping[int, list[NDArray[Any]]], outputs: Mapping[int, list[NDArray[Any]]]
) -> Iterator[tuple[list[NDArray[Any]], list[NDArray[Any]]]]:
    """A task's ranges of inputs and outputs; nothing if it only writes to results that share another's."""
    leaf, start, stop, positions = task
    flats = outputs[leaf]
    if stop - start == flats[0].size and len(positions) >= len(flats):
        yield inputs[leaf], flats
        return
    written = [flats[position][start:stop] for position in positions if position < len(flats)]
    if written:
        yield [array[start:stop] for array in inputs[leaf]], written
