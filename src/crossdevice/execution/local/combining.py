"""Combining arrays that lie in one memory: the fused pass on the host, plain array functions elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crossdevice.backends.protocol import HOST_MEMORY, Array, Backend, dtype_named
from crossdevice.kernels.host.fused_pass import fused_pass
from crossdevice.kernels.host.reference.rounding import two_sum, with_errors
from crossdevice.values.device import Device
from crossdevice.values.dtypes import COMPLEXES, INTEGERS, PARTS, SHORT_FLOATS
from crossdevice.values.recipe import Recipe
from crossdevice.values.reduce_op import ReduceOp


def combine(backend: Backend, arrays: Sequence[Array], recipe: Recipe, dtype: str, device: Device) -> Array:
    """Flat arrays on one device, combined into a new flat array of `dtype` there."""
    if backend.memory_of(device) == HOST_MEMORY:
        return _on_host(backend, list(map(backend.host_view, arrays)), recipe, dtype, device)
    with backend.working_on(device):
        return combine_with_array_functions(backend, arrays, recipe, dtype, device)


def combine_with_array_functions(
    backend: Backend, arrays: Sequence[Array], recipe: Recipe, dtype: str, device: Device
) -> Array:
    """The same, in the library's own functions; what they cannot do is done on the host."""
    xp = backend.namespace()
    source = backend.dtype_of(arrays[0])
    is_mean = recipe.divisor is not None
    if source in COMPLEXES and recipe.op is ReduceOp.SUM:
        parts = [backend.parts_of(array) for array in arrays]
        return backend.from_parts(combine_with_array_functions(backend, parts, recipe, PARTS[source], device))
    if needs_host(recipe, source):
        made = _on_host(backend, list(map(backend.to_host, arrays)), recipe, dtype, device)
        return backend.copy(made, device)
    functions = {ReduceOp.MIN: xp.minimum, ReduceOp.MAX: xp.maximum, ReduceOp.PROD: xp.multiply}
    function = functions.get(recipe.op, xp.add)
    if len(arrays) == 1:
        arrays = [backend.copy(arrays[0], device)]
    if recipe.op in (ReduceOp.MIN, ReduceOp.MAX):
        best = functools.reduce(function, arrays)
        return best if source == dtype else backend.round_once(backend.cast(best, "float64"), dtype)
    if source in INTEGERS and recipe.weights is None:
        if is_mean and recipe.precision != "fast":
            arrays = [backend.cast(array, "int64") for array in arrays]
        total = functools.reduce(function, arrays)
        if not is_mean:
            return total
        # Divided in float64, which holds all sums: those of 16 bits may be too long for float32.
        wide = dtype if recipe.precision == "fast" else "float64"
        return backend.round_once(_divided(backend, backend.cast(total, wide), recipe.divisor), dtype)
    if recipe.precision == "fast":
        return _divided(backend, functools.reduce(function, arrays), recipe.divisor)
    widened = [backend.cast(array, "float64") for array in arrays]
    if recipe.op is ReduceOp.SUM and source == "float64":  # without weights: see needs_host
        return backend.round_once(_compensated(xp, widened, recipe.divisor), dtype)
    divisor: float | None = recipe.divisor
    if recipe.weights is not None:
        widened = [array * factor for array, factor in zip(widened, recipe.weights.factors, strict=True)]
        divisor = None if recipe.weights.divisor == 1 else recipe.weights.divisor
    return backend.round_once(_divided(backend, functools.reduce(function, widened), divisor), dtype)


def _on_host(
    backend: Backend, inputs: Sequence[NDArray[Any]], recipe: Recipe, dtype: str, device: Device
) -> Array:
    output = np.empty(inputs[0].size, dtype_named(dtype))
    fused_pass(inputs, [output], recipe)
    return backend.from_host(output, output.shape, device)


_WEIGHTED_ON_HOST = ("float64", "int32", "uint32", "int64", "uint64")


def needs_host(recipe: Recipe, source: str) -> bool:
    """True if the host computes it, because the library cannot, or only with other bits.

    Left to the host are sorting, 8-bit floats, true sums, means of 64-bit integers, weights times what has
    results of 64 bits, whose products would be rounded, and products of complex numbers, whose steps may be
    fused.
    """
    if recipe.op.is_order_statistic or source in SHORT_FLOATS:
        return True
    if recipe.op in (ReduceOp.MIN, ReduceOp.MAX):
        return False
    if recipe.weights is not None:
        return recipe.precision == "exact" or source in _WEIGHTED_ON_HOST
    if source in INTEGERS:
        return recipe.divisor is not None and recipe.precision != "fast" and source in ("int64", "uint64")
    return recipe.precision == "exact" or (recipe.precision == "accurate" and source in COMPLEXES)


def _divided(backend: Backend, total: Array, divisor: float | None) -> Array:
    return total if divisor is None else backend.divided(total, divisor)


def _compensated(xp: Any, arrays: Sequence[Array], divisor: int | None) -> Array:
    """float64 sums and means with the rounding errors added back; see the host's `numpy_pass`."""
    total, errors = arrays[0], xp.zeros_like(arrays[0])
    for array in arrays[1:]:
        total, error = two_sum(total, array)
        errors = errors + error

    def remainder(dividend: Array, quotient: Array, number: float) -> Array:
        # Exact too: Veltkamp's splitting in place of bits, and scaled where it would overflow.
        is_large = abs(quotient) > 2.0**990
        dividend, quotient = (xp.where(is_large, part * 2.0**-60, part) for part in (dividend, quotient))
        product = quotient * (2.0**27 + 1)
        upper = product - (product - quotient)
        left = (dividend - upper * number) - (quotient - upper) * number
        return xp.where(is_large, left * 2.0**60, left)

    return with_errors(total, errors, divisor, remainder, xp)
