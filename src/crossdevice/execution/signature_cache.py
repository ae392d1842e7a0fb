"""A bounded cache with an entry for each signature that a program uses."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeVar

Kept = TypeVar("Kept")

MAX_SIGNATURES = 1024


class SignatureCache(dict[Any, Kept]):
    """A dict that starts over when it is full: a training loop has few signatures, and meets them all again.

    >>> cache = SignatureCache(most=2)
    >>> for number in range(3):
    ...     cache[number] = "kept"
    >>> cache
    {2: 'kept'}
    >>> cache.setdefault(3, "kept"), cache.setdefault(3, "another")
    ('kept', 'kept')
    >>> cache.setdefault(4, "kept"), list(cache)
    ('kept', [4])
    """

    def __init__(self, most: int = MAX_SIGNATURES) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: Hashable, value: Kept) -> None:
        if len(self) >= self._most:
            self.clear()
        super().__setitem__(key, value)

    def setdefault(self, key: Hashable, value: Kept) -> Kept:
        """Returns what is kept, or keeps the value; a dict's own knows no bound."""
        if key not in self:
            self[key] = value
        return self[key]
