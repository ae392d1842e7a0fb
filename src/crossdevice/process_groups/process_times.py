"""Whether a process of this host is still the one it was: numbers of processes are given again."""

from __future__ import annotations

from pathlib import Path


def start_time_of(process: int) -> int | None:
    """When a process was started, in ticks since the system was; None if it has ended."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    # After the name, which may contain anything: the state, and nineteen fields later the time.
    state, *fields = text.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])


def has_ended(process: int, start_time: int) -> bool:
    """Whether the process that was started then is there no more."""
    return start_time_of(process) != start_time
