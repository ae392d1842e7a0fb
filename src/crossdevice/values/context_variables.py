"""Values that context variables have for the length of a block."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import TypeVar

Value = TypeVar("Value")


@contextlib.contextmanager
def set_within(variable: contextvars.ContextVar[Value], value: Value) -> Iterator[None]:
    """Sets a variable for the length of a `with` block, whatever interrupts it.

    >>> variable = contextvars.ContextVar("variable", default=0)
    >>> with set_within(variable, 1):
    ...     variable.get()
    1
    >>> variable.get()
    0
    """
    before = variable.get()
    # Set only inside `try`, and restored twice: Ctrl-C may come in the first `finally`, too. If it comes in
    # `with` itself, this generator is collected, which ends it as well; the old value serves there, where
    # a token might belong to another context.
    try:
        try:
            variable.set(value)
            yield
        finally:
            variable.set(before)
    except BaseException:
        variable.set(before)
        raise
