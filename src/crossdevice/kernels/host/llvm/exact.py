"""Sums that are certain to be rounded once, or say that they are not, emitted as LLVM code."""

# ruff: noqa: D102, ARG002 - what a method does is said once, in Arithmetic; not each needs all it is given

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from crossdevice.kernels.host.llvm.arithmetic import Arithmetic, Wide
from crossdevice.kernels.host.llvm.conversions import (
    as_double,
    as_single,
    from_double,
    from_single,
)
from crossdevice.kernels.host.llvm.lanes import (
    DOUBLE,
    INT16,
    INT64,
    Lanes,
    State,
    Value,
)


class Exact(Arithmetic):
    """Sums of narrow floats in float64 that are exact, as nearly all are: 29 bits are to spare for a float32.

    They are exact wherever the exponents of a column lie close enough together.
    """

    bytes_per_lane = 16
    total_bits = 53

    def started(self, lanes: Lanes, element: Value) -> State:
        magnitude = self._magnitude(lanes, element)
        return self._as_term(lanes, element), magnitude, self._below(lanes, magnitude)

    def combined(self, lanes: Lanes, state: State, element: Value) -> State:
        build = lanes.build
        total, largest, smallest = state
        magnitude = self._magnitude(lanes, element)
        below = self._below(lanes, magnitude)
        return (
            build.fadd(total, self._as_term(lanes, element)),
            build.select(build.icmp_unsigned(">", largest, magnitude), largest, magnitude),
            build.select(build.icmp_unsigned("<", smallest, below), smallest, below),
        )

    def finished(self, lanes: Lanes, state: State, divisor: Value) -> Value:
        total = state[0]

        def quotient() -> State:
            number = lanes.spread(divisor)
            near = lanes.build.fdiv(total, number)
            # The remainder is exact, and has the sign of quotient - near, as the divisor is positive.
            remainder = lanes.fused_multiply_add(lanes.build.fneg(near), number, total)
            return (lanes.rounded_to_odd(near, remainder),)

        (result,) = lanes.unless_one(divisor, (total,), quotient)
        return from_double(lanes, result, self.dtype)

    def doubted(self, lanes: Lanes, state: State, divisor: Value, num_inputs: Value) -> Value | None:
        build = lanes.build
        _, largest, smallest = state
        integer = largest.type.element
        # With e the difference of exponents and p the precision, N < 2**n values have sums of e + p + n bits.
        high = build.lshr(largest, lanes.constant(integer, self._precision - 1))
        lowest = build.add(smallest, lanes.constant(integer, 1))
        low = build.lshr(lowest, lanes.constant(integer, self._precision - 1))
        allowed = self._less_bits_of(lanes, self.total_bits - self._precision, num_inputs, integer)
        return build.icmp_signed(">", build.sub(high, low), allowed)

    def fallback(self) -> Arithmetic | None:
        return Enclosed(self.op, self.dtype)

    @property
    def _precision(self) -> int:
        return {"float16": 11, "bfloat16": 8, "float32": 24}[self.dtype]

    def _as_term(self, lanes: Lanes, stored: Value) -> Value:
        return as_double(lanes, stored, self.dtype)

    def _less_bits_of(self, lanes: Lanes, number: int, num_inputs: Value, integer: Any) -> Value:
        """`number` less the bits of num_inputs, in all lanes."""
        build = lanes.build
        zeros = build.ctlz(num_inputs, ir.Constant(ir.IntType(1), 0))
        return lanes.spread(build.trunc(build.add(zeros, ir.Constant(INT64, number - 64)), integer))

    def _magnitude(self, lanes: Lanes, stored: Value) -> Value:
        bits = stored if self.dtype == "bfloat16" else lanes.bits(stored)
        integer = bits.type.element
        return lanes.build.and_(bits, lanes.constant(integer, (1 << (integer.width - 1)) - 1))

    def _below(self, lanes: Lanes, magnitude: Value) -> Value:
        """One less, so that zeros, which make no sum longer, become larger than all others."""
        return lanes.build.sub(magnitude, lanes.constant(magnitude.type.element, 1))


class ExactInSingle(Exact):
    """Sums of bfloat16 in float32 where they are exact, so equal to those in float64, at half the cost."""

    bytes_per_lane = 8
    total_bits = 24

    def finished(self, lanes: Lanes, state: State, divisor: Value) -> Value:
        build = lanes.build
        place = cgutils.alloca_once_value(build, from_single(lanes, state[0], self.dtype))
        with build.if_then(build.fcmp_ordered("!=", divisor, ir.Constant(DOUBLE, 1.0))):
            wide = build.fpext(state[0], lanes.vector(DOUBLE))
            build.store(from_double(lanes, build.fdiv(wide, lanes.spread(divisor)), self.dtype), place)
        return build.load(place)

    def doubted(self, lanes: Lanes, state: State, divisor: Value, num_inputs: Value) -> Value | None:
        build = lanes.build
        largest = state[1]
        exponent = build.lshr(largest, lanes.constant(INT16, self._precision - 1))
        # Above, a sum might leave the range of float32, and come back.
        may_overflow = build.icmp_signed(">", exponent, self._less_bits_of(lanes, 254, num_inputs, INT16))
        return build.or_(may_overflow, super().doubted(lanes, state, divisor, num_inputs))

    def fallback(self) -> Arithmetic | None:
        return Wide(self.op, self.dtype)

    def _as_term(self, lanes: Lanes, stored: Value) -> Value:
        return as_single(lanes, stored, self.dtype)


class Enclosed(Arithmetic):
    """Sums known to lie in near + rest +- doubt, where near is near + rest, rounded; as in `exact.py`."""

    bytes_per_lane = 24

    def widened(self, lanes: Lanes, stored: Value) -> Value:
        return as_double(lanes, stored, self.dtype)

    def started(self, lanes: Lanes, element: Value) -> State:
        return element, lanes.constant(DOUBLE, 0.0), lanes.constant(DOUBLE, 0.0)

    def combined(self, lanes: Lanes, state: State, element: Value) -> State:
        total, errors, lost = state
        total, error = lanes.two_sum(total, element)
        errors, error = lanes.two_sum(errors, error)
        return total, errors, lanes.build.fadd(lost, lanes.magnitude(error))

    def finished(self, lanes: Lanes, state: State, divisor: Value) -> Value:
        near, rest, _ = self._enclosure(lanes, state, divisor)
        if self.dtype == "float64":
            return near
        return from_double(lanes, lanes.rounded_to_odd(near, rest), self.dtype)

    def doubted(self, lanes: Lanes, state: State, divisor: Value, num_inputs: Value) -> Value | None:
        build = lanes.build
        near, rest, doubt = self._enclosure(lanes, state, divisor)
        # Twice the doubt, as adding it up has lost some, and more than what rounding rest +- margin may lose.
        size_of_rest = lanes.magnitude(rest)
        margin = build.fadd(
            build.fmul(doubt, lanes.constant(DOUBLE, 4.0)),
            build.fmul(size_of_rest, lanes.constant(DOUBLE, 2.0**-51)),
        )
        is_settled = build.and_(
            build.fcmp_ordered("==", build.fadd(near, build.fadd(rest, margin)), near),
            build.fcmp_ordered("==", build.fadd(near, build.fsub(rest, margin)), near),
        )
        if self.dtype != "float64":
            # To round to odd, the side on which the number lies must be known too.
            is_settled = build.and_(is_settled, build.fcmp_ordered(">", size_of_rest, margin))
        is_exact = build.fcmp_ordered("==", doubt, lanes.constant(DOUBLE, 0.0))
        is_open = build.not_(build.or_(is_settled, is_exact))
        if not self._may_overflow:
            return build.and_(is_open, lanes.is_finite(state[0]))
        # An infinite total may be an overflow on the way to a finite sum.
        return build.or_(is_open, build.not_(lanes.is_finite(near)))

    @property
    def _may_overflow(self) -> bool:
        """Whether a sum of finite elements may leave the range of float64."""
        return self.dtype == "float64"

    def _enclosure(self, lanes: Lanes, state: State, divisor: Value) -> State:
        total, errors, lost = state
        near, rest = self._two_sum_keeping_zero(lanes, total, errors)
        return lanes.unless_one(
            divisor,
            (near, rest, lost),
            lambda: self._quotient(lanes, near, rest, lost, lanes.spread(divisor)),
        )

    def _quotient(self, lanes: Lanes, near: Value, rest: Value, doubt: Value, number: Value) -> State:
        """One step of long division: quotient, remainder, and the remainder's quotient."""
        build, zero = lanes.build, lanes.constant(DOUBLE, 0.0)
        first = build.fdiv(near, number)
        minus_number = build.fneg(number)
        remainder = lanes.fused_multiply_add(first, minus_number, near)
        remainder, lost = lanes.two_sum(remainder, rest)
        second = build.fdiv(remainder, number)
        left = lanes.fused_multiply_add(second, minus_number, remainder)
        is_exact = build.and_(
            build.fcmp_ordered("==", build.fadd(lanes.magnitude(left), lanes.magnitude(lost)), zero),
            build.fcmp_ordered("==", doubt, zero),
        )
        # `lost` and the division put second wrong by 2**-53 each, or 2**-1074 where it underflows.
        wrong = build.fmul(lanes.magnitude(second), lanes.constant(DOUBLE, 2.0**-51))
        wrong = build.fadd(wrong, build.fadd(build.fdiv(doubt, number), lanes.constant(DOUBLE, 2.0**-1000)))
        # Remainders are exact only far above the subnormal range.
        is_tiny = build.and_(
            build.fcmp_unordered("<", lanes.magnitude(first), lanes.constant(DOUBLE, 2.0**-900)),
            build.fcmp_unordered("!=", near, zero),
        )
        wrong = build.select(
            is_tiny, lanes.constant(DOUBLE, float("inf")), build.select(is_exact, zero, wrong)
        )
        return *self._two_sum_keeping_zero(lanes, first, second), wrong

    def _two_sum_keeping_zero(self, lanes: Lanes, high: Value, low: Value) -> tuple[Value, Value]:
        """Like two_sum, but high stays if low is nothing: -0 + 0 loses its sign, and inf + NaN is no sum."""
        near, rest = lanes.two_sum(high, low)
        has_low = lanes.build.fcmp_ordered("!=", low, lanes.constant(DOUBLE, 0.0))
        return lanes.build.select(has_low, near, high), lanes.build.select(
            has_low, rest, lanes.constant(DOUBLE, 0.0)
        )
