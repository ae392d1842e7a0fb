"""Gradient clipping by a norm that is exact: one number on any number of workers, shards and threads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from crossdevice.backends.registry import backend_named
from crossdevice.combining.between_ranks import gathered_json
from crossdevice.errors import DtypeError, OptionError
from crossdevice.integrations.torch.tensor_kinds import is_instance_of
from crossdevice.kernels.host.reference.long_accumulator import SMALLEST_EXPONENT, scaled_integers
from crossdevice.kernels.host.reference.running import rounded_fraction
from crossdevice.kernels.host.running_sum import RunningSum
from crossdevice.process_groups.group import ProcessGroup

ROW_ELEMENTS = 1 << 11
"""Row length for squares; sums of rows are then added as whole numbers."""

BLOCK_ROWS = 256

SPLITTER = 2.0**27 + 1
"""Cuts a float64 into two of 26 bits (Veltkamp)."""

SCALES = ((2.0**-440, 2.0**600), (2.0**480, 1.0), (math.inf, 2.0**-600))
"""Magnitudes of float64 up to which a factor keeps squares, and their rounding errors, within float64."""

SQRT_BITS = 140

Floats = NDArray[np.float64]


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    *,
    group: ProcessGroup | None = None,
) -> torch.Tensor:
    """Scales gradients in place so that their 2-norm is at most `max_norm`, as PyTorch's function does.

    The norm is that of all gradients, with squares added without rounding and rounded once to float64. So it
    depends neither on how gradients are laid out nor on the number of threads, and with `group` not on who
    holds which of them. A norm that is not finite scales as PyTorch does: gradients become NaN or 0.

    Args:
        parameters: a tensor, or tensors with a `.grad` to be clipped; those without one are left out.
        max_norm: the largest norm, positive.
        group: processes that hold different gradients, each of them once: all call this, and get the norm of
            all. After `ExactGradients.finish` all workers have the same gradients, and it is left out.

    Returns:
        The norm before clipping, a float64 tensor on the host.

    Raises:
        OptionError: `max_norm` is not a positive number, `group` is none of crossdevice, or gradients are
            sharded and there is none.
        DtypeError: a gradient is not of floats or complex numbers.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> clip_grad_norm_([weight], 1.0), weight.grad
    (tensor(5., dtype=torch.float64), tensor([0.6000, 0.8000]))
    """
    limit = float(max_norm)
    if not limit > 0:
        raise OptionError(f"max_norm must be a positive number; got {max_norm!r}")
    if group is not None and not isinstance(group, ProcessGroup):
        raise OptionError(
            f"group must be a group of crossdevice, as the group of an ExactReduceScatter is; got {group!r}"
        )
    tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    gradients = [each.grad for each in tensors if each.grad is not None]
    if group is None and any(_is_sharded(gradient) for gradient in gradients):
        raise OptionError(
            "gradients are sharded over several processes, and this one holds only a part of them; give "
            "group=, as the group of an ExactReduceScatter"
        )
    squares: dict[float, RunningSum] = {}
    special = 0.0
    for gradient in gradients:
        special += _add_squares(squares, _elements(_local(gradient)))
    total = sum((_whole(rows) / Fraction(scale) ** 2 for scale, rows in squares.items()), Fraction(0))
    if group is not None and group.size > 1:
        special, total = _of_all_ranks(group, special, total)
    norm = special if special != 0 else _root(total)
    factor = min(limit / (norm + 1e-6), 1.0) if not math.isnan(norm) else norm
    if factor != 1.0:
        for gradient in gradients:
            gradient.mul_(factor)
    return torch.tensor(norm, dtype=torch.float64)


def _is_sharded(gradient: Any) -> bool:
    if not is_instance_of(gradient, "torch.distributed.tensor", "DTensor"):
        return False
    return any(
        placement.is_shard() and gradient.device_mesh.size(axis) > 1
        for axis, placement in enumerate(gradient.placements)
    )


def _local(gradient: torch.Tensor) -> torch.Tensor:
    """Returns this process's elements, each once."""
    if is_instance_of(gradient, "torch.distributed.tensor", "DTensor"):
        gradient = gradient.to_local()
    if gradient.layout == torch.sparse_coo:
        gradient = gradient if gradient.is_coalesced() else gradient.coalesce()
    return gradient


def _elements(gradient: torch.Tensor) -> Floats:
    values = gradient.values() if gradient.layout == torch.sparse_coo else gradient
    if values.is_complex():
        values = torch.view_as_real(values)
    if not values.is_floating_point():
        raise DtypeError(f"a gradient has dtype {values.dtype}; expected floats or complex numbers")
    flat: Floats = backend_named("torch").to_host(values)
    return flat


def _add_squares(squares: dict[float, RunningSum], values: NDArray[Any]) -> float:
    """Adds the squares of finite values to rows, by their scale; returns the sum of the other magnitudes."""
    special = 0.0
    step = ROW_ELEMENTS * BLOCK_ROWS
    for start in range(0, values.size, step):
        block = values[start : start + step].astype(np.float64)
        finite = np.isfinite(block)
        if not finite.all():
            special += float(np.abs(block[~finite]).sum())
            block[~finite] = 0.0
        if values.dtype.itemsize < 8:
            _add_rows(squares, 1.0, [block * block])  # 48 bits at most
            continue
        magnitudes, above = np.abs(block), 0.0
        for limit, scale in SCALES:
            wanted = (magnitudes > above) & (magnitudes <= limit)
            above = limit
            if wanted.any():
                _add_rows(squares, scale, list(_squares(np.where(wanted, block, 0.0) * scale)))
    return special


def _squares(values: Floats) -> tuple[Floats, Floats]:
    """Returns rounded squares and their rounding errors (Dekker)."""
    square, shifted = values * values, values * SPLITTER
    upper = shifted - (shifted - values)
    lower = values - upper
    return square, ((upper * upper - square) + 2.0 * upper * lower) + lower * lower


def _add_rows(squares: dict[float, RunningSum], scale: float, arrays: Sequence[Floats]) -> None:
    if scale not in squares:
        squares[scale] = RunningSum(ROW_ELEMENTS, np.dtype(np.float64), "exact")
    rows: list[Floats] = []
    for array in arrays:
        padded = np.zeros(-(-array.size // ROW_ELEMENTS) * ROW_ELEMENTS)
        padded[: array.size] = array
        rows += list(padded.reshape(-1, ROW_ELEMENTS))
    squares[scale].add(rows, [1.0] * len(rows))


def _whole(rows: RunningSum) -> Fraction:
    """Returns the sum of all elements."""
    values = np.concatenate(rows.parts)
    mantissas, exponents = scaled_integers(values)
    signed = np.where(np.signbit(values), -mantissas, mantissas).tolist()
    terms = zip(signed, (exponents - SMALLEST_EXPONENT).tolist(), strict=True)
    whole = sum(mantissa << exponent for mantissa, exponent in terms)
    return Fraction(whole, 1 << -SMALLEST_EXPONENT) + sum(rows.fractions.values(), Fraction(0))


def _of_all_ranks(group: ProcessGroup, special: float, total: Fraction) -> tuple[float, Fraction]:
    own = [special, hex(total.numerator), total.denominator.bit_length() - 1]
    with group.call("norm of gradients", b"norm of gradients") as call:
        found = gathered_json(call, own)
    totals = [Fraction(int(numerator, 16), 1 << exponent) for _, numerator, exponent in found]
    return sum(each[0] for each in found), sum(totals, Fraction(0))


def _root(square: Fraction) -> float:
    """Returns the square root, rounded once."""
    if not square:
        return 0.0
    shift = max(0, SQRT_BITS - square.numerator.bit_length() + square.denominator.bit_length())
    shift += shift % 2
    scaled = (square.numerator << shift) // square.denominator
    root = math.isqrt(scaled)
    is_exact = root * root == scaled and (square.numerator << shift) % square.denominator == 0
    # One more bit says that there is more below, so that this is never a tie.
    return float(
        rounded_fraction(Fraction(2 * root + (not is_exact), 2) / (1 << shift // 2), np.dtype(np.float64))
    )
