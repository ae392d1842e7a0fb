"""Sums that are certain to be rounded once, or say that they are not, emitted as LLVM code."""

# ruff: noqa: D102, ARG002 - what a method does is said once, in Arithmetic; not each needs all it is given

from __future__ import annotations

from llvmlite import ir

from crossdevice.kernels.host.llvm.arithmetic import Arithmetic, Wide
from crossdevice.kernels.host.llvm.conversions import (
    as_double,
    as_single,
    from_double,
    from_single,
    in_memory_order,
    in_widened_order,
)
from crossdevice.kernels.host.llvm.lanes import DOUBLE, INT16, INT64, SINGLE, STORED, State, Value, Vector
from crossdevice.kernels.host.reference.long_accumulator import FORMATS
from crossdevice.kernels.host.reference.rounding import two_sum
from crossdevice.values.dtypes import ITEM_BYTES


class Exact(Arithmetic):
    """Sums of narrow floats in float64 that are exact, or may be wrong by less than what rounds them.

    They are exact wherever the exponents of a column lie close together: 29 bits are to spare for a float32.
    Of the others the largest element bounds what rounding took, and nearly always all numbers within that
    bound have one result: for most it is enough to look at the bits that rounding drops. What is left lies
    near the middle of two.
    """

    bytes_per_lane = 16
    bytes_ahead = 256
    total_bits = 53
    cancelled_bits = 8
    """Number of leading bits of the largest element that a sum may lose before a closer check."""

    def started(self, element: Vector) -> State:
        return self._as_term(element), *edges_of(element)

    def combined(self, state: State, element: Vector) -> State:
        return state[0] + self._as_term(element), *with_edges(state[1:], element)

    def settled(self, state: State, divisor: Value, num_inputs: Value) -> tuple[Vector, Vector | None]:
        total = state[0]

        def quotient_by(number: Vector) -> Vector:
            near = total / number
            # The remainder is exact, and has the sign of quotient - near, as the divisor is positive.
            return near.rounded_to_odd((-near).times_plus(number, total))

        quotient = total.divided(divisor, quotient_by)
        result = from_double(quotient, self.dtype)
        is_far = self._is_far_apart(state, num_inputs)
        lanes = is_far.lanes

        def uncertain() -> State:
            near = is_far & self._may_be_near_the_middle(quotient, result, state[1], num_inputs)
            return lanes.unless(
                lanes.build.not_(near.is_any()),
                (near,),
                lambda: (near & self._is_open(quotient, state[1], divisor, num_inputs),),
            )

        (doubt,) = lanes.unless(lanes.build.not_(is_far.is_any()), (is_far,), uncertain)
        return result, doubt

    def fallback(self) -> Arithmetic | None:
        return Enclosed(self.op, self.dtype)

    def _as_term(self, stored: Vector) -> Vector:
        return as_double(stored, self.dtype)

    def _is_far_apart(self, state: State, num_inputs: Value) -> Vector:
        """Marks columns with exponents too far apart for a sum without rounding."""
        # With e the difference of exponents and p the precision, N < 2**n values have sums of e + p + n bits.
        return are_far_apart(state[1:], self.dtype, self.total_bits, num_inputs)

    def _may_be_near_the_middle(
        self, quotient: Vector, result: Vector, largest: Vector, num_inputs: Value
    ) -> Vector:
        """Marks elements for which `_is_open` may hold, by the bits that rounding the quotient drops.

        Unless most bits of the largest element have cancelled, a quotient is wrong by few units of its last
        place, and only those within that of the middle of two results are in doubt.
        """
        lanes, build, form = quotient.lanes, quotient.lanes.build, FORMATS[self.dtype]
        dropped, one = 53 - form.precision, 1 << form.precision - 1
        # The margin of `_is_open` in units of the last place, which is 2**-53 of the quotient or more.
        number = build.add(build.mul(num_inputs, num_inputs), ir.Constant(INT64, 8))
        units = build.shl(number, ir.Constant(INT64, 2 + self.cancelled_bits))
        middle = ir.Constant(INT64, 1 << dropped - 1)
        units = build.select(build.icmp_unsigned("<", units, middle), units, middle)
        above = (quotient.bits() & (1 << dropped) - 1) - lanes.spread(build.sub(middle, units))
        is_near = above <= lanes.spread(build.shl(units, ir.Constant(INT64, 1)))
        # Next to the subnormal numbers rounding drops more bits.
        smallest = (2 + self.cancelled_bits) * one
        least = (largest > smallest).select(largest, smallest) - self.cancelled_bits * one
        is_small = result.bits() & infinity_bits(self.dtype) + one - 1 < least
        return in_memory_order(is_near, self.dtype) | is_small

    def _is_open(self, quotient: Vector, largest: Vector, divisor: Value, num_inputs: Value) -> Vector:
        """Marks elements for which the numbers that the mean may be have several results."""
        lanes, build = quotient.lanes, quotient.lanes.build
        # N additions of at most N times the largest element are wrong by half of 2**-52 each, and so are the
        # division and what is done here; four times that is on the safe side.
        number = build.uitofp(num_inputs, DOUBLE)
        share = build.fadd(build.fmul(number, number), ir.Constant(DOUBLE, 8.0))
        share = build.fdiv(build.fmul(share, ir.Constant(DOUBLE, 2.0**-51)), divisor)
        margin = self._as_term(largest.converted("bitcast", STORED[self.dtype])) * lanes.spread(share)
        bounds = quotient - margin, quotient + margin
        if self.dtype == "float32":  # without a look for NaN
            low, high = (bound.converted("fptrunc", SINGLE).bits() for bound in bounds)
        else:
            low, high = (from_double(bound, self.dtype).bits() for bound in bounds)
        # Where an element is infinite or NaN, the sum is what it is in any order.
        return (low != high) & (largest < infinity_bits(self.dtype))


def edges_of(element: Vector) -> State:
    """Returns the magnitude as an integer, and that minus 1, which wraps to the largest for zeros."""
    bits = element.bits()
    magnitude = bits & ((1 << (bits.kind.width - 1)) - 1)
    return magnitude, magnitude - 1


def with_edges(edges: State, element: Vector) -> State:
    """Updates the largest and the smallest of `edges_of` with one more element."""
    (largest, smallest), (magnitude, below) = edges, edges_of(element)
    return (
        (largest > magnitude).select(largest, magnitude),
        (smallest < below).select(smallest, below),
    )


def are_far_apart(edges: State, dtype: str, total_bits: int, num_inputs: Value) -> Vector:
    """Marks exponents that differ by more than `total_bits` less the precision and the bits of num_inputs."""
    largest, smallest = edges
    lanes, build, precision = largest.lanes, largest.lanes.build, FORMATS[dtype].precision
    zeros = build.ctlz(num_inputs, ir.Constant(ir.IntType(1), 0))
    allowed = build.add(zeros, ir.Constant(INT64, total_bits - precision - 64))
    # Exponents differ by no more than that if the integers do, as these have exponents in their upper bits.
    allowed = build.trunc(build.shl(allowed, ir.Constant(INT64, precision - 1)), largest.kind)
    return largest - smallest >= lanes.spread(allowed)


def infinity_bits(dtype: str) -> int:
    """Returns the bits of infinity: the exponent above all others."""
    precision = FORMATS[dtype].precision
    return (1 << 8 * ITEM_BYTES[dtype] - 1) - (1 << precision - 1)


class ExactInSingle(Exact):
    """Sums of bfloat16 in float32 where they are exact, so equal to those in float64, at half the cost."""

    bytes_per_lane = 8
    total_bits = 24

    def settled(self, state: State, divisor: Value, num_inputs: Value) -> tuple[Vector, Vector | None]:
        return self.finished(state, divisor), self.doubted(state, divisor, num_inputs)

    def finished(self, state: State, divisor: Value) -> Vector:
        total = state[0]

        def quotient() -> State:
            return (from_double(total.converted("fpext", DOUBLE) / total.lanes.spread(divisor), self.dtype),)

        return total.lanes.unless_one(divisor, (from_single(total, self.dtype),), quotient)[0]

    def doubted(self, state: State, divisor: Value, num_inputs: Value) -> Vector | None:
        exponent = state[1] >> FORMATS[self.dtype].precision - 1
        lanes, build = exponent.lanes, exponent.lanes.build
        # Above, a sum might leave the range of float32, and come back.
        zeros = build.ctlz(num_inputs, ir.Constant(ir.IntType(1), 0))
        allowed = lanes.spread(build.trunc(build.add(zeros, ir.Constant(INT64, 254 - 64)), INT16))
        return exponent.compare(">", allowed, signed=True) | self._is_far_apart(state, num_inputs)

    def fallback(self) -> Arithmetic | None:
        return Wide(self.op, self.dtype)

    def _as_term(self, stored: Vector) -> Vector:
        return as_single(stored, self.dtype)


class TrueInSingle(ExactInSingle):
    """The same, and in float64 as `Exact` does it where float32 does not hold a sum."""

    def fallback(self) -> Arithmetic | None:
        return Exact(self.op, self.dtype)


class ExactHalf(Wide):
    """Sums of float16 in float64: its 40-bit numbers add up by the thousand without rounding."""

    def doubted(self, state: State, divisor: Value, num_inputs: Value) -> Vector | None:
        # A quotient by less than 2**12 that is not the middle of two results is too far from it to be rounded
        # to it: both are multiples of 2**-25 over the divisor, and float64 rounds to 2**-37 at most.
        build, most = state[0].lanes.build, 1 << 12
        has_many = build.icmp_unsigned(">=", num_inputs, ir.Constant(INT64, most))
        is_large = build.fcmp_ordered(">=", divisor, ir.Constant(DOUBLE, float(most)))
        return state[0].lanes.spread(build.or_(has_many, is_large))

    def fallback(self) -> Arithmetic | None:
        return Enclosed(self.op, self.dtype)


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

    def settled(self, state: State, divisor: Value, num_inputs: Value) -> tuple[Vector, Vector | None]:
        enclosure = self._enclosure(state, divisor, num_inputs)
        return self._rounded(enclosure), self._is_open(enclosure, state[0])

    def _rounded(self, enclosure: State) -> Vector:
        near, rest, _ = enclosure
        if self.result_dtype == "float64":
            return near
        odd = near.rounded_to_odd(rest)
        if self.result_dtype != self.dtype:
            odd = in_widened_order(odd, self.result_dtype)
        return from_double(odd, self.result_dtype)

    def _is_open(self, enclosure: State, total: Vector) -> Vector:
        near, rest, doubt = enclosure
        # Twice the doubt, as adding it up has lost some, and more than what rounding rest +- margin may lose.
        margin = doubt * 4.0 + abs(rest) * 2.0**-51
        is_settled = (near + (rest + margin) == near) & (near + (rest - margin) == near)
        if self.result_dtype != "float64":
            # To round to odd, the side on which the number lies must be known too.
            is_settled &= abs(rest) > margin
        is_open = ~(is_settled | (doubt == 0.0))
        # An infinite total may be an overflow on the way to a finite sum.
        return is_open | ~near.is_finite() if self._may_overflow else is_open & total.is_finite()

    @property
    def _may_overflow(self) -> bool:
        """Returns True if a sum of finite elements may leave the range of float64."""
        return self.dtype == "float64"

    def _enclosure(self, state: State, divisor: Value, num_inputs: Value) -> State:
        total, errors, lost = state
        near, rest = two_sum_keeping_zero(total, errors)

        def quotient() -> State:
            return self._quotient(near, rest, lost, total.lanes.spread(divisor))

        return total.lanes.unless_one(divisor, (near, rest, lost), quotient)

    def _quotient(self, near: Vector, rest: Vector, doubt: Vector, number: Vector) -> State:
        """Does one step of long division: quotient, remainder, and the remainder's quotient."""
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


class ExactDouble(Enclosed):
    """Sums of float64 with their rounding errors, exact where exponents are close together.

    What is lost of an addition is a multiple of the last place of the smallest element, so 53 more bits hold
    such errors without any rounding. Of the others the largest element bounds what is lost.
    """

    bytes_per_lane = 32
    bytes_ahead = 512

    def started(self, element: Vector) -> State:
        lanes, (magnitude, below) = element.lanes, _double_edges_of(element)
        # Negative values become NaN, which compares as not less than anything.
        smallest = (below < float("inf")).select(below, lanes.constant(DOUBLE, float("inf")))
        return element, lanes.constant(DOUBLE, 0.0), magnitude, smallest

    def combined(self, state: State, element: Vector) -> State:
        total, errors, largest, smallest = state
        magnitude, below = _double_edges_of(element)
        total, error = two_sum(total, element)
        return (
            total,
            errors + error,
            (magnitude > largest).select(magnitude, largest),
            (below < smallest).select(below, smallest),
        )

    def settled(self, state: State, divisor: Value, num_inputs: Value) -> tuple[Vector, Vector | None]:
        total, errors, largest, smallest = state
        lanes, build = total.lanes, total.lanes.build
        near, rest = two_sum_keeping_zero(total, errors)
        # N - 1 errors of at most 2**-53 of N times the largest element each. Unless the last place of the
        # smallest element is 53 bits or more below that, their sum is exact, and else rounded as often.
        number = build.uitofp(num_inputs, DOUBLE)
        share = build.fmul(build.fmul(number, number), ir.Constant(DOUBLE, 2.0**-54))
        limit = (smallest.bits() & infinity_bits(self.dtype)).converted("bitcast", DOUBLE)
        is_exact = (largest * lanes.spread(share) <= limit) & (errors == errors)
        lost = largest * lanes.spread(build.fmul(build.fmul(share, number), ir.Constant(DOUBLE, 2.0**-49)))

        def summed() -> State:
            # Rounding is monotonic: what lies between numbers that are rounded to one result is, too.
            are_equal = total + (errors - lost) == total + (errors + lost)
            return (~(is_exact | are_equal),)

        def scaled() -> State:
            nowhere = lanes.constant(ir.IntType(1), 0)
            (is_open,) = lanes.unless(build.not_((~is_exact).is_any()), (nowhere,), summed)
            factor = lanes.spread(build.fdiv(ir.Constant(DOUBLE, 1.0), divisor))

            def multiplied() -> State:
                # No bits are lost far above the subnormal range; an infinite sum may have a finite mean.
                quotient = near * factor
                has_all = (abs(quotient) >= 2.0**-900) & near.is_finite()
                return quotient, is_open | (~has_all & (near != 0.0))

            return lanes.unless_one(divisor, (near, is_open), multiplied)

        def divided() -> State:
            # Long division: two digits, and what is left tells how far they are from the quotient.
            digits = lanes.spread(divisor)
            first = near / digits
            remainder, error = two_sum(first.times_plus(-digits, near), rest)
            second = remainder / digits
            left = second.times_plus(-digits, remainder)
            wrong = abs(left) + abs(error) + is_exact.select(0.0, lost)
            twice = lanes.spread(build.fdiv(ir.Constant(DOUBLE, 2.0), divisor))
            margin = wrong * twice + (abs(second) * 2.0**-51 + 2.0**-1000)
            margin = (wrong == 0.0).select(0.0, margin)
            are_equal = first + (second - margin) == first + (second + margin)
            # Remainders are exact only far above the subnormal range.
            is_tiny = ~(abs(first) >= 2.0**-900) & (near != 0.0)
            result = (second == 0.0).select(first, first + second)
            return result, is_tiny | ~are_equal

        result, doubt = lanes.either(lanes.is_power_of_two(divisor), scaled, divided)
        return result, doubt

    def fallback(self) -> Arithmetic | None:
        return Enclosed(self.op, self.dtype)


def _double_edges_of(element: Vector) -> State:
    """Returns `edges_of` as float64."""
    magnitude, below = edges_of(element)
    return magnitude.converted("bitcast", DOUBLE), below.converted("bitcast", DOUBLE)


def two_sum_keeping_zero(high: Vector, low: Vector) -> tuple[Vector, Vector]:
    """Acts like two_sum, but keeps high if low is 0: -0 + 0 loses its sign, and inf + NaN is no sum."""
    near, rest = two_sum(high, low)
    has_low = low.differs(0.0)
    return has_low.select(near, high), has_low.select(rest, 0.0)
