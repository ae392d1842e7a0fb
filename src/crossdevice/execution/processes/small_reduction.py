"""A small leaf that every rank combines itself: one exchange, or one step in shared memory, and one pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crossdevice.backends.protocol import Array, dtype_named
from crossdevice.errors import OutError
from crossdevice.execution.processes.packs import ProcessPack
from crossdevice.execution.processes.shared_reduction import SharedPack
from crossdevice.execution.processes.travelling import Delivery
from crossdevice.execution.reading.leaf_spec import Columns, LeafSpec, Outs
from crossdevice.execution.reading.outputs import written_view
from crossdevice.execution.tracing import Work, flight_recorder, now
from crossdevice.kernels.host.fused_pass import fused_pass, repeated_pass
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.values.weights import Weights

Flat = NDArray[Any]


class SmallReduction:
    """Everything but the arrays, laid out before: NumPy copies them as they are, and a kernel finds them.

    Who has the arrays of all ranks depends on none of them any more: it writes to `outs` at once.
    """

    def __init__(
        self,
        pack: ProcessPack,
        shared: SharedPack | None,
        rank: int,
        spec: LeafSpec,
        result: np.dtype[Any],
        *,
        shares_results: bool,
        work: Work,
    ) -> None:
        """`pack` is small and has one leaf; `result` is the dtype of results, and `work` what is recorded."""
        self._shared, self._spec, self._result, self._work = shared, spec, result, work
        self._recipe, self._written = pack.final_recipe, pack.result
        self._shares_results = shares_results
        self._num_results = 1 if shares_results else len(spec.destinations)
        is_numpy = spec.backend.name == "numpy"
        self._dtype, self._brings_arrays = dtype_named(spec.dtype), is_numpy
        self._writes_arrays = is_numpy and result == pack.result
        self._shape = spec.shape if is_numpy else (spec.num_elements,)
        # In shared memory by parity of the step; elsewhere nobody reads an array of the last exchange.
        own, inputs = ([], []) if shared is None else (shared.own, shared.inputs)
        if shared is None:
            self._buffers = [
                [np.empty(pack.num_elements, pack.dtype) for _ in range(number)] for number in pack.counts
            ]
            own, inputs = [self._buffers[rank]], [[buffer for buffers in self._buffers for buffer in buffers]]
        self._own = [[buffer.view(self._dtype).reshape(self._shape) for buffer in buffers] for buffers in own]
        self._inputs = [tuple(arrays) for arrays in inputs]

    def run(self, call: GroupCall, columns: Columns, outs: Outs, weights: Weights | None = None) -> Delivery:
        """As `ProcessReduction.run`, but `outs` have their results already."""
        (arrays,), (out,) = columns, outs
        shared = self._shared
        parity = 0 if shared is None else shared.shared.steps.parity
        started = now()
        try:
            own = self._own[parity]
            for buffer, array in zip(own, arrays, strict=True):
                buffer[...] = array if self._brings_arrays else self._host_view(array)
            if shared is None:
                call.all_gather_into(self._buffers)
            else:
                if shared.shared.on_shown is not None:
                    shared.tell_of(own)
                call.step()
            combine = self._combine if weights is None else self._combine_with(weights)
            if out is None:
                flats = [np.empty(self._shape, self._result) for _ in range(self._num_results)]
                targets = flats if self._writes_arrays else [self._as_written(flat) for flat in flats]
                combine(self._inputs[parity], tuple(targets))
            else:
                combine(self._inputs[parity], self._targets(out))
        except OutError as error:  # it has become read-only: the call is done all the same
            return functools.partial(_raise, error)
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


def _raise(error: OutError) -> list[tuple[Array, ...]]:
    raise error
