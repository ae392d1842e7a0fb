"""Exact sums and means in Triton, of any number of float arrays: each element is rounded once.

As on the host, float64 arithmetic encloses a sum together with the errors of its own additions, and nearly
always one result only lies in the enclosure. Where several do, the inputs, which are in a cache by then, are
read again and added up as integers, 32 bits of the whole range of float64 at a time.
"""

# ruff: noqa: N803 - Triton: what is compiled in is in capitals
# mypy: disable-error-code="no-untyped-def, assignment"

from __future__ import annotations

import triton
import triton.language as tl

from crossdevice.kernels.cuda.families import ROW_NUMBERS
from crossdevice.kernels.cuda.triton_arithmetic import error_of, error_of_product, finished, widened
from crossdevice.kernels.cuda.triton_kernels import block_at
from crossdevice.kernels.host.reference import long_accumulator

_AT_A_TIME = tl.constexpr(4)  # inputs, so that several are on their way from memory
_ROW_NUMBERS = tl.constexpr(ROW_NUMBERS)
_SIGN = tl.constexpr(-(1 << 63))
_INFINITY = tl.constexpr(0x7FF << 52)
_LIMB_BITS = tl.constexpr(long_accumulator.LIMB_BITS)
_LIMB_MASK = tl.constexpr(long_accumulator.LIMB_MASK)
_NO_POSITION = tl.constexpr(1 << 12)


@triton.jit(do_not_specialize=["addresses", "rows", "num_inputs", "num_outputs", "divisor"])
def exact_by_table(
    addresses,
    rows,
    num_inputs,
    num_outputs,
    divisor,
    SPEC: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Adds up arrays and divides by a whole number; tables as those of `pass_by_table`."""
    row = rows.to(tl.pointer_type(tl.int64)) + tl.program_id(0).to(tl.int64) * _ROW_NUMBERS
    task, start, num_elements = tl.load(row), tl.load(row + 1) * BLOCK, tl.load(row + 2)
    line = addresses.to(tl.pointer_type(tl.int64)) + task * (num_inputs + num_outputs)
    left = num_elements - start
    mixed = start * 0
    for number in range(num_inputs + num_outputs):
        mixed |= tl.load(line + number)
    num_open = left * 0 + 1
    if (mixed % 16 == 0) & (left >= BLOCK):
        odd, is_open = _enclosed(line, num_inputs, divisor, start, left, SPEC, BLOCK, True)
        num_open = tl.sum(is_open.to(tl.int64), axis=0)
        if num_open == 0:
            _store(line, num_inputs, num_outputs, finished(odd, SPEC), start, left, SPEC, BLOCK, True)
    if num_open > 0:
        for first in range(0, BLOCK, CHUNK):
            if first < left:
                here, rest = start + first, left - first
                odd, is_open = _enclosed(line, num_inputs, divisor, here, rest, SPEC, CHUNK, False)
                if tl.sum(is_open.to(tl.int32), axis=0) > 0:
                    added = _added(line, num_inputs, divisor, is_open, here, rest, SPEC, CHUNK)
                    odd = tl.where(is_open, added, odd)
                _store(line, num_inputs, num_outputs, finished(odd, SPEC), here, rest, SPEC, CHUNK, False)


@triton.jit
def _store(
    line,
    num_inputs,
    num_outputs,
    value,
    start,
    left,
    SPEC: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    for number in range(num_outputs):
        address = tl.load(line + num_inputs + number)
        place = block_at(address.to(tl.pointer_type(SPEC.written_as)) + start, WIDTH, IS_WHOLE)
        if IS_WHOLE:
            tl.store(place, value)
        else:
            tl.store(place, value, mask=tl.arange(0, WIDTH) < left)


@triton.jit
def _element(
    line, number, num_inputs, start, left, SPEC: tl.constexpr, WIDTH: tl.constexpr, IS_WHOLE: tl.constexpr
):
    """Reads elements as float64; -0.0, which changes no sum, where there is no such input."""
    is_there = number < num_inputs
    address = tl.load(line + number, mask=is_there, other=0)
    place = block_at(address.to(tl.pointer_type(SPEC.read_as)) + start, WIDTH, IS_WHOLE)
    if IS_WHOLE:
        stored = tl.load(place, mask=is_there, other=0)
    else:
        stored = tl.load(place, mask=is_there & (tl.arange(0, WIDTH) < left), other=0)
    return tl.where(is_there, widened(stored, SPEC), _negative_zeros(WIDTH))


@triton.jit
def _negative_zeros(WIDTH: tl.constexpr):
    # Triton makes a literal -0.0 positive.
    return tl.full((WIDTH,), _SIGN, tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def _enclosed(
    line, num_inputs, divisor, start, left, SPEC: tl.constexpr, WIDTH: tl.constexpr, IS_WHOLE: tl.constexpr
):
    """Returns results as float64, rounded to odd for narrower ones, and where they are not certain.

    The steps, and the reasons why they suffice, are those of `kernels/host/reference/exact.py`.
    """
    infinity: tl.constexpr = float("inf")
    total = _negative_zeros(WIDTH)
    errors = tl.zeros((WIDTH,), tl.float64)
    lost = tl.zeros((WIDTH,), tl.float64)
    for first in range(0, num_inputs, _AT_A_TIME):
        for step in tl.static_range(_AT_A_TIME):
            element = _element(line, first + step, num_inputs, start, left, SPEC, WIDTH, IS_WHOLE)
            grown = total + element
            error = error_of(total, element, grown)
            total = grown
            grown = errors + error
            lost += tl.abs(error_of(errors, error, grown))
            errors = grown
    near = tl.where(errors == 0, total, total + errors)
    rest = tl.where(errors == 0, 0.0, error_of(total, errors, near))
    doubt = lost * 2.0
    if divisor > 1:
        number = tl.zeros_like(near) + divisor.to(tl.float64)
        first_digit = near / number
        remainder = _remainder(near, first_digit, number)
        grown = remainder + rest
        wrong = tl.abs(error_of(remainder, rest, grown)) + doubt
        second = grown / number
        over = tl.abs(_remainder(grown, second, number))
        sizes = tl.abs(first_digit), tl.abs(near)
        is_extreme = (tl.minimum(sizes[0], sizes[1]) < 2.0**-600) | (
            tl.maximum(sizes[0], sizes[1]) > 2.0**1000
        )
        is_extreme = is_extreme & (near != 0)
        is_exact = (wrong + over == 0) & ((second == 0) | (tl.abs(second) > 2.0**-600))
        doubt = wrong * 2.0 / number + tl.abs(second) * 2.0**-51 + 2.0**-1000
        doubt = tl.where(is_extreme, infinity, tl.where(is_exact, 0.0, doubt))
        near = tl.where(second == 0, first_digit, first_digit + second)
        rest = tl.where(second == 0, 0.0, error_of(first_digit, second, near))
    # Wider than the doubt by more than the rounding of rest +- margin.
    margin = doubt * 2.0 + tl.abs(rest) * 2.0**-51
    is_decided = (near + (rest + margin) == near) & (near + (rest - margin) == near) & (tl.abs(rest) > margin)
    is_decided = (is_decided | (doubt == 0)) & (tl.abs(near) < infinity)
    if SPEC.result != "float64":
        bits = near.to(tl.int64, bitcast=True)
        bits = tl.where((rest != 0) & ((rest < 0) != (near < 0)), bits - 1, bits)
        near = tl.where(rest != 0, bits | 1, bits).to(tl.float64, bitcast=True)
        # No sum of narrow floats leaves the range of float64: these are what the elements are.
        is_special = ~(tl.abs(total) < infinity)
        near = tl.where(is_special, total, near)
        is_decided = is_decided | is_special
    return near, ~is_decided


@triton.jit
def _remainder(dividend, quotient, number):
    """Returns dividend - quotient * number, without rounding, for the rounded quotient."""
    product = quotient * number
    return (dividend - product) - error_of_product(quotient, number, product)


@triton.jit
def _added(line, num_inputs, divisor, is_open, start, left, SPEC: tl.constexpr, WIDTH: tl.constexpr):
    """Returns sums as float64, rounded to odd for narrower results, whatever the elements are.

    An element is a whole number below 2**53 at a position of 0 to 2045 above the last place of float64. Limbs
    of the sum are computed from the lowest one that counts, with a carry. The result is rounded from the four
    topmost ones, from which a divisor of up to 2**31 leaves 65 bits or more, and a bit for all that is below.
    """
    infinity: tl.constexpr = float("inf")
    special = tl.zeros((WIDTH,), tl.float64)
    zero = tl.zeros((WIDTH,), tl.int64)
    signs = zero - 1
    lowest, highest = zero + _NO_POSITION, zero - 1
    for number in range(num_inputs):
        element = _element(line, number, num_inputs, start, left, SPEC, WIDTH, False)
        bits = element.to(tl.int64, bitcast=True)
        special += tl.where(tl.abs(element) < infinity, 0.0, element)
        signs &= bits
        position = tl.maximum((bits >> 52) & 0x7FF, 1) - 1
        lowest = tl.where(element != 0, tl.minimum(lowest, position), lowest)
        highest = tl.where(element != 0, tl.maximum(highest, position), highest)
    is_summed = is_open & (special == 0)
    first = tl.min(tl.where(is_summed, lowest, _NO_POSITION), axis=0) >> 5
    # The highest bit of the largest element is 52 bits further up, and that of the sum up to 31 more.
    last = (tl.max(tl.where(is_summed, highest, -1), axis=0) >> 5) + 3

    flip = zero  # all bits of those whose sum is negative
    limb3, limb2, limb1, limb0, inexact, top = zero, zero, zero, zero, zero, zero
    for _ in range(2):  # with the signs as they are, then so that all sums are positive
        carry, below = zero, zero
        # Each a value of its own: the compiler keeps a name that is given an equal value out of the loop.
        before1 = tl.zeros((WIDTH,), tl.int64)
        before2 = tl.zeros((WIDTH,), tl.int64)
        before3 = tl.zeros((WIDTH,), tl.int64)
        limb3, limb2, limb1, limb0, inexact, top = zero, zero, zero, zero, zero, zero
        for window in range(first, last + 1):
            limb = carry
            for number in range(num_inputs):
                element = _element(line, number, num_inputs, start, left, SPEC, WIDTH, False)
                limb += _bits_in(window, element.to(tl.int64, bitcast=True), flip)
            carry = limb >> _LIMB_BITS
            limb = limb & _LIMB_MASK
            counts = limb != 0
            limb3 = tl.where(counts, limb, limb3)
            limb2 = tl.where(counts, before1, limb2)
            limb1 = tl.where(counts, before2, limb1)
            limb0 = tl.where(counts, before3, limb0)
            inexact = tl.where(counts, below, inexact)
            top = tl.where(counts, window, top)
            below = below | before3
            before3, before2, before1 = before2, before1, limb
        flip = flip ^ (carry >> 63)

    # Long division, whose remainders stay below 2**31.
    wide = divisor.to(tl.int64)
    quotient3 = limb3 // wide
    limb2 = ((limb3 - quotient3 * wide) << _LIMB_BITS) | limb2
    quotient2 = limb2 // wide
    limb1 = ((limb2 - quotient2 * wide) << _LIMB_BITS) | limb1
    quotient1 = limb1 // wide
    limb0 = ((limb1 - quotient1 * wide) << _LIMB_BITS) | limb0
    quotient0 = limb0 // wide
    inexact = inexact | (limb0 - quotient0 * wide)
    is_below = quotient3 == 0
    high = tl.maximum(tl.where(is_below, quotient2, quotient3), 1)
    middle = tl.where(is_below, quotient1, quotient2)
    low = tl.where(is_below, quotient0, quotient1)
    inexact = tl.where(is_below, inexact, inexact | quotient0)
    top = tl.where(is_below, top - 1, top)

    # A head of 62 bits, and where its lowest one is.
    width = (high.to(tl.float64).to(tl.int64, bitcast=True) >> 52) - 1022
    lower = ((middle & 3) << _LIMB_BITS) | low
    head = (((high << 30) | (middle >> 2)) << (32 - width)) | (lower >> (width + 2))
    inexact = inexact | (lower & ((zero + 1 << (width + 2)) - 1))
    place = (top - 2) * _LIMB_BITS + width + 2
    dropped = tl.minimum(tl.maximum(-place, 9), 63)
    kept = head >> dropped
    tail = head & ((zero + 1 << dropped) - 1)
    if SPEC.result == "float64":
        half = zero + 1 << (dropped - 1)
        is_more = (tail > half) | ((tail == half) & ((inexact != 0) | ((kept & 1) != 0)))
        kept = kept + is_more.to(tl.int64)
    else:
        kept = tl.where((tail | inexact) != 0, kept | 1, kept)
    # Where more than 63 bits are dropped, nothing is kept.
    field = tl.maximum(place + dropped, 0)
    bits = tl.where(field > 2045, _INFINITY, (tl.minimum(field, 2045) << 52) + kept)
    # A sum of nothing but -0.0 is -0.0; any other zero is positive.
    is_zero = limb3 == 0
    bits = tl.where(is_zero, 0, bits) | (tl.where(is_zero, signs, flip) & _SIGN)
    return tl.where(special == 0, bits.to(tl.float64, bitcast=True), special)


@triton.jit
def _bits_in(window, bits, flip):
    """Returns the 32 bits of a float64 that belong to a limb, with its sign; negated where `flip` is -1."""
    field = (bits >> 52) & 0x7FF
    significand = (bits & ((1 << 52) - 1)) | (tl.minimum(field, 1) << 52)
    shift = window * _LIMB_BITS - (tl.maximum(field, 1) - 1)
    part = significand >> tl.minimum(tl.maximum(shift, 0), 63)
    part = (part << tl.minimum(tl.maximum(-shift, 0), _LIMB_BITS)) & _LIMB_MASK
    sign = (bits >> 63) ^ flip
    return (part ^ sign) - sign
