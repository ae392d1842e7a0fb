"""The part of a batch that shares the host's memory: its plans, lowered to fused passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from crossdevice.backends.protocol import Array, Backend, dtype_named
from crossdevice.execution.leaf_spec import LeafSpec
from crossdevice.execution.lowering import lower
from crossdevice.kernels.host.fused_pass import fused_batch, fused_pass
from crossdevice.kernels.host.pool import SMALLEST_POOLED_BYTES, result_pool
from crossdevice.kernels.host.recipe import Recipe
from crossdevice.plans.packing import Pack
from crossdevice.plans.plan import Plan


class Task(NamedTuple):
    """Elements `start` to `stop` of a leaf, in one fused pass to these of its outputs."""

    leaf: int
    start: int
    stop: int
    outputs: tuple[int, ...]


class FusedPasses:
    """Passes over leaves in host memory, prepared before there are arrays.

    With `shares_results` all destinations of a leaf get one array, which NumPy then marks read-only.
    """

    def __init__(
        self, specs: Mapping[int, LeafSpec], dtypes: Mapping[int, str], *, shares_results: bool
    ) -> None:
        self._specs = specs
        self._dtypes = {number: dtype_named(name) for number, name in dtypes.items()}
        self._shares_results = shares_results
        self._passes: dict[Recipe, list[Task]] = {}

    def add_leaf(self, number: int, recipe: Recipe) -> None:
        """A whole leaf in one pass, its replicas in order."""
        spec = self._specs[number]
        self._add(Task(number, 0, spec.num_elements, tuple(range(len(spec.destinations)))), recipe)

    def add_pack(self, pack: Pack, plan: Plan, recipe: Recipe) -> None:
        """A pack in the order of its plan: the plan's pieces, mapped to ranges of the leaves in the pack."""
        offset = 0
        pieces = lower(plan)
        for segment in pack:
            length = segment.stop - segment.start
            shift = segment.start - offset
            for piece in pieces:
                start, stop = max(piece.start, offset), min(piece.stop, offset + length)
                if start < stop:
                    task = Task(segment.item, start + shift, stop + shift, piece.outputs)
                    self._add(task, recipe._replace(order=piece.order))
            offset += length

    def run(
        self, columns: Sequence[Sequence[Array]], outs: Sequence[Sequence[Array] | None]
    ) -> dict[int, tuple[Array, ...]]:
        """The results of each leaf, in new memory or in `outs`."""
        if len(self._specs) == 1 and outs[0] is None:
            only = self._run_alone(columns[0])
            if only is not None:
                return {0: only}
        inputs = {
            number: [spec.backend.host_view(array) for array in columns[number]]
            for number, spec in self._specs.items()
        }
        outputs = self._outputs(outs)
        for recipe, tasks in self._passes.items():
            fused_batch(
                [
                    (
                        [array[start:stop] for array in inputs[leaf]],
                        [outputs[leaf][position][start:stop] for position in positions],
                    )
                    for leaf, start, stop, positions in tasks
                ],
                recipe,
            )
        return {number: self._adopted(number, flats, outs[number]) for number, flats in outputs.items()}

    def _run_alone(self, arrays: Sequence[Array]) -> tuple[Array, ...] | None:
        """The short way for a single leaf in a single pass, where small calls spend their time."""
        if len(self._passes) != 1 or 0 not in self._specs:
            return None
        ((recipe, tasks),) = self._passes.items()
        if len(tasks) != 1:
            return None
        spec = self._specs[0]
        num_results = 1 if self._shares_results else len(spec.destinations)
        size, dtype = tasks[0].stop, self._dtypes[0]
        empty = np.empty if size * dtype.itemsize < SMALLEST_POOLED_BYTES else result_pool.empty
        flats = [empty(size, dtype) for _ in range(num_results)]
        fused_pass([spec.backend.host_view(array) for array in arrays], flats, recipe)
        return self._adopted(0, flats, None)

    def _add(self, task: Task, recipe: Recipe) -> None:
        if self._shares_results:
            task = task._replace(outputs=(0,) if 0 in task.outputs else ())
        if task.outputs:
            self._passes.setdefault(recipe, []).append(task)

    def _outputs(self, outs: Sequence[Sequence[Array] | None]) -> dict[int, list[NDArray[Any]]]:
        outputs: dict[int, list[NDArray[Any]]] = {}
        wanted: list[tuple[int, tuple[int, np.dtype[Any]]]] = []
        for number, spec in self._specs.items():
            out = outs[number]
            if out is None:
                num_results = 1 if self._shares_results else len(spec.destinations)
                wanted += [(number, (spec.num_elements, self._dtypes[number]))] * num_results
            else:
                outputs[number] = [_written(spec.backend, array) for array in out]
        made = result_pool.empty_batch([size for _, size in wanted])
        for (number, _), flat in zip(wanted, made, strict=True):
            outputs.setdefault(number, []).append(flat)
        return outputs

    def _adopted(
        self, number: int, flats: Sequence[NDArray[Any]], out: Sequence[Array] | None
    ) -> tuple[Array, ...]:
        spec = self._specs[number]
        backend = spec.backend
        if out is not None:
            return tuple(out)
        if self._shares_results:
            shared = [backend.from_host(flats[0], spec.shape, device) for device in spec.destinations]
            return tuple(map(backend.read_only, shared))
        return tuple(map(backend.from_host, flats, repeat(spec.shape), spec.destinations))


def _written(backend: Backend, out: Array) -> NDArray[Any]:
    view = backend.writable_view(out)
    assert view is not None, "outs are checked before they get here"
    return view
