"""Numbers by which replicas count in a sum or a mean."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from array import array
from fractions import Fraction
from typing import Any

from crossdevice.errors import OptionError, PlanError, ReduceOpError
from crossdevice.values.distributed import DistributedValues
from crossdevice.values.quantities import counted, kind_text
from crossdevice.values.reduce_op import ReduceOp

SMALLEST_WEIGHT, LARGEST_WEIGHT = 2.0**-200, 2.0**200
"""Bounds (about 6e-61 and 2e60) within which the rounding error of a weight times a value is a float64."""


@dataclasses.dataclass(frozen=True, eq=False)
class Weights:
    """Factor of each input, and the divisor of the sum of products.

    The divisor is 1 for a sum; for a mean it is the sum of the factors, `divisor` in float64 plus `rest`.
    """

    factors: tuple[float, ...]
    all_factors: tuple[float, ...] | None = None
    """Factors of all replicas, which add up to the divisor of a mean; None for a sum."""

    @functools.cached_property
    def divisor(self) -> float:
        """The sum of the factors, rounded once; 1 for a sum."""
        return 1.0 if self.all_factors is None else math.fsum(self.all_factors)

    @functools.cached_property
    def rest(self) -> float:
        """The true sum of the factors less `divisor`, rounded once; 0 for a sum."""
        return 0.0 if self.all_factors is None else math.fsum((*self.all_factors, -self.divisor))

    @functools.cached_property
    def exact_divisor(self) -> Fraction:
        """The true sum of the factors; 1 for a sum."""
        return Fraction(1) if self.all_factors is None else sum(map(Fraction, self.all_factors), Fraction())

    def of_one(self, number: int) -> Weights:
        """Returns the weights of one replica alone, divided by the weights of all."""
        return Weights(self.factors[number : number + 1], self.all_factors)

    @functools.cached_property
    def words(self) -> array[float]:
        """Factors, `rest`, and the error bound of that, as kernels read them."""
        # `fsum` is rounded once, so it is 0 only if the true sum is.
        left = math.fsum((*(self.all_factors or (1.0,)), -self.divisor, -self.rest))
        return array("d", [*self.factors, self.rest, 0.0 if left == 0 else abs(self.rest) * 2.0**-52])


def refuse_weights(weights: Weights | None, why: str) -> None:
    """Refuses weights for a reduction that would ignore them."""
    if weights is not None:
        raise PlanError(f"weights were given to a reduction that takes none: {why}")


UNKNOWN_WEIGHTS = Weights(())
"""Stands for any weights where reductions with weights are prepared before these are known."""


def factors_of(given: Any, op: ReduceOp) -> tuple[float, ...]:
    """Returns the weights of a call, one float64 per replica; refuses wrong ones by name.

    >>> factors_of([3, 1], ReduceOp.MEAN)
    (3.0, 1.0)
    """
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise ReduceOpError(f"{op.name} takes no weights; only SUM and MEAN do")
    if isinstance(given, DistributedValues):
        given = given.values
    elif hasattr(given, "tolist"):
        given = given.tolist()
    if not isinstance(given, (list, tuple)):
        raise OptionError(f"weights is {kind_text(given)}; expected a list with one number per replica")
    return tuple([factor_of(item, op, number) for number, item in enumerate(given)])


def check_number(factors: tuple[float, ...], num_replicas: int, entry: str = "") -> None:
    """Refuses more or fewer weights than there are replicas, naming the entry of a batch."""
    if num_replicas != len(factors):
        raise OptionError(
            f"weights has {counted(len(factors), 'number')} for {counted(num_replicas, 'replica')}{entry}; "
            "expected one for each replica"
        )


def factor_of(given: Any, op: ReduceOp, number: int | None = None) -> float:
    """Returns one weight as float64, the only one or that of one replica."""
    if type(given) is float and SMALLEST_WEIGHT <= given <= LARGEST_WEIGHT:
        return given  # as nearly all are
    name = "weight" if number is None else f"weights[{number}]"
    try:
        item = given.item() if hasattr(given, "item") else given
    except (ValueError, RuntimeError):  # an array of several numbers
        item = given
    expected = f"expected a {'finite' if op is ReduceOp.SUM else 'positive'} real number, or 0"
    if isinstance(item, bool) or not isinstance(item, numbers.Real):
        raise OptionError(f"{name} is {_shown(given)}, {kind_text(given)}; {expected}")
    try:
        factor = float(item)
    except OverflowError:
        factor = math.inf
    if not math.isfinite(factor):
        raise OptionError(f"{name} is {_shown(given)}; {expected}")
    if factor < 0 and op is ReduceOp.MEAN:
        raise OptionError(
            f"{name} is {_shown(given)}; {expected}: a mean with negative weights is a sum, "
            "so divide them yourself and use SUM"
        )
    if factor and not SMALLEST_WEIGHT <= abs(factor) <= LARGEST_WEIGHT:
        raise OptionError(
            f"{name} is {_shown(given)}; expected 0 or a magnitude from {SMALLEST_WEIGHT:.0e} to "
            f"{LARGEST_WEIGHT:.0e}"
        )
    return factor


def _shown(given: Any) -> str:
    """Shows what was given, shortened: a whole number may have more digits than Python prints."""
    try:
        text = repr(given)
    except ValueError:
        text = f"{kind_text(given)} of too many digits"
    return text if len(text) <= 60 else f"{text[:57]}..."


def own_weights(factors: tuple[float, ...], op: ReduceOp) -> Weights:  # noqa: ARG001
    """Returns the weights of replicas that are not all that count, and so may all be 0."""
    return Weights(factors)


def weights_for(factors: tuple[float, ...], op: ReduceOp) -> Weights:
    """Returns the weights of all replicas, which must not be all 0 for a mean."""
    if op is ReduceOp.MEAN and not any(factors):
        raise OptionError("weights of a mean are all 0; expected at least one that is positive")
    return Weights(factors, factors if op is ReduceOp.MEAN else None)
