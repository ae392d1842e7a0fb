"""Doing something at each step of a call in turn: raising KeyboardInterrupt, or what a signal handler does.

Steps are all places at which CPython looks for signals (after a call or a jump backwards, and where a
function begins) in any code that the calling thread runs.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType
from typing import Any

import pytest


class _Steps:
    """Counts the steps of what is run while it traces, and calls `action` at one of them."""

    def __init__(self, step: int | None, action: Callable[[], None]) -> None:
        self._step = step
        self._action = action
        self.count = 0
        # CPython 3.11 has been seen to call a tracer that was gone: all of them stay until the end.
        self._tracers: list[Callable[..., Any]] = [self._frame_tracer]
        self.place = ""
        """Where the action was called."""

    def run(self, call: Callable[[], Any]) -> None:
        before = sys.gettrace()
        sys.settrace(self._tracers[0])
        try:
            call()
        finally:
            sys.settrace(before)

    def _frame_tracer(self, frame: Any, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes = True
        is_step = True

        def trace(frame: Any, event: str, argument: Any) -> Any:
            nonlocal is_step
            if event == "opcode":
                if is_step:
                    self.count += 1
                    if self.count - 1 == self._step:
                        self.place = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
                        self._action()
                is_step = frame.f_lasti in _followed_by_a_look(frame.f_code)
            return trace

        self._tracers.append(trace)
        return trace


@functools.cache
def _followed_by_a_look(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions after which CPython looks for signals."""
    looks = ("CALL", "JUMP_BACKWARD", "JUMP_ABSOLUTE", "RESUME")
    return frozenset(found.offset for found in dis.get_instructions(code) if found.opname.startswith(looks))


may_meet_finalizers = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""For tests that interrupt: finalizers and collectors' callbacks of other libraries cannot pass it on."""


def _interrupt() -> None:
    raise KeyboardInterrupt


def number_of_steps(call: Callable[[], Any]) -> int:
    """How many steps a call has on this thread."""
    steps = _Steps(None, _interrupt)
    steps.run(call)
    return steps.count


def interrupted_at_each_step(call: Callable[[], Any], steps: Iterable[int] | None = None) -> Iterator[str]:
    """Runs `call` interrupted at the first, the second, the third step ... and yields the place after each.

    With `steps`, at these only; without, until the call has no such step.
    """
    for step in iter(range(1 << 30)) if steps is None else steps:
        tracer = _Steps(step, _interrupt)
        with contextlib.suppress(KeyboardInterrupt):
            tracer.run(call)
        if not tracer.place and steps is None:
            return
        yield tracer.place


def called_at_each_step(call: Callable[[], Any], action: Callable[[], Any]) -> Iterator[str]:
    """Runs `call` again and again, with `action` done at the first, second, third ... step."""
    for step in range(1 << 30):
        tracer = _Steps(step, action)
        tracer.run(call)
        if not tracer.place:
            return
        yield tracer.place
