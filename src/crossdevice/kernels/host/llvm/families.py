"""Every kind of arithmetic by its name: a string can be compiled in, and be part of a cache's key."""

from __future__ import annotations

from crossdevice.kernels.host.llvm.arithmetic import (
    Arithmetic,
    Compensated,
    Extreme,
    RoundedHalves,
    TrueMean,
    Wide,
    Wrapping,
    WrappingMean,
)
from crossdevice.kernels.host.llvm.exact import (
    Enclosed,
    Exact,
    ExactDouble,
    ExactHalf,
    ExactInSingle,
    TrueInSingle,
)
from crossdevice.kernels.host.llvm.weighted import (
    Parts,
    Weighted,
    WeightedCompensated,
    WeightedExact,
    WeightedExactInDouble,
)

FAMILIES: dict[str, type[Arithmetic]] = {
    "native": Arithmetic,
    "rounded": RoundedHalves,
    "wide": Wide,
    "compensated": Compensated,
    "extreme": Extreme,
    "wrapping": Wrapping,
    "wrapping_mean": WrappingMean,
    "true_mean": TrueMean,
    "exact": Exact,
    "exact_in_single": ExactInSingle,
    "true_in_single": TrueInSingle,
    "exact_half": ExactHalf,
    "exact_double": ExactDouble,
    "enclosed": Enclosed,
    "parts": Parts,
    "weighted": Weighted,
    "weighted_compensated": WeightedCompensated,
    "weighted_exact": WeightedExact,
    "weighted_exact_in_double": WeightedExactInDouble,
}


def arithmetic_named(name: str) -> Arithmetic:
    """Returns the arithmetic for a name of family, operation, dtype and, for some, the result's dtype.

    >>> arithmetic_named("wide SUM float32").result_dtype
    'float32'
    >>> arithmetic_named("wide SUM bfloat16 float32").result_dtype
    'float32'
    """
    family, op, dtype, *into = name.split(" ")
    arithmetic = FAMILIES[family](op, dtype)
    if into:
        arithmetic.result_dtype = into[0]
    return arithmetic
