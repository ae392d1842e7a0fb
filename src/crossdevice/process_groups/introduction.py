"""The first call of a group: ranks say who they are, and find out whether they fit together."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
from collections.abc import Sequence

from crossdevice.errors import OptionError
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.process_groups.signing import CODE_BYTES, KEY_VARIABLE, Signer, key_from_env
from crossdevice.values.disagreement import disagreement

NAME_BYTES = 96
"""The length of a host's name and process, cut or padded to it."""

NONCE_BYTES = 16


def own_name() -> str:
    """This host and process, for people."""
    return f"{socket.gethostname()}, process {os.getpid()}"


def introduced(call: GroupCall, checks: int, words: Sequence[str]) -> tuple[tuple[str, ...], Signer]:
    """Ranks with their hosts and processes, by which errors name them, and what signs their notes.

    Args:
        checks: which of `words` this rank was given; all must have the same.
    """
    proof = Signer(key_from_env())
    body = bytes([checks]) + secrets.token_bytes(NONCE_BYTES)
    body += own_name().encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0")
    records = call.all_gather(proof.code(body, call.group.rank) + body)
    codes, bodies = zip(*((record[:CODE_BYTES], record[CODE_BYTES:]) for record in records), strict=True)
    names = [body[1 + NONCE_BYTES :].rstrip(b"\0").decode(errors="replace") for body in bodies]
    members = tuple(f"rank {rank} ({name})" for rank, name in enumerate(names))
    differing = disagreement(
        dict(enumerate(body[0] for body in bodies)), members, "has checks", lambda word: repr(words[word])
    )
    if differing is not None:
        raise OptionError(f"all ranks of a group must be given the same checks: {differing}")
    strangers = [rank for rank, code in enumerate(codes) if code != proof.code(bodies[rank], rank)]
    if strangers:
        raise OptionError(
            f"{KEY_VARIABLE} must be the same on all ranks: {', '.join(members[rank] for rank in strangers)} "
            f"{'has' if len(strangers) == 1 else 'have'} another one than rank {call.group.rank}, or none"
        )
    nonces = b"".join(body[1 : 1 + NONCE_BYTES] for body in bodies)
    return members, Signer(key_from_env(), hashlib.sha256(nonces).digest())
