"""The first call of a group: ranks introduce themselves and check that they fit together."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import sys
from collections.abc import Sequence

from crossdevice import runtime
from crossdevice.errors import OptionError
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.values.disagreement import disagreement

CODE_BYTES = 16

NAME_BYTES = 96
"""The length of a host's name and process, cut or padded to it."""

VERSION_BYTES = 32

NONCE_BYTES = 16
"""Random bytes, new for each group; all other ranks must include them in their proofs."""

PROOF = b"introduction"


class Signer:
    """Authentication codes of one group and rank; codes of other groups or ranks are rejected.

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
        """Signs a text so that only a rank with the key can; a constant if there is no key."""
        if not self._key:
            return bytes(CODE_BYTES)
        message = b"%d %d " % (len(self._group), rank) + self._group + text
        return hmac.digest(hashlib.sha256(self._key).digest(), message, "sha256")[:CODE_BYTES]

    def signed(self, text: str, rank: int) -> str:
        """Returns the text with its code."""
        return self.code(text.encode(), rank).hex() + text

    def verified(self, signed: str, rank: int) -> str | None:
        """Returns the text; None if that rank has not signed it."""
        code, text = signed[: 2 * CODE_BYTES], signed[2 * CODE_BYTES :]
        is_own = hmac.compare_digest(code.encode(), self.signed(text, rank)[: len(code)].encode())
        return text if is_own else None


def key_from_env() -> bytes:
    """Returns the key of this process's groups; empty if there is none."""
    return runtime.GROUP_KEY.read().encode()


def own_name() -> str:
    """Describes this host and process."""
    return f"{socket.gethostname()}, process {os.getpid()}"


def own_version() -> str:
    """Returns the version of crossdevice, without importing the package, which is in a layer above."""
    return str(sys.modules["crossdevice"].__version__)


def introduced(call: GroupCall, checks: int, words: Sequence[str]) -> tuple[tuple[str, ...], Signer]:
    """Exchanges hosts and processes, as names of ranks in errors, and returns the signer of their notes.

    Args:
        checks: which of `words` this rank was given; all must have the same.
    """
    name, version = own_name().encode()[:NAME_BYTES], own_version().encode()[:VERSION_BYTES]
    body = bytes([checks]) + secrets.token_bytes(NONCE_BYTES)
    body += name.ljust(NAME_BYTES, b"\0") + version.ljust(VERSION_BYTES, b"\0")
    bodies = call.all_gather(body)
    names, versions = [], {}
    for rank, theirs in enumerate(bodies):
        name, version = theirs[1 + NONCE_BYTES : -VERSION_BYTES], theirs[-VERSION_BYTES:]
        names.append(name.rstrip(b"\0").decode(errors="replace"))
        versions[rank] = version.rstrip(b"\0").decode(errors="replace")
    members = tuple(f"rank {rank} ({name})" for rank, name in enumerate(names))
    differing = disagreement(versions, members, "has", str)
    if differing is not None:
        raise OptionError(f"all ranks of a group must have the same version of crossdevice: {differing}")
    differing = disagreement(
        dict(enumerate(theirs[0] for theirs in bodies)), members, "has checks", lambda word: repr(words[word])
    )
    if differing is not None:
        raise OptionError(f"all ranks of a group must be given the same checks: {differing}")
    # Of what all have said, which is new for each of them: a proof that was recorded is of other words.
    signer = Signer(key_from_env(), hashlib.sha256(b"".join(bodies)).digest())
    codes = call.all_gather(signer.code(PROOF, call.group.rank))
    strangers = [rank for rank, code in enumerate(codes) if code != signer.code(PROOF, rank)]
    if strangers:
        raise OptionError(
            f"{runtime.GROUP_KEY.variable} must be the same on all ranks: "
            f"{', '.join(members[rank] for rank in strangers)} "
            f"{'has' if len(strangers) == 1 else 'have'} another one than rank {call.group.rank}, or none"
        )
    return members, signer
