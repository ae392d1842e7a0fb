"""Sums that are certain to be rounded once, or say that they are not, emitted as LLVM code."""

# ruff: noqa: D102, ARG002 - what a method does is said once, in Arithmetic; not each needs all it is given

from __future__ import annotations

from typing import Any

from llvmlite import ir

from crossdevice.kernels.host.llvm.arithmetic import Arithmetic, Wide
from crossdevice.kernels.host.llvm.conversions import (
    as_double,
    as_single,
    from_double,
    from_single,
    in_widened_order,
)
from crossdevice.kernels.host.llvm.lanes import DOUBLE, INT16, INT64, Lanes, State, Value, Vector
from crossdevice.kernels.host.reference.long_accumulator import FORMATS
from crossdevice.kernels.host.reference.rounding import two_sum


class Exact(Arithmetic):
    """Sums of narrow floats in float64 that are exact, as nearly all are: 29 bits are to spare for a float32.

    They are exact wherever the exponents of a column lie close enough together.
    """

    bytes_per_lane = 16
    total_bits = 53

    def started(self, element: Vector) -> State:
        bits = element.bits()
        magnitude = bits & ((1 << (bits.kind.width - 1)) - 1)
        # One less, so that zeros, which make no sum longer, become larger than all others.
        return self._as_term(element), magnitude, magnitude - 1

    def combined(self, state: State, element: Vector) -> State:
        total, largest, smallest = state
        term, magnitude, below = self.started(element)
        return (
            total + term,
            (largest > magnitude).select(largest, magnitude),
            (smallest < below).select(smallest, below),
        )

    def finished(self, state: State, divisor: Value) -> Vector:
        total = state[0]

        def quotient() -> State:
            number = total.lanes.spread(divisor)
            near = total / number
            # The remainder is exact, and has the sign of quotient - near, as the divisor is positive.
            return (near.rounded_to_odd((-near).times_plus(number, total)),)

        (result,) = total.lanes.unless_one(divisor, (total,), quotient)
        return from_double(result, self.dtype)

    def doubted(self, state: State, divisor: Value, num_inputs: Value) -> Vector | None:
        _, largest, smallest = state
        # With e the difference of exponents and p the precision, N < 2**n values have sums of e + p + n bits.
        precision = FORMATS[self.dtype].precision
        high, low = (edge >> precision - 1 for edge in (largest, smallest + 1))
        allowed = _less_bits_of(high.lanes, self.total_bits - precision, num_inputs, high.kind)
        return (high - low).compare(">", allowed, signed=True)

    def fallback(self) -> Arithmetic | None:
        return Enclosed(self.op, self.dtype)

    def _as_term(self, stored: Vector) -> Vector:
        return as_double(stored, self.dtype)


def _less_bits_of(lanes: Lanes, number: int, num_inputs: Value, integer: Any) -> Vector:
    """`number` less the bits of num_inputs, in all lanes."""
    build = lanes.build
    zeros = build.ctlz(num_inputs, ir.Constant(ir.IntType(1), 0))
    return lanes.spread(build.trunc(build.add(zeros, ir.Constant(INT64, number - 64)), integer))


class ExactInSingle(Exact):
    """Sums of bfloat16 in float32 where they are exact, so equal to those in float64, at half the cost."""

    bytes_per_lane = 8
    total_bits = 24

    def finished(self, state: State, divisor: Value) -> Vector:
        total = state[0]

        def quotient() -> State:
            return (from_double(total.converted("fpext", DOUBLE) / total.lanes.spread(divisor), self.dtype),)

        return total.lanes.unless_one(divisor, (from_single(total, self.dtype),), quotient)[0]

    def doubted(self, state: State, divisor: Value, num_inputs: Value) -> Vector | None:
        doubted = super().doubted(state, divisor, num_inputs)
        assert doubted is not None
        exponent = state[1] >> FORMATS[self.dtype].precision - 1
        # Above, a sum might leave the range of float32, and come back.
        allowed = _less_bits_of(exponent.lanes, 254, num_inputs, INT16)
        return exponent.compare(">", allowed, signed=True) | doubted

    def fallback(self) -> Arithmetic | None:
        return Wide(self.op, self.dtype)

    def _as_term(self, stored: Vector) -> Vector:
        return as_single(stored, self.dtype)


class Enclosed(Arithmetic):
    """Sums known to lie in near + rest +- doubt, where near is near + rest, rounded; as in `exact.py`."""

    bytes_per_lane = 24

    def widened(self, stored: Vector) -> Vector:
        return as_double(stored, self.dtype)

    def started(self, element: Vector) -> State:
        zero = element.lanes.constant(DOUBLE, 0.0)
        return element, zero, zero

    def combined(self, state: State, element: Vector) -> State:
        total, errors, lost = state
        total, error = two_sum(total, element)
        errors, error = two_sum(errors, error)
        return total, errors, lost + abs(error)

    def finished(self, state: State, divisor: Value) -> Vector:
        near, rest, _ = self._enclosure(state, divisor)
        if self.result_dtype == "float64":
            return near
        odd = near.rounded_to_odd(rest)
        if self.result_dtype != self.dtype:
            odd = in_widened_order(odd, self.result_dtype)
        return from_double(odd, self.result_dtype)

    def doubted(self, state: State, divisor: Value, num_inputs: Value) -> Vector | None:
        near, rest, doubt = self._enclosure(state, divisor)
        # Twice the doubt, as adding it up has lost some, and more than what rounding rest +- margin may lose.
        margin = doubt * 4.0 + abs(rest) * 2.0**-51
        is_settled = (near + (rest + margin) == near) & (near + (rest - margin) == near)
        if self.result_dtype != "float64":
            # To round to odd, the side on which the number lies must be known too.
            is_settled &= abs(rest) > margin
        is_open = ~(is_settled | (doubt == 0.0))
        # An infinite total may be an overflow on the way to a finite sum.
        return is_open | ~near.is_finite() if self._may_overflow else is_open & state[0].is_finite()

    @property
    def _may_overflow(self) -> bool:
        """Whether a sum of finite elements may leave the range of float64."""
        return self.dtype == "float64"

    def _enclosure(self, state: State, divisor: Value) -> State:
        total, errors, lost = state
        near, rest = two_sum_keeping_zero(total, errors)

        def quotient() -> State:
            return self._quotient(near, rest, lost, total.lanes.spread(divisor))

        return total.lanes.unless_one(divisor, (near, rest, lost), quotient)

    def _quotient(self, near: Vector, rest: Vector, doubt: Vector, number: Vector) -> State:
        """One step of long division: quotient, remainder, and the remainder's quotient."""
        first = near / number
        remainder, lost = two_sum(first.times_plus(-number, near), rest)
        second = remainder / number
        left = second.times_plus(-number, remainder)
        is_exact = (abs(left) + abs(lost) == 0.0) & (doubt == 0.0)
        # `lost` and the division put second wrong by 2**-53 each, or 2**-1074 where it underflows.
        wrong = abs(second) * 2.0**-51 + (doubt / number + 2.0**-1000)
        # Remainders are exact only far above the subnormal range.
        is_tiny = ~(abs(first) >= 2.0**-900) & (near != 0.0)
        wrong = is_tiny.select(float("inf"), is_exact.select(0.0, wrong))
        return *two_sum_keeping_zero(first, second), wrong


def two_sum_keeping_zero(high: Vector, low: Vector) -> tuple[Vector, Vector]:
    """Like two_sum, but high stays if low is nothing: -0 + 0 loses its sign, and inf + NaN is no sum."""
    near, rest = two_sum(high, low)
    has_low = low.differs(0.0)
    return has_low.select(near, high), has_low.select(rest, 0.0)
