"""Reductions by a user's function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from crossdevice.backends.numpy_backend import array_of_numbers
from crossdevice.backends.protocol import Array
from crossdevice.execution.local.combining import combine
from crossdevice.execution.reading.leaf_spec import Dense
from crossdevice.execution.reading.outputs import check_out, delivered
from crossdevice.execution.reading.values import backend_of
from crossdevice.execution.tracing import Work, recorded
from crossdevice.values.device import Device
from crossdevice.values.dtypes import check_reducible, result_dtype
from crossdevice.values.options import Precision
from crossdevice.values.recipe import Recipe
from crossdevice.values.reduce_op import ReduceOp

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
