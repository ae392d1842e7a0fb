"""Passes over the sums that a `RunningSum` keeps: made, added to, and rounded to floats."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crossdevice.kernels.host.fused_pass import (
    PreparedPass,
    SharedPasses,
    prepared_for,
    selected_kernels,
)
from crossdevice.kernels.host.work_list import Pieces, Task
from crossdevice.values.dtypes import NARROW_FLOATS
from crossdevice.values.recipe import Recipe
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.weights import Weights

Kernel = Callable[..., None]


def summing_kernels(dtype: np.dtype[Any]) -> tuple[Kernel, Kernel] | None:
    """Kernels that make float64 sums of weighted narrow floats, and that add to such; None without numba."""
    if selected_kernels() != "numba" or dtype.name not in NARROW_FLOATS:
        return None
    return _compiled_kernels(dtype)


@functools.cache
def _compiled_kernels(dtype: np.dtype[Any]) -> tuple[Kernel, Kernel] | None:
    from crossdevice.kernels.host.llvm import numba_pass

    if dtype == np.float16 and not numba_pass.has_half_conversions():
        return None
    first, second = (
        numba_pass.compiled_kernel(f"{shape} weighted SUM {dtype.name} float64")
        for shape in ("chain", "onto")
    )
    return first, second


def summed_batch(tasks: Sequence[Task], kernel: Kernel, factors: Sequence[float]) -> None:
    """Makes sums of inputs times factors, or adds to them, as the kernel does; threads share all of it."""
    weights = Weights(tuple(factors))
    prepared = PreparedPass(kernel, 1.0, False, None, None, weights.words)
    SharedPasses(tasks, prepared, Recipe(ReduceOp.SUM, "accurate", weights=weights))()


def narrowed_batch(
    tasks: Sequence[tuple[NDArray[Any], NDArray[Any]]], divisor: float
) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Rounds float64 over a divisor once into narrower floats; returns those without a kernel."""
    recipe = Recipe(ReduceOp.SUM, "accurate")
    left: list[tuple[NDArray[Any], NDArray[Any]]] = []
    groups: dict[int, tuple[PreparedPass, list[Task]]] = {}
    for wide, out in tasks:
        prepared = prepared_for(recipe, wide.dtype, out.dtype)
        if prepared is None:
            left.append((wide, out))
        else:
            groups.setdefault(id(prepared), (prepared, []))[1].append(((wide,), (out,)))
    for prepared, group in groups.values():
        SharedPasses(group, prepared._replace(divisor=divisor), recipe)()
    return left


def rounded_batch(
    tasks: Sequence[Task],
    divisor: Weights,
    settle: Callable[[Sequence[NDArray[Any]], Sequence[NDArray[Any]], Pieces, Recipe], None],
) -> None:
    """Rounds sums of float64 parts over a divisor once; `settle` writes the pieces that are not certain."""
    groups: dict[tuple[int, str], list[Task]] = {}
    for parts, outs in tasks:
        groups.setdefault((len(parts), outs[0].dtype.name), []).append((parts, outs))
    for (number, into), group in groups.items():
        weights = Weights((1.0,) * number, divisor.all_factors)
        prepared = PreparedPass(rounding_kernel(into), weights.divisor, True, None, None, weights.words)
        SharedPasses(group, prepared, Recipe(ReduceOp.SUM, "exact", weights=weights), settle=settle)()


def has_rounding_kernel(dtype: np.dtype[Any]) -> bool:
    """Returns True if `rounded_batch` writes this dtype."""
    if selected_kernels() != "numba" or dtype.name not in (*NARROW_FLOATS, "float64"):
        return False
    from crossdevice.kernels.host.llvm import numba_pass

    return dtype != np.float16 or numba_pass.has_half_conversions()


@functools.cache
def rounding_kernel(into: str) -> Kernel:
    """Returns the kernel that rounds sums of float64 parts to a dtype."""
    from crossdevice.kernels.host.llvm import numba_pass

    return numba_pass.compiled_kernel(f"chain parts SUM float64{'' if into == 'float64' else f' {into}'}")
