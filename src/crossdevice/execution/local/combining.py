"""Combining arrays that lie in one memory: the fused pass on the host, plain array functions elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from crossdevice.backends.protocol import HOST_MEMORY, Array, Backend, dtype_named
from crossdevice.kernels.host.fused_pass import fused_pass
from crossdevice.kernels.recipe import Recipe
from crossdevice.values.device import Device
from crossdevice.values.dtypes import COMPLEXES, INTEGERS
from crossdevice.values.reduce_op import ReduceOp


def combine(backend: Backend, arrays: Sequence[Array], recipe: Recipe, dtype: str, device: Device) -> Array:
    """Flat arrays on one device, combined into a new flat array of `dtype` there."""
    if backend.memory_of(device) == HOST_MEMORY:
        inputs = [backend.host_view(array) for array in arrays]
        output = np.empty(inputs[0].size, dtype_named(dtype))
        fused_pass(inputs, [output], recipe)
        return backend.from_host(output, output.shape, device)
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
        part = {"complex64": "float32", "complex128": "float64"}[source]
        parts = [backend.parts_of(array) for array in arrays]
        return backend.from_parts(combine_with_array_functions(backend, parts, recipe, part, device))
    if _needs_host(recipe, source):
        inputs = [backend.to_host(array) for array in arrays]
        output = np.empty(inputs[0].size, dtype_named(dtype))
        fused_pass(inputs, [output], recipe)
        return backend.copy(backend.from_host(output, output.shape, device), device)
    functions = {ReduceOp.MIN: xp.minimum, ReduceOp.MAX: xp.maximum, ReduceOp.PROD: xp.multiply}
    function = functions.get(recipe.op, xp.add)
    if len(arrays) == 1:
        arrays = [backend.copy(arrays[0], device)]
    if recipe.op in (ReduceOp.MIN, ReduceOp.MAX):
        return functools.reduce(function, arrays)
    if source in INTEGERS:
        if is_mean and recipe.precision != "fast":
            arrays = [backend.cast(array, "int64") for array in arrays]
        total = functools.reduce(function, arrays)
        return _divided(backend, backend.cast(total, dtype), recipe.divisor) if is_mean else total
    if recipe.precision == "fast":
        return _divided(backend, functools.reduce(function, arrays), recipe.divisor)
    wide = "complex128" if source in COMPLEXES else "float64"
    widened = [backend.cast(array, wide) for array in arrays]
    total = (
        _compensated(xp, widened)
        if recipe.op is ReduceOp.SUM and source == wide
        else functools.reduce(function, widened)
    )
    return backend.round_once(_divided(backend, total, recipe.divisor), dtype)


def _needs_host(recipe: Recipe, source: str) -> bool:
    """True sums and means of 64-bit integers need arithmetic that array libraries do not have."""
    if recipe.op in (ReduceOp.MIN, ReduceOp.MAX):
        return False
    if source in INTEGERS:
        return recipe.divisor is not None and recipe.precision != "fast" and source in ("int64", "uint64")
    return recipe.precision == "exact"


def _divided(backend: Backend, total: Array, divisor: int | None) -> Array:
    return total if divisor is None else backend.divided(total, divisor)


def _compensated(xp: Any, arrays: Sequence[Array]) -> Array:
    """float64 sums with the rounding errors added back; see the host's pass of the same name."""
    total, errors = arrays[0], xp.zeros_like(arrays[0])
    for array in arrays[1:]:
        grown = total + array
        of_array = grown - total
        errors = errors + ((total - (grown - of_array)) + (array - of_array))
        total = grown
    # Infinities leave NaN as their errors, and -0 + 0 would be +0.
    counts = xp.isfinite(total) & ((total != 0) | (errors != 0))
    return xp.where(counts, total + errors, total)
