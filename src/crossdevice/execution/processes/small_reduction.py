"""A small leaf that every rank of one host combines itself: one step in shared memory, and one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crossdevice.backends.protocol import Array, dtype_named
from crossdevice.execution.processes.shared_reduction import SharedPack
from crossdevice.execution.processes.travelling import Delivery
from crossdevice.execution.reading.leaf_spec import LeafSpec
from crossdevice.execution.reading.outputs import written_view
from crossdevice.execution.tracing import Work, recorded
from crossdevice.process_groups.group_call import GroupCall

Flat = NDArray[Any]


class SmallReduction:
    """Everything but the arrays, laid out before: NumPy then copies them as they are, in one call each.

    The pass writes to memory of its own, from which results are copied: to lay out a pass for other memory in
    each call would take longer.
    """

    def __init__(
        self, pack: SharedPack, spec: LeafSpec, result: np.dtype[Any], *, shares_results: bool, work: Work
    ) -> None:
        """`pack` is small and lone; `result` is the dtype of results, and `work` what is recorded."""
        self._spec, self._work, self._steps, self._tell_of = spec, work, pack.steps, pack.tell_of
        self._num_results = 1 if shares_results else len(spec.destinations)
        self._shares_results = shares_results
        self._takes_arrays = spec.backend.name == "numpy"
        rooms, total, self._passes = pack.laid_out()
        self._dtype = dtype_named(spec.dtype)
        shape = spec.shape if self._takes_arrays else (-1,)
        self._rooms = [[room.view(self._dtype).reshape(shape) for room in of_parity] for of_parity in rooms]
        self._total = total.view(result)
        self._shaped = self._total.reshape(spec.shape)

    def run(self, call: GroupCall, arrays: Sequence[Array], out: Sequence[Array] | None) -> Delivery:
        """As `ProcessReduction.run`, but `out` has its results already.

        Who has the arrays of all ranks depends on none of them any more: it may overwrite inputs.
        """
        with recorded(self._work):
            parity = self._steps.parity
            views = arrays if self._takes_arrays else self._host_views(arrays)
            for room, view in zip(self._rooms[parity], views, strict=True):
                room[...] = view
            self._tell_of(self._rooms[parity])
            call.step()
            for work in self._passes[parity]:
                work()
            if out is not None:
                return self._written(out)
            flats = [self._total.copy() for _ in range(self._num_results)]
        if self._shares_results:
            flats *= len(self._spec.destinations)
        return lambda: [self._spec.adopted(flats, is_shared=self._shares_results)]

    def _host_views(self, arrays: Sequence[Array]) -> list[Flat]:
        return [self._spec.backend.host_view(array).view(self._dtype) for array in arrays]

    def _written(self, out: Sequence[Array]) -> Delivery:
        try:
            if self._takes_arrays:
                for target in out:
                    target[...] = self._shaped
            else:
                for target in out:
                    written_view(self._spec.backend, target)[:] = self._total
                self._spec.backend.mark_written(tuple(out))
        except ValueError:  # it has become read-only: the call is done all the same, and other ranks are
            return lambda: [tuple(written_view(self._spec.backend, target) for target in out)]
        return lambda: [tuple(out)]
