"""Sums of weights times values, emitted as LLVM code."""

# ruff: noqa: D102 - what a method does is said once, in Arithmetic; not each needs all it is given

from __future__ import annotations

from llvmlite import ir

from crossdevice.kernels.host.llvm.arithmetic import Arithmetic, Compensated, Wide
from crossdevice.kernels.host.llvm.conversions import from_double
from crossdevice.kernels.host.llvm.exact import Enclosed
from crossdevice.kernels.host.llvm.lanes import DOUBLE, INT32, Lanes, State, Value


class Weighted(Wide):
    """Products and their sum in float64, rounded once."""

    is_weighted = True

    def with_term(self, lanes: Lanes, state: State | None, element: Value, weight: Value) -> State:
        product = lanes.build.fmul(element, weight)
        return (product,) if state is None else self.combined(lanes, state, product)

    def finished(self, lanes: Lanes, state: State, divisor: Value) -> Value:
        return super().finished(lanes, state[:1], divisor)


class WeightedExactInDouble(Weighted):
    """Exact sums of narrow floats, where whatever those in float64 may be wrong by is rounded away.

    The sum of all magnitudes says how wrong they may be. Nearly all are certain, at the price of one addition
    per element; those that lie near the middle of two results are not.
    """

    bytes_per_lane = 16

    def with_term(self, lanes: Lanes, state: State | None, element: Value, weight: Value) -> State:
        product = lanes.build.fmul(element, weight)
        size = lanes.magnitude(product)
        if state is None:
            return product, size
        total, sizes = state
        return lanes.build.fadd(total, product), lanes.build.fadd(sizes, size)

    def doubted(self, lanes: Lanes, state: State, divisor: Value, num_inputs: Value) -> Value | None:
        build = lanes.build
        total, sizes, *_ = state
        # N products and additions, the divisor and the division are wrong by 2**-53 of all magnitudes each;
        # four times that leaves room for what is lost here.
        share = build.fadd(build.sitofp(num_inputs, DOUBLE), ir.Constant(DOUBLE, 8.0))
        share = build.fdiv(build.fmul(share, ir.Constant(DOUBLE, 2.0**-51)), divisor)
        margin = build.fmul(sizes, lanes.spread(share))
        quotient = lanes.divided(total, divisor)
        low, high = (
            self._bits(lanes, from_double(lanes, bound, self.dtype))
            for bound in (build.fsub(quotient, margin), build.fadd(quotient, margin))
        )
        return build.or_(build.icmp_signed("!=", low, high), build.not_(lanes.is_finite(total)))

    def fallback(self) -> Arithmetic | None:
        return WeightedNarrow(self.op, self.dtype)

    def _bits(self, lanes: Lanes, stored: Value) -> Value:
        return stored if self.dtype == "bfloat16" else lanes.bits(stored)


class WeightedCompensated(Compensated):
    """float64 products and their sum, with the rounding errors of all of them added back at the end."""

    is_weighted = True

    def with_term(self, lanes: Lanes, state: State | None, element: Value, weight: Value) -> State:
        product, error, _ = lanes.two_product(element, weight)
        grown = self.started(lanes, product) if state is None else self.combined(lanes, state, product)
        total, errors = grown
        return total, lanes.build.fadd(errors, error)

    def finished(self, lanes: Lanes, state: State, divisor: Value) -> Value:
        return super().finished(lanes, state[:2], divisor)

    def _remainder(self, lanes: Lanes, dividend: Value, quotient: Value, number: Value) -> Value:
        product, error, _ = lanes.two_product(quotient, number)
        return lanes.build.fsub(lanes.build.fsub(dividend, product), error)


class WeightedExact(Enclosed):
    """Sums of exact products, known to lie in near + rest +- doubt."""

    is_weighted = True
    bytes_per_lane = 32

    def with_term(self, lanes: Lanes, state: State | None, element: Value, weight: Value) -> State:
        build, zero = lanes.build, lanes.constant(DOUBLE, 0.0)
        product, error, is_known = lanes.two_product(element, weight)
        grown = self.started(lanes, product) if state is None else self.combined(lanes, state, product)
        total, errors, lost = grown
        errors, more = lanes.two_sum(errors, error)
        lost = build.fadd(lost, lanes.magnitude(more))
        is_zero = build.or_(build.fcmp_ordered("==", element, zero), build.fcmp_ordered("==", weight, zero))
        unknown = build.select(build.or_(is_known, is_zero), zero, lanes.constant(DOUBLE, float("inf")))
        return total, errors, build.fadd(lost, unknown)

    @property
    def _may_overflow(self) -> bool:
        return True

    def _enclosure(self, lanes: Lanes, state: State, divisor: Value) -> State:
        total, errors, lost, divisor_rest, divisor_doubt = state
        near, rest = self._two_sum_keeping_zero(lanes, total, errors)

        def quotient() -> State:
            return self._weighted_quotient(
                lanes, (near, rest, lost), lanes.spread(divisor), divisor_rest, divisor_doubt
            )

        build, zero = lanes.build, ir.Constant(DOUBLE, 0.0)
        has_rest = build.fcmp_ordered("!=", build.extract_element(divisor_rest, ir.Constant(INT32, 0)), zero)
        divides = build.or_(has_rest, build.fcmp_ordered("!=", divisor, ir.Constant(DOUBLE, 1.0)))
        return lanes.unless(build.not_(divides), (near, rest, lost), quotient)

    def _weighted_quotient(
        self, lanes: Lanes, dividend: State, number: Value, divisor_rest: Value, divisor_doubt: Value
    ) -> State:
        """Like `_quotient`, by number + divisor_rest +- divisor_doubt."""
        build, zero = lanes.build, lanes.constant(DOUBLE, 0.0)
        near, rest, doubt = dividend
        first = build.fdiv(near, number)
        remainder = lanes.fused_multiply_add(build.fneg(first), number, near)
        # What the quotient times the rest of the divisor takes away, as a product and its error.
        taken = build.fmul(first, divisor_rest)
        of_taken = lanes.fused_multiply_add(first, divisor_rest, build.fneg(taken))
        remainder, lost = lanes.two_sum(remainder, rest)
        remainder, more = lanes.two_sum(remainder, build.fneg(taken))
        second = build.fdiv(remainder, number)
        left = lanes.fused_multiply_add(build.fneg(second), number, remainder)
        wrong = build.fadd(lanes.magnitude(lost), lanes.magnitude(more))
        wrong = build.fadd(wrong, build.fadd(lanes.magnitude(of_taken), doubt))
        wrong = build.fadd(wrong, build.fmul(lanes.magnitude(first), divisor_doubt))
        second_rest = build.fmul(second, divisor_rest)
        is_exact = build.fcmp_ordered(
            "==",
            build.fadd(wrong, build.fadd(lanes.magnitude(left), lanes.magnitude(second_rest))),
            zero,
        )
        # The division and the divisor's rest put second wrong by 2**-53 each; 2**-1000 is what underflows.
        wrong = build.fadd(
            build.fdiv(build.fmul(wrong, lanes.constant(DOUBLE, 2.0)), number),
            build.fadd(
                build.fmul(lanes.magnitude(second), lanes.constant(DOUBLE, 2.0**-51)),
                lanes.constant(DOUBLE, 2.0**-1000),
            ),
        )
        # Remainders are exact only far above the subnormal range, also those of the quotient times `number`.
        is_tiny = build.and_(
            build.or_(
                build.fcmp_unordered("<", lanes.magnitude(first), lanes.constant(DOUBLE, 2.0**-600)),
                build.fcmp_unordered("<", lanes.magnitude(near), lanes.constant(DOUBLE, 2.0**-600)),
            ),
            build.fcmp_unordered("!=", near, zero),
        )
        wrong = build.select(
            is_tiny, lanes.constant(DOUBLE, float("inf")), build.select(is_exact, zero, wrong)
        )
        return *self._two_sum_keeping_zero(lanes, first, second), wrong


class WeightedNarrow(WeightedExact):
    """The same for narrow floats, whose products with weights are never too small or large for their errors.

    Rounding errors are added up without looking after those of that sum: the sum of their magnitudes, at most
    2**15 of each kind, says what it may be wrong by, and whether there are any at all.
    """

    bytes_per_lane = 24

    def with_term(self, lanes: Lanes, state: State | None, element: Value, weight: Value) -> State:
        build = lanes.build
        product = build.fmul(element, weight)
        error = lanes.fused_multiply_add(element, weight, build.fneg(product))
        if state is None:
            return product, error, lanes.magnitude(error)
        total, errors, sizes = state
        total, lost = lanes.two_sum(total, product)
        size = build.fadd(lanes.magnitude(error), lanes.magnitude(lost))
        return total, build.fadd(errors, build.fadd(error, lost)), build.fadd(sizes, size)

    def _enclosure(self, lanes: Lanes, state: State, divisor: Value) -> State:
        total, errors, sizes, *divisor_parts = state
        doubt = lanes.build.fmul(sizes, lanes.constant(DOUBLE, 2.0**-36))
        return super()._enclosure(lanes, (total, errors, doubt, *divisor_parts), divisor)
