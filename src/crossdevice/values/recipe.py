"""The computation of one fused pass, as a small hashable value: the key under which kernels are kept."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from crossdevice.values.options import Precision
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.weights import UNKNOWN_WEIGHTS, Weights

Order: TypeAlias = "int | tuple[Order, ...]"
"""Association of inputs: an input's position, or orders combined from left to right.

`(0, 1, 2)` is (x0 + x1) + x2; `((0, 1), (2, 3))` is (x0 + x1) + (x2 + x3).
"""


class Recipe(NamedTuple):
    """The combination of N inputs into one value, which is then written to M outputs.

    `op` is SUM, PROD, MIN, MAX or an order statistic; a mean is a SUM with a `divisor` (None: no division).
    `order` counts under `"fast"` only: `"accurate"` combines inputs in their given order, `"exact"` has no
    order. With `weights`, `op` is SUM, and there is no divisor but theirs.
    """

    op: ReduceOp
    precision: Precision
    divisor: int | None = None
    order: Order | None = None
    weights: Weights | None = None

    def of_sorted(self, num_inputs: int) -> Recipe:
        """Returns the mean of the middle of each sorted column, for order statistics."""
        start, stop = self.op.sorted_range(num_inputs)
        return Recipe(ReduceOp.SUM, self.precision, stop - start)

    @property
    def key(self) -> Recipe:
        """The recipe under which kernels are kept: weights are arguments of a kernel, not compiled in."""
        return self if self.weights is None else self._replace(weights=UNKNOWN_WEIGHTS)

    def with_weights(self, weights: Weights | None) -> Recipe:
        """Adds weights that were unknown when the recipe was made, if it takes any."""
        return self if weights is None or self.weights is None else self._replace(weights=weights)


COPYING = Recipe(ReduceOp.SUM, "fast")
"""A pass over a single input that copies it."""
