"""Facts about dtypes for reductions, by name, so that no array library is needed.

| dtype | summed wide in | mean becomes |
| --- | --- | --- |
| float16, bfloat16, float32, float8_e4m3fn, float8_e5m2 | float64 | itself |
| float64 | a compensated pair of float64 | itself |
| complex64, complex128 | as their parts | itself |
| integers of 8 and 16 bits | itself (sums wrap) | float32 |
| integers of 32 and 64 bits | itself (sums wrap) | float64 |
| bool | not at all: only MIN and MAX | |
"""

from __future__ import annotations

from collections.abc import Iterable

from crossdevice.errors import DtypeError, ReduceOpError
from crossdevice.values.reduce_op import ReduceOp

FLOATS = ("float16", "bfloat16", "float32", "float64")
SHORT_FLOATS = ("float8_e4m3fn", "float8_e5m2")
"""Floats of 8 bits: kernels are compiled for their sums and means on the host under "accurate" only."""

NARROW_FLOATS = (*SHORT_FLOATS, *(name for name in FLOATS if name != "float64"))

PARTS = {"complex64": "float32", "complex128": "float64"}
"""The dtype of a complex number's real and imaginary parts."""

COMPLEXES = tuple(PARTS)
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")

ITEM_BYTES = {
    **dict.fromkeys((*SHORT_FLOATS, "int8", "uint8", "bool"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float64", "complex64", "int64", "uint64"), 8),
    "complex128": 16,
}

_MEAN_OF_INTEGER = {
    **dict.fromkeys(("int8", "int16", "uint8", "uint16"), "float32"),
    **dict.fromkeys(("int32", "int64", "uint32", "uint64"), "float64"),
}


def result_dtype(dtype: str, op: ReduceOp, is_weighted: bool = False) -> str:
    """Returns the dtype of a reduction's result; it never depends on the number of replicas.

    Sums of weights times integers have the dtype of a mean.

    >>> result_dtype("int32", ReduceOp.MEAN), result_dtype("int32", ReduceOp.SUM)
    ('float64', 'int32')
    """
    if op is ReduceOp.MEAN or op.is_order_statistic or is_weighted:
        return _MEAN_OF_INTEGER.get(dtype, dtype)
    return dtype


def widest_float(dtypes: Iterable[str]) -> str | None:
    """Returns the smallest float dtype that holds numbers of all of these; None if not all are floats.

    >>> widest_float(["float16", "bfloat16"]), widest_float(["float16", "int8"])
    ('float32', None)
    """
    found = set(dtypes)
    if not found <= {*FLOATS, *SHORT_FLOATS}:
        return None
    if len(found) == 1:
        return found.pop()
    if "float64" in found:
        return "float64"
    half = {"float16": {"float16", *SHORT_FLOATS}, "bfloat16": {"bfloat16", *SHORT_FLOATS}}
    return next((name for name, narrower in half.items() if name in found <= narrower), "float32")


def check_reducible(dtype: str, op: ReduceOp, where: str) -> None:
    """Refuses dtypes that cannot be added, and an order (MIN, MAX) on complex numbers.

    Booleans have no sum; their MIN is whether all are true, their MAX whether any is.
    """
    if dtype not in ITEM_BYTES or (dtype == "bool" and op not in (ReduceOp.MIN, ReduceOp.MAX)):
        known = ", ".join((*FLOATS, *SHORT_FLOATS, *COMPLEXES, *INTEGERS))
        raise DtypeError(
            f"{where} has dtype {dtype}, which cannot be reduced by {op.name}; expected one of {known}"
        )
    if dtype in COMPLEXES and (op in (ReduceOp.MIN, ReduceOp.MAX) or op.is_order_statistic):
        raise ReduceOpError(f"{op.name} is not defined for {dtype} ({where}): complex numbers have no order")
