"""Widening, combining and rounding of elements in Triton, with the bits of the host's arithmetic.

bfloat16 is read and written as 16-bit integers, and MIN and MAX of floats work on integers: no
compiler and no interpreter can then round or order them in a way of its own.
"""

# ruff: noqa: N803, RUF005, SIM108 - Triton: what is compiled in is in capitals, tuples are not unpacked
# mypy: disable-error-code="no-untyped-def, assignment"

from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl

from crossdevice.kernels.cuda.families import Arithmetic
from crossdevice.kernels.families import START, WITH_INPUT
from crossdevice.kernels.host.reference.rounding import LARGEST_PRODUCT, SMALLEST_PRODUCT

_TYPES = {
    "bfloat16": tl.uint16,
    **{name: getattr(tl, name) for name in ("float16", "float32", "float64")},
    **{f"{sign}int{bits}": getattr(tl, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
_TYPES_OF_BITS = {"bfloat16": tl.int16, "float16": tl.int16, "float32": tl.int32, "float64": tl.int64}

_INFINITIES = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000, "float64": 0x7FF << 52}

_START = tl.constexpr(START)
_WITH_INPUT = tl.constexpr(WITH_INPUT)
_SMALLEST_PRODUCT = tl.constexpr(SMALLEST_PRODUCT)
_LARGEST_PRODUCT = tl.constexpr(LARGEST_PRODUCT)


class KernelSpec(NamedTuple):
    """An arithmetic as the functions below take it."""

    family: str
    op: str
    element: str
    result: str
    divisor: float | None
    program: tuple[int, ...]
    levels: tuple[int, ...]
    """The accumulators that the program needs, by number."""
    numbers_per_input: int
    divides: bool
    """False where a multiplication has the same bits: by a power of two."""
    read_as: Any
    written_as: Any
    largest: int
    """All bits of a float but its sign, for MIN and MAX of floats; 0 otherwise."""
    infinity: int
    beyond: int
    """Rank of NaN while floats are put in order: less or more than all numbers, so that it wins."""


def kernel_spec(arithmetic: Arithmetic) -> KernelSpec:
    """Returns the specification with the memory types and constants of a dtype.

    Exact sums are given their divisor when they are launched.
    """
    if arithmetic.family == "exact":
        arithmetic = arithmetic._replace(divisor=None)
    levels = tuple(range(max((step >> 8 & 255 for step in arithmetic.program), default=0) + 1))
    divides = arithmetic.divisor is not None and math.frexp(arithmetic.divisor)[0] != 0.5
    if arithmetic.family != "extreme" or arithmetic.element not in _INFINITIES:
        types = _TYPES[arithmetic.element], _TYPES[arithmetic.result]
        return KernelSpec(*arithmetic, levels, arithmetic.numbers_per_input, divides, *types, 0, 0, 0)
    read_as = _TYPES_OF_BITS[arithmetic.element]
    largest = (1 << (read_as.primitive_bitwidth - 1)) - 1
    beyond = -largest - 1 if arithmetic.op == "MIN" else largest
    infinity = _INFINITIES[arithmetic.element]
    return KernelSpec(*arithmetic, levels, 1, divides, read_as, read_as, largest, infinity, beyond)


@triton.jit
def widened(stored, SPEC: tl.constexpr):
    """Converts an element to the form in which elements are combined."""
    value = stored
    if SPEC.family == "wide" or SPEC.family == "weighted" or SPEC.family == "exact":
        if SPEC.element != "float64":
            value = _as_single(stored, SPEC).to(tl.float64)
    elif SPEC.family == "rounded":
        value = _as_single(stored, SPEC)
    elif SPEC.family == "true_mean":
        value = stored.to(tl.int64)
    elif SPEC.largest != 0:
        # Integers that sort as IEEE 754-2019 has floats: -0 before +0, and NaN beyond all numbers.
        if SPEC.largest == 0x7FFF:
            value = stored.to(tl.int32)
        value = tl.where((value & SPEC.largest) > SPEC.infinity, SPEC.beyond, _turned(value, SPEC))
    return value


@triton.jit
def combined(total, element, SPEC: tl.constexpr):
    """Combines an accumulator with one more element, or with another accumulator."""
    if SPEC.op == "MIN":
        total = tl.where(element < total, element, total)
    elif SPEC.op == "MAX":
        total = tl.where(element > total, element, total)
    elif SPEC.op == "PROD":
        total = total * element
    else:
        total = total + element
    if SPEC.family == "rounded":
        total = _as_single(_halves_of(total, SPEC), SPEC)
    return total


@triton.jit
def error_of(total, element, grown):
    """Returns the rounding error of total + element (Knuth)."""
    of_element = grown - total
    return (total - (grown - of_element)) + (element - of_element)


@triton.jit
def number_of(bits):
    """Returns the float64 with these bits."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def error_of_product(left, right, product):
    """Returns the rounding error of left * right where it is known; as the reference's `two_product`."""
    size = tl.abs(product)
    is_known = (size >= _SMALLEST_PRODUCT) & (size <= _LARGEST_PRODUCT) & (tl.abs(left) <= _LARGEST_PRODUCT)
    upper, first = _upper_half(left), _upper_half(right)
    lower, second = left - upper, right - first
    error = ((upper * first - product) + upper * second + lower * first) + lower * second
    return tl.where(is_known, error, 0.0)


@triton.jit
def weighted_mean(total, errors, divisor, divisor_rest):
    """Returns a sum with its errors added back, over the sum of weights; as in the host's reference."""
    infinity: tl.constexpr = float("inf")
    counts = (tl.abs(errors) > 0) & (tl.abs(errors) < infinity)
    near = tl.where(counts, total + errors, total)
    rest = error_of(total, errors, near)
    rest = tl.where(counts & (tl.abs(rest) < infinity), rest, 0.0)
    first = near / divisor
    product = first * divisor
    remainder = (near - product) - error_of_product(first, divisor, product)
    second = ((remainder + rest) - first * divisor_rest) / divisor
    return tl.where(tl.abs(second) > 0, first + second, first)


@triton.jit
def compensated(total, errors, SPEC: tl.constexpr):
    """Returns a sum with its errors added back, divided for a mean; as in the host's `numpy_pass`."""
    infinity: tl.constexpr = float("inf")
    counts = (tl.abs(errors) > 0) & (tl.abs(errors) < infinity)
    near = tl.where(counts, total + errors, total)
    if SPEC.divisor is not None:
        rest = error_of(total, errors, near)
        rest = tl.where(counts & (tl.abs(rest) < infinity), rest, 0.0)
        number = tl.full(near.shape, SPEC.divisor, tl.float64)
        first = near / number
        # What a fused multiply-add would give, which Triton's interpreter does not have.
        upper = (first.to(tl.int64, bitcast=True) & -0x4000000).to(tl.float64, bitcast=True)
        remainder = (near - upper * number) - (first - upper) * number
        second = (remainder + rest) / number
        near = tl.where(tl.abs(second) > 0, first + second, first)
    return near


@triton.jit
def finished(total, SPEC: tl.constexpr):
    """Rounds to the dtype of the result."""
    if SPEC.family == "true_mean":
        total = total.to(tl.float64)
    elif SPEC.family == "wrapping_mean":
        total = total.to(SPEC.written_as)
    if SPEC.divisor is not None and SPEC.family != "compensated":
        number = tl.full(total.shape, SPEC.divisor, total.dtype)
        if not SPEC.divides:
            total = total * (1.0 / SPEC.divisor)
        elif total.dtype == tl.float32:
            # The plain division of float32 is off by up to two units of the last place.
            total = tl.div_rn(total, number)
        else:
            total = total / number
    if (SPEC.family == "wide" or SPEC.family == "compensated" or SPEC.family == "exact") or (
        SPEC.numbers_per_input == 2
    ):
        total = _rounded_once(total, SPEC)
    elif SPEC.family == "rounded":
        total = _halves_of(total, SPEC)
    elif SPEC.largest != 0:
        quiet: tl.constexpr = SPEC.infinity | ((SPEC.infinity & -SPEC.infinity) >> 1)
        total = tl.where(total == SPEC.beyond, quiet, _turned(total, SPEC))
    return total.to(SPEC.written_as)


@triton.jit
def stepped(levels, element, STEP: tl.constexpr, SPEC: tl.constexpr):
    """Runs one instruction of a tree's program on its accumulators (`program_of`, `kernels/families.py`)."""
    kind: tl.constexpr = SPEC.program[STEP] & 255
    level: tl.constexpr = (SPEC.program[STEP] >> 8) & 255
    if kind == _START:
        value = element
    elif kind == _WITH_INPUT:
        value = combined(levels[level], element, SPEC)
    else:
        value = combined(levels[level], levels[level + 1], SPEC)
    if level == 0:
        changed = (value,)
    else:
        changed = (levels[0],)
    for number in tl.static_range(1, len(levels)):
        if number == level:
            changed = changed + (value,)
        else:
            changed = changed + (levels[number],)
    return changed


@triton.jit
def _upper_half(values):
    """Returns the upper 26 of 53 bits, rounded, so that the rest fits 26 signed bits."""
    return ((values.to(tl.int64, bitcast=True) + 0x4000000) & -0x8000000).to(tl.float64, bitcast=True)


@triton.jit
def _as_single(stored, SPEC: tl.constexpr):
    if SPEC.element == "bfloat16":
        single = (stored.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        single = stored.to(tl.float32)
    return single


@triton.jit
def _halves_of(single, SPEC: tl.constexpr):
    """Rounds float32 to float16, or to the bits of bfloat16."""
    if SPEC.result == "bfloat16":
        bits = single.to(tl.uint32, bitcast=True)
        upper = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        halves = tl.where(single != single, 0x7FC0, upper).to(tl.uint16)
    else:
        halves = single.to(tl.float16)
    return halves


@triton.jit
def _rounded_once(wide, SPEC: tl.constexpr):
    """Rounds float64 once; every NaN becomes the positive quiet one."""
    if SPEC.result == "float64":
        value = tl.where(wide != wide, float("nan"), wide)
    elif SPEC.result == "float32":
        value = tl.where(wide != wide, float("nan"), wide.to(tl.float32))
    else:
        # By way of float32 rounded to odd: two roundings would not be one.
        near = wide.to(tl.float32)
        back = near.to(tl.float64)
        bits = near.to(tl.int32, bitcast=True)
        bits = tl.where(tl.abs(back) > tl.abs(wide), bits - 1, bits)
        bits = tl.where(back != wide, bits | 1, bits)
        bits = tl.where(wide != wide, 0x7FC00000, bits)
        value = _halves_of(bits.to(tl.float32, bitcast=True), SPEC)
    return value


@triton.jit
def _turned(bits, SPEC: tl.constexpr):
    """Inverts all bits but the sign of negative numbers; applying it twice restores them."""
    sign: tl.constexpr = 63 if SPEC.largest > 0x7FFFFFFF else 31
    return bits ^ ((bits >> sign) & SPEC.largest)
