"""Sums of weights times values, emitted as LLVM code."""

# ruff: noqa: D102, ARG002 - what a method does is said once, in Arithmetic; not each needs all it is given

from __future__ import annotations

from llvmlite import ir

from crossdevice.kernels.host.llvm.arithmetic import Arithmetic, Compensated, Wide
from crossdevice.kernels.host.llvm.conversions import from_double
from crossdevice.kernels.host.llvm.exact import Enclosed, two_sum_keeping_zero
from crossdevice.kernels.host.llvm.lanes import DOUBLE, State, Value, Vector
from crossdevice.kernels.host.reference.rounding import two_sum


class Weighted(Wide):
    """Products and their sum in float64, rounded once."""

    is_weighted = True

    def with_term(self, state: State | None, element: Vector, weight: Vector) -> State:
        product = element * weight
        return (product,) if state is None else self.combined(state, product)


class WeightedExactInDouble(Weighted):
    """Weighted sums of narrow floats in float64, exact wherever the final rounding removes their errors.

    The sum of all magnitudes says how wrong they may be. Nearly all are certain, at the price of one addition
    per element; those that lie near the middle of two results are not.
    """

    bytes_per_lane = 16

    def with_term(self, state: State | None, element: Vector, weight: Vector) -> State:
        product = element * weight
        if state is None:
            return product, abs(product)
        total, sizes = state
        return total + product, sizes + abs(product)

    def finished(self, state: State, divisor: Value) -> Vector:
        return super().finished(state[:1], divisor)

    def doubted(self, state: State, divisor: Value, num_inputs: Value) -> Vector | None:
        total, sizes, *_ = state
        lanes, build = total.lanes, total.lanes.build
        # N products and additions, the divisor and the division are wrong by 2**-53 of all magnitudes each;
        # four times that leaves room for what is lost here.
        share = build.fadd(build.sitofp(num_inputs, DOUBLE), ir.Constant(DOUBLE, 8.0))
        share = build.fdiv(build.fmul(share, ir.Constant(DOUBLE, 2.0**-51)), divisor)
        margin, quotient = sizes * lanes.spread(share), total.divided(divisor)
        bounds = quotient - margin, quotient + margin
        low, high = (from_double(bound, self.result_dtype).bits() for bound in bounds)
        return (low != high) | ~total.is_finite()

    def fallback(self) -> Arithmetic | None:
        return WeightedNarrow(self.op, self.dtype)


class WeightedCompensated(Compensated):
    """float64 products and their sum, with the rounding errors of all of them added back at the end."""

    is_weighted = uses_divisor_rest = True

    def with_term(self, state: State | None, element: Vector, weight: Vector) -> State:
        product, error, _ = element.two_product(weight)
        total, errors = self.started(product) if state is None else self.combined(state, product)
        return total, errors + error

    def finished(self, state: State, divisor: Value) -> Vector:
        total, errors, divisor_rest, _ = state
        return self._divided((total, errors), divisor, divisor_rest)

    def _remainder(self, dividend: Vector, quotient: Vector, number: Vector) -> Vector:
        product, error, _ = quotient.two_product(number)
        return dividend - product - error


class WeightedExact(Enclosed):
    """Sums of exact products, known to lie in near + rest +- doubt."""

    is_weighted = uses_divisor_rest = True
    bytes_per_lane = 32

    def with_term(self, state: State | None, element: Vector, weight: Vector) -> State:
        product, error, is_known = element.two_product(weight)
        total, errors, lost = self.started(product) if state is None else self.combined(state, product)
        errors, more = two_sum(errors, error)
        is_zero = (element == 0.0) | (weight == 0.0)
        unknown = (is_known | is_zero).select(0.0, element.lanes.constant(DOUBLE, float("inf")))
        return total, errors, lost + abs(more) + unknown

    @property
    def _may_overflow(self) -> bool:
        return True

    def _enclosure(self, state: State, divisor: Value, num_inputs: Value) -> State:
        total, errors, lost, divisor_rest, divisor_doubt = state
        near, rest = two_sum_keeping_zero(total, errors)
        lanes = total.lanes

        def quotient() -> State:
            number = lanes.spread(divisor)
            return self._weighted_quotient((near, rest, lost), number, divisor_rest, divisor_doubt)

        return lanes.unless_one(divisor, (near, rest, lost), quotient, divisor_rest)

    def _weighted_quotient(
        self, dividend: State, number: Vector, divisor_rest: Vector, divisor_doubt: Vector
    ) -> State:
        """Acts like `_quotient`, for number + divisor_rest +- divisor_doubt."""
        near, rest, doubt = dividend
        first = near / number
        # What the quotient times the rest of the divisor takes away, as a product and its error.
        taken = first * divisor_rest
        of_taken = first.times_plus(divisor_rest, -taken)
        remainder, lost = two_sum((-first).times_plus(number, near), rest)
        remainder, more = two_sum(remainder, -taken)
        second = remainder / number
        left = (-second).times_plus(number, remainder)
        wrong = abs(lost) + abs(more) + (abs(of_taken) + doubt) + abs(first) * divisor_doubt
        is_exact = wrong + (abs(left) + abs(second * divisor_rest)) == 0.0
        # The division and the divisor's rest put second wrong by 2**-53 each; 2**-1000 is what underflows.
        wrong = wrong * 2.0 / number + (abs(second) * 2.0**-51 + 2.0**-1000)
        # Remainders are exact only far above the subnormal range, also those of the quotient times `number`.
        is_tiny = ~((abs(first) >= 2.0**-600) & (abs(near) >= 2.0**-600)) & (near != 0.0)
        wrong = is_tiny.select(float("inf"), is_exact.select(0.0, wrong))
        return *two_sum_keeping_zero(first, second), wrong


class Parts(WeightedExact):
    """float64 numbers that add up to a sum, over a divisor that float64 may not hold, in any float dtype."""

    is_weighted = False

    def combined(self, state: State, element: Vector) -> State:
        total, errors, lost = state
        total, error = two_sum_keeping_zero(total, element)
        errors, error = two_sum(errors, error)
        return total, errors, lost + abs(error)


class WeightedNarrow(WeightedExact):
    """Weighted sums of narrow floats: the rounding error of a product is always a float64.

    Rounding errors are added up without looking after those of that sum: the sum of their magnitudes, at most
    2**15 of each kind, says what it may be wrong by, and whether there are any at all.
    """

    bytes_per_lane = 24

    def with_term(self, state: State | None, element: Vector, weight: Vector) -> State:
        product = element * weight
        error = element.times_plus(weight, -product)
        if state is None:
            return product, error, abs(error)
        total, errors, sizes = state
        total, lost = two_sum(total, product)
        return total, errors + (error + lost), sizes + (abs(error) + abs(lost))

    def _enclosure(self, state: State, divisor: Value, num_inputs: Value) -> State:
        total, errors, sizes, *divisor_parts = state
        return super()._enclosure((total, errors, sizes * 2.0**-36, *divisor_parts), divisor, num_inputs)
