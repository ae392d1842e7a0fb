"""Which deprecations are errors: those that our own code causes, not what one library tells another."""

import contextlib
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

OURS = "crossdevice and its tests"
PYTHON = "Python's own library"
LIBRARIES = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")]
STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))

PRINTING = ("_showwarnmsg", "warn_explicit", "warn")
"""Functions of `warnings` between the code that warns and `showwarning`."""


def owner_of(file: str) -> str:
    """Returns the top-level package that a file belongs to. Generated code counts as Python's."""
    path = Path(file)
    for folder in LIBRARIES:
        if path.is_relative_to(folder):
            return path.relative_to(folder).parts[0].removesuffix(".py")
    generated = file.startswith("<") and not file.startswith("<doctest")
    return PYTHON if generated or path.is_relative_to(STANDARD_LIBRARY) else OURS


def is_told_to_us(attributed_to: str) -> bool:
    """Returns whether the deprecation being issued is of a call of ours, not of one library by another."""
    frame = sys._getframe(2)
    while frame.f_code.co_name in PRINTING and frame.f_back:
        frame = frame.f_back
    speaker = owner_of(frame.f_code.co_filename)
    if OURS in (speaker, owner_of(attributed_to)):
        return True
    while frame := frame.f_back:
        listener = owner_of(frame.f_code.co_filename)
        if listener not in (speaker, PYTHON):
            return listener == OURS
    return False


@contextlib.contextmanager
def judged_deprecations() -> Iterator[None]:
    """Raises the deprecations that our own code causes; others are reported at the end of the run."""
    report = warnings.showwarning

    def judge(message, category, filename, lineno, file=None, line=None):
        deprecations = (DeprecationWarning, PendingDeprecationWarning, FutureWarning)
        if issubclass(category, deprecations) and is_told_to_us(filename):
            raise message
        report(message, category, filename, lineno, file, line)

    warnings.showwarning = judge
    try:
        yield
    finally:
        warnings.showwarning = report
