"""Sizes as the arguments of commands give them."""

from __future__ import annotations

import re
from fractions import Fraction

from crossdevice.errors import OptionError


def size_in_bytes(text: str) -> int:
    """The bytes of a size such as 512, 4K, 1M or 1.5GiB, in powers of two.

    >>> size_in_bytes("4K"), size_in_bytes("1.5MiB")
    (4096, 1572864)
    """
    match = re.fullmatch(r"(\d+)B?|(\d+(?:\.\d+)?)([KMG])(?:iB)?", text.strip(), re.IGNORECASE)
    size = 0
    if match is not None:
        factor = 1 << {"": 0, "K": 10, "M": 20, "G": 30}[(match[3] or "").upper()]
        size = int(Fraction(match[1] or match[2]) * factor)
    if size == 0:
        raise OptionError(
            f"{text!r} is not a size; expected bytes such as 512, 4K, 100MiB or 1.5GiB "
            "(K, M and G, with or without iB, are powers of two)"
        )
    return size
