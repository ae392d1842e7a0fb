"""Limits on this process set by control groups, which containers use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def words_of_groups(controller: str, unified: list[str], legacy: list[str]) -> Iterator[list[str]]:
    """Reads the words of these files, of version 2 or 1, for every control group this process is in.

    >>> all(len(words) == 1 for words in words_of_groups("memory", ["memory.max"], ["memory.limit_in_bytes"]))
    True
    """
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = ROOT, unified
        elif controller in controllers.split(","):
            base, names = ROOT / controller, legacy
        else:
            continue
        group = base / path.lstrip("/")
        # In a container the path may be the host's, and not exist; what counts is mounted at the base.
        for level in (group, *group.parents):
            if level.is_relative_to(base):
                yield from _words_in(level, names)


def _words_in(group: Path, names: list[str]) -> Iterator[list[str]]:
    try:
        yield " ".join((group / name).read_text() for name in names).split()
    except OSError:
        return
