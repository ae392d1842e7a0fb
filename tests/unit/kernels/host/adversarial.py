"""Arrays that are hard to add: NaN, infinities, both zeros, subnormals, any bits, wide spreads."""

from __future__ import annotations

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
CORNERS = [0.0, -0.0, 1.0, -1.0, 3.0, 2.0**-24, 1 + 2.0**-7, 65504.0, 1e38, 1e308, 2.0**-149]
UNUSUAL = [np.inf, -np.inf, np.nan]


def dtype_named(name: str) -> np.dtype:
    return BFLOAT16 if name == "bfloat16" else np.dtype(name)


def adversarial(
    random: np.random.Generator, dtype: np.dtype, size: int, *, finite: bool = False
) -> np.ndarray:
    """`size` elements, a third of them any bits, a third ordinary, a third corner cases."""
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return random.integers(limits.min, limits.max, size, dtype=dtype, endpoint=True)
    if dtype.kind == "c":
        return adversarial(random, np.empty(0, dtype).real.dtype, 2 * size, finite=finite).view(dtype)
    with np.errstate(all="ignore"):
        anything = random.integers(0, 256, size * dtype.itemsize, dtype=np.uint8).view(dtype)
        ordinary = random.standard_normal(size).astype(dtype)
        corners = random.choice(np.array(CORNERS if finite else CORNERS + UNUSUAL), size).astype(dtype)
        kind = random.integers(0, 3, size)
        mixed = np.where(kind == 0, anything, np.where(kind == 1, ordinary, corners)).astype(dtype)
        if finite:
            mixed[~np.isfinite(mixed.astype(np.float64))] = 1
    return mixed


def spread_out(
    random: np.random.Generator, dtype: np.dtype, size: int, *, bits: int, exponents: int
) -> np.ndarray:
    """Finite floats with significands of so many bits, and exponents from -exponents to exponents."""
    significands = np.round(random.uniform(-1, 1, size) * 2.0**bits) / 2.0**bits
    with np.errstate(all="ignore"):
        values = np.ldexp(significands, random.integers(-exponents, exponents + 1, size)).astype(dtype)
        values[~np.isfinite(values.astype(np.float64))] = 1
    return values


def misaligned(array: np.ndarray, offset: int) -> np.ndarray:
    """A copy that starts `offset` bytes after a whole line."""
    raw = np.zeros(array.nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 64 + offset % 64
    copy = raw[start : start + array.nbytes].view(array.dtype)
    copy[:] = array
    return copy


def bits_of(array: np.ndarray) -> np.ndarray:
    part = array.real.dtype if array.dtype.kind == "c" else array.dtype
    return array.view(f"u{part.itemsize}")


def same_bits(left: np.ndarray, right: np.ndarray, *, any_nan: bool = False) -> bool:
    """Whether all bits agree; under "fast" a NaN may be any NaN, as it is in the libraries."""
    agree = bits_of(left) == bits_of(right)
    if any_nan and left.dtype.kind not in "iu":
        part = left.real.dtype if left.dtype.kind == "c" else left.dtype
        with np.errstate(all="ignore"):
            agree |= np.isnan(left.view(part)) & np.isnan(right.view(part))
    return bool(agree.all())
