"""Proof that a note comes from a rank of the group: a code made with a key that only its ranks know."""

from __future__ import annotations

import hashlib
import hmac
import os

KEY_VARIABLE = "CROSSDEVICE_GROUP_KEY"
"""The same secret on all ranks, from whoever starts them; without it nothing is proved."""

CODE_BYTES = 16


class Signer:
    """Codes of one group: what was signed in another one, or by another rank, is not taken.

    >>> ours = Signer(b"secret", b"group 1")
    >>> ours.verified(ours.signed("a note", rank=2), rank=2)
    'a note'
    >>> ours.verified(Signer(b"guess", b"group 1").signed("forged", rank=2), rank=2) is None
    True
    """

    def __init__(self, key: bytes = b"", group: bytes = b"") -> None:
        self._key = key
        self._group = group

    def code(self, text: bytes, rank: int) -> bytes:
        """What only a rank with the key can make of a text; the same for all texts if there is no key."""
        if not self._key:
            return bytes(CODE_BYTES)
        message = b"%d %d " % (len(self._group), rank) + self._group + text
        return hmac.digest(hashlib.sha256(self._key).digest(), message, "sha256")[:CODE_BYTES]

    def signed(self, text: str, rank: int) -> str:
        """The text with its code."""
        return self.code(text.encode(), rank).hex() + text

    def verified(self, signed: str, rank: int) -> str | None:
        """The text; None if that rank has not signed it."""
        code, text = signed[: 2 * CODE_BYTES], signed[2 * CODE_BYTES :]
        is_own = hmac.compare_digest(code.encode(), self.signed(text, rank)[: len(code)].encode())
        return text if is_own else None


def key_from_env() -> bytes:
    """The key of this process's groups; empty if there is none."""
    return os.environ.get(KEY_VARIABLE, "").encode()
