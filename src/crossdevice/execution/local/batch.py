"""A batch of reductions: everything is checked, then everything is run, then results are wrapped."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from crossdevice.backends.numpy_backend import array_of_numbers
from crossdevice.backends.protocol import Array
from crossdevice.errors import OutError
from crossdevice.execution.local.combining import combine
from crossdevice.execution.local.planning import Planner
from crossdevice.execution.local.prepared import Prepared, PreparedReduction
from crossdevice.execution.local.sparse import (
    RowsBesideDense,
    SparseReduction,
    check_sparse,
    densified,
    has_repeated_rows,
)
from crossdevice.execution.reading.leaf_spec import (
    Columns,
    Dense,
    LeafSpec,
    Out,
    Outs,
    in_memory_order,
    shared_axis_order,
)
from crossdevice.execution.reading.outputs import (
    check_out,
    check_outs,
    delivered,
    dtype_of_out,
    read_destinations,
    read_out,
    wrapped,
)
from crossdevice.execution.reading.structures import spread_pairs
from crossdevice.execution.reading.values import Leaf, Value, backend_of, checked_spec, read_value, widened
from crossdevice.execution.tracing import READING, Work, flight_recorder, now, recorded
from crossdevice.values.device import Device
from crossdevice.values.distributed import DistributedValues, IndexedSlices, Mirrored
from crossdevice.values.dtypes import INTEGERS, ITEM_BYTES, check_reducible, result_dtype
from crossdevice.values.options import CommunicationOptions, Precision
from crossdevice.values.recipe import Recipe
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.weights import Weights, check_number, weights_for

CheckedLeaf: TypeAlias = "Dense | SparseReduction | RowsBesideDense"


class Request(NamedTuple):
    """One value to be reduced to some devices, into `out` unless that is None."""

    value: Value
    destinations: tuple[Device, ...]
    out: Any = None


def read_requests(
    pairs: Sequence[tuple[Any, Any]], outs: Sequence[Any]
) -> tuple[list[Request], Callable[[list[Any]], list[Any]]]:
    """Each value of the pairs as read, and the function that puts results back into their structures."""
    spread, own_outs, rebuilt = spread_pairs(pairs, outs)
    requests = [
        Request(read_value(value), read_destinations(destinations), out)
        for (value, destinations), out in zip(spread, own_outs, strict=True)
    ]
    return requests, rebuilt


def _check_outs_again(
    leaves: Sequence[tuple[LeafSpec, str]], dtypes: Sequence[str], columns: Columns, outs: Outs
) -> None:
    dense = [
        Dense(arrays, spec, out, path=path)
        for (spec, path), arrays, out in zip(leaves, columns, outs, strict=True)
    ]
    check_outs(dense, dtypes)


class CheckedBatch:
    """Requests that have passed every check, also of the memory they are to be written to.

    Args:
        in_any_order: whether axes may be left as they lie in memory, if all arrays of a leaf agree on that.
        factors: the weights of the replicas of every request. With them, for order statistics, and where
            results have another dtype, `fast` is `accurate`: partial results could not be combined.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        op: ReduceOp,
        options: CommunicationOptions,
        *,
        in_any_order: bool = False,
        factors: tuple[float, ...] | None = None,
    ) -> None:
        started = now()
        self.container: type[DistributedValues] = Mirrored
        if factors is not None:
            for number, request in enumerate(requests):
                entry = f" of entry {number}" if len(requests) > 1 else ""
                check_number(factors, len(request.value.devices), entry)
        if options.precision == "fast" and (factors is not None or op.is_order_statistic):
            options = dataclasses.replace(options, precision="accurate")
        self.requests, self.op, self.options, self.factors = requests, op, options, factors
        self._in_any_order = in_any_order
        self.leaves = [self._checked_leaves(request) for request in requests]
        self.all_leaves = [leaf for leaves in self.leaves for leaf in leaves]
        self.dense = [leaf for leaf in self.all_leaves if isinstance(leaf, Dense)]
        self.result_dtypes = [leaf.spec.result_dtype(op, self.is_weighted) for leaf in self.dense]
        if self.options.precision == "fast" and any(leaf.spec.into for leaf in self.dense):
            self.options = dataclasses.replace(self.options, precision="accurate")
        written = self.dense + [leaf.dense for leaf in self.all_leaves if isinstance(leaf, RowsBesideDense)]
        if any(leaf.out is not None for leaf in written):
            check_outs(written, [leaf.spec.result_dtype(op, self.is_weighted) for leaf in written])
        flight_recorder.events.append((READING, started, now(), 1))

    @property
    def is_weighted(self) -> bool:
        """True if replicas have weights."""
        return self.factors is not None

    @property
    def is_dense(self) -> bool:
        """True if no replica holds sparse rows, whose number may differ from run to run."""
        return not any(leaf.is_sparse for request in self.requests for leaf in request.value.leaves)

    @property
    def places(self) -> list[tuple[int, tuple[Device, ...]]]:
        """For each value the number of its leaves, and the destinations of their results."""
        return [(len(request.value.leaves), request.destinations) for request in self.requests]

    @property
    def bytes_of_results(self) -> list[int] | None:
        """Bytes of a result of each leaf."""
        return [
            leaf.spec.num_elements * ITEM_BYTES[dtype]
            for leaf, dtype in zip(self.dense, self.result_dtypes, strict=True)
        ]

    @property
    def check_outs(self) -> Callable[[Columns, Outs], None]:
        """The check of memory for the results of another call like this."""
        kept = [(leaf.spec, leaf.path) for leaf in self.dense], self.result_dtypes
        return functools.partial(_check_outs_again, *kept)

    @functools.cached_property
    def weights(self) -> Weights | None:
        """The weights of the replicas of this process, as if there were no others."""
        return None if self.factors is None else weights_for(self.factors, self.op)

    def prepared(self, planner: Planner) -> Prepared | None:
        """The call without its arrays."""
        return self.reduction(planner)

    def reduction(self, planner: Planner) -> PreparedReduction:
        """The prepared reduction of its dense leaves, and of others with the same signatures."""
        specs = tuple([leaf.spec for leaf in self.dense])
        return planner.prepared(specs, self.op, self.options, self.is_weighted)

    def run(self, planner: Planner) -> list[Any]:
        """The wrapped result of each request."""
        algorithm, weights = planner.algorithm, self.weights
        function, via = algorithm.accumulation_fn, algorithm.reduce_to_device
        if via is not None:
            for backend in {leaf.backend for leaf in self.all_leaves}:
                backend.check_device(via)
        if not self.dense:
            reduced = []
        elif function is not None:
            reduced = accumulated(self.dense, function, via, self.op, self.options.precision)
        else:
            made = self.reduction(planner).run(
                [leaf.arrays for leaf in self.dense], [leaf.out for leaf in self.dense], weights
            )
            reduced = [
                results if leaf.order is None else leaf.order.restored(leaf.spec.backend, results)
                for leaf, results in zip(self.dense, made, strict=True)
            ]
        remaining = iter(reduced)

        def results_of(leaf: CheckedLeaf) -> Sequence[Any]:
            if isinstance(leaf, Dense):
                return next(remaining)
            if isinstance(leaf, RowsBesideDense) and function is not None:
                return accumulated([leaf.dense], function, via, self.op, self.options.precision)[0]
            return leaf.with_weights(weights).run(via)

        return self.wrapped(map(results_of, self.all_leaves))

    def wrapped(self, results: Iterable[Sequence[Any]]) -> list[Any]:
        """The results of all leaves, each on its destinations, as one value for each request."""
        remaining = iter(results)
        return [
            wrapped([next(remaining) for _ in leaves], request.value.structure, request.destinations)
            for request, leaves in zip(self.requests, self.leaves, strict=True)
        ]

    def _checked_leaves(self, request: Request) -> list[CheckedLeaf]:
        value, destinations, out = request
        outs: Sequence[Any] = (
            [None] * len(value.leaves) if out is None else read_out(out, value, destinations)
        )
        return [
            self._checked(leaf, value.devices, destinations, into)
            for leaf, into in zip(value.leaves, outs, strict=True)
        ]

    def _checked(
        self,
        leaf: Leaf,
        devices: tuple[Device, ...],
        destinations: tuple[Device, ...],
        out: Out,
    ) -> CheckedLeaf:
        if leaf.is_sparse:
            if all(isinstance(array, IndexedSlices) for array in leaf.arrays):
                if out is not None:
                    raise OutError(
                        f"out cannot hold IndexedSlices{leaf.at_path}: their number of rows is not known"
                    )
                return check_sparse(leaf, devices, destinations, self.op, self.options.precision)
            return self._checked_mixed(leaf, devices, destinations, out)
        return self._checked_dense(leaf, devices, destinations, out)

    def _checked_mixed(
        self, leaf: Leaf, devices: tuple[Device, ...], destinations: tuple[Device, ...], out: Out
    ) -> Dense | RowsBesideDense:
        """Rows of some replicas beside dense arrays of others."""
        made = densified(leaf, devices, self.op, self.options.precision)
        dense = self._checked_dense(made, devices, destinations, out)
        is_rounded = self.options.precision == "exact" and dense.spec.dtype not in INTEGERS
        if not is_rounded or not has_repeated_rows(leaf):
            return dense
        return RowsBesideDense(leaf, dense, self.op)

    def _checked_dense(
        self, leaf: Leaf, devices: tuple[Device, ...], destinations: tuple[Device, ...], out: Out
    ) -> Dense:
        if self.options.widen_inputs:
            leaf = widened(leaf)
        order = shared_axis_order(leaf.arrays, out) if self._in_any_order else None
        if order is not None:
            arrays, out = in_memory_order(order, leaf.arrays)
            leaf = Leaf(arrays, leaf.path)
        into = None if out is None else dtype_of_out(out)
        spec = checked_spec(leaf, devices, destinations, self.op, into, self._integer_op)
        return Dense(leaf.arrays, spec, out, order, leaf.path)

    @property
    def _integer_op(self) -> ReduceOp | None:
        is_rounded = self.op is ReduceOp.MEAN or self.op.is_order_statistic or self.is_weighted
        return ReduceOp(self.options.integers) if is_rounded and self.options.integers != "mean" else None


RESULT = "accumulation_fn's result"


def accumulated(
    dense: Sequence[Dense],
    function: Callable[[tuple[Any, ...]], Any],
    via: Device | None,
    op: ReduceOp,
    precision: Precision,
) -> list[tuple[Array, ...]]:
    """Calls `function` with copies on one device; a mean divides what it returned, whatever that is.

    `out` is written to when all results are known to fit.
    """
    results = []
    for arrays, spec, out, *_ in dense:
        at = via or spec.destinations[0]
        devices = (*spec.devices, at, *spec.destinations)
        with recorded(Work("reduce", f"accumulation_fn {op.name}", devices, spec.num_bytes)):
            answer = function(tuple(spec.backend.copy(array, at) for array in arrays))
            if not hasattr(answer, "dtype"):
                numbers = array_of_numbers(answer)
                answer = spec.backend.from_host(numbers.reshape(-1), numbers.shape, at)
            backend = backend_of(answer, 0, RESULT)
            if op is ReduceOp.MEAN:
                dtype = backend.dtype_of(answer)
                check_reducible(dtype, op, RESULT)
                recipe = Recipe(ReduceOp.SUM, precision, len(arrays))
                flat = combine(backend, [backend.flat(answer)], recipe, result_dtype(dtype, op), at)
                answer = backend.reshape(flat, backend.shape_of(answer))
            answers = tuple(backend.copy(answer, device) for device in spec.destinations)
        if out is not None:
            check_out(answers, spec, spec.backend.dtype_of(out[0]), RESULT)
        results.append(answers)
    return [
        delivered(answers, leaf.out, leaf.spec.backend) for leaf, answers in zip(dense, results, strict=True)
    ]
