"""A small leaf that every rank combines itself: one exchange, or one step in shared memory, and one pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from crossdevice.backends.protocol import Array, dtype_named
from crossdevice.errors import OutError
from crossdevice.execution.processes.programs import Delivery, Flat, SmallArrays
from crossdevice.execution.reading.leaf_spec import Columns, LeafSpec, Outs
from crossdevice.execution.reading.outputs import written_view
from crossdevice.execution.tracing import Work, flight_recorder, now
from crossdevice.kernels.host.fused_pass import bound_batch, fused_pass, repeated_pass
from crossdevice.plans.reduced_leaf import ReducedLeaf
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.values.weights import Weights


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


def _raise(error: OutError) -> list[tuple[Array, ...]]:
    raise error
