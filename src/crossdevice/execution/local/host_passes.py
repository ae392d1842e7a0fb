"""The part of a batch that shares the host's memory: its plans, lowered to fused passes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crossdevice.backends.host_memory import address_range
from crossdevice.backends.protocol import Array, Backend, dtype_named
from crossdevice.execution.local.passes import LeafRange, Passes, Results, in_sequence
from crossdevice.execution.reading.leaf_spec import Columns, LeafSpec, Out, Outs
from crossdevice.execution.tracing import Work, flight_recorder, now
from crossdevice.kernels.host.fused_pass import bound_batch, fused_batch, fused_pass, repeated_pass
from crossdevice.kernels.host.resources.pool import SMALLEST_POOLED_BYTES, result_pool
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
        self._small_pass: Callable[[Any, Any], None] | None = None

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

    @property
    def is_alone(self) -> bool:
        """Whether there is a single leaf in a single pass."""
        return len(self._specs) == 1 and [len(tasks) for tasks in self._passes.values()] == [1]

    def run_alone(
        self, arrays: Sequence[Array], out: Out, weights: Weights | None, *, are_flat: bool
    ) -> tuple[Array, ...]:
        """The short way for a single leaf in a single pass, where small calls spend their time."""
        if are_flat and out is None and weights is None and self._small_results is not None:
            results = tuple(map(np.empty, *self._small_results))
            if self._small_pass is None:
                self._small_pass = repeated_pass(arrays, results, next(iter(self._passes)))
            self._small_pass(arrays, results)
            return results
        ((recipe, (task,)),) = self._passes.items()
        size, spec, dtype = task.stop, self._specs[0], self._dtypes[0]
        views = arrays if are_flat else list(map(spec.backend.host_view, arrays))
        if out is None:
            num_results = 1 if self._shares[0] else len(spec.destinations)
            # A library that adopts memory does so only where that starts on a line.
            flats = result_pool.empty_batch([(size, dtype)] * num_results, on_lines=spec.backend.is_immutable)
        else:
            # In place, the inputs' views are the outputs': no second look at each array.
            flats = list(views) if out is arrays else list(map(spec.backend.host_view, out))
        fused_pass(views, flats, recipe.with_weights(weights))
        return self._adopted(0, flats, out)

    @functools.cached_property
    def _small_results(self) -> tuple[list[tuple[int, ...]], list[np.dtype[Any]]] | None:
        """The shapes and dtypes of a single leaf's results, if each has small memory of its own."""
        spec, dtype, number = self._specs[0], self._dtypes[0], len(self._specs[0].destinations)
        if self._shares[0] or spec.num_elements * dtype.itemsize * number >= SMALLEST_POOLED_BYTES:
            return None
        return [spec.shape] * number, [dtype] * number

    def bound(self, columns: Columns, outs: Columns, weights: Weights | None = None) -> Callable[[], Any]:
        """A function that reduces these arrays into those of `outs` whenever it is called."""
        inputs = {n: list(map(spec.backend.host_view, columns[n])) for n, spec in self._specs.items()}
        outputs = {n: list(map(spec.backend.host_view, outs[n])) for n, spec in self._specs.items()}
        if self._read_twice or not all(
            _is_view_of(view, array, spec.backend)
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


def _is_view_of(view: NDArray[Any], array: Array, backend: Backend) -> bool:
    """Whether a host view is the array's own memory, not a copy."""
    start, end = backend.address_range(array)
    return start <= address_range(view)[0] < end or start == end


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
