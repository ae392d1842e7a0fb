"""Counts of the Python functions that a call enters: its cost, whatever else the machine does."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import crossdevice

PACKAGE = Path(crossdevice.__file__).parent

WAITING = ("shared_steps.py", "shared_exchange.py", "group.py", "board.py", "watch.py")
"""Files with functions that are entered again and again, for as long as other ranks are not there."""


def files_of_functions_entered(call: Callable[[], Any]) -> list[str]:
    """Lists the file of each Python function that a call enters."""
    entered: list[str] = []

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            entered.append(frame.f_code.co_filename)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


def num_entered(call: Callable[[], Any]) -> int:
    """Counts the Python functions that a call enters, those of other libraries too."""
    return len(files_of_functions_entered(call))


def num_of_rank_entered(call: Callable[[], Any]) -> int:
    """Counts the functions of the package that a call of a group enters, except those that wait."""
    files = map(Path, files_of_functions_entered(call))
    return sum(file.is_relative_to(PACKAGE) and file.name not in WAITING for file in files)
