"""A worker thread that stays awake between repeated passes which follow each other closely."""

from __future__ import annotations

import functools
import time
from array import array
from collections.abc import Callable, Sequence

from crossdevice import runtime
from crossdevice.kernels.host.resources.threads import (
    granted_processors,
    num_threads,
    run_together,
    wake_worker,
)
from crossdevice.kernels.host.work_list import SCRATCH_BYTES, WORD_BYTES

STANDBY_BYTES = 1 << 20
"""Traffic from which an awake worker takes part. At 0.6 MiB the handover costs what it saves."""

STANDBY_SECONDS = 1e-4
"""Time that a worker spins for the next pass, and the longest gap between passes that count as close."""

LOOK_SECONDS = 3e-8
"""About how long a compiled look takes."""

FEWEST_PASSES, MOST_PASSES = 2, 1 << 10
"""Passes that follow each other closely before the worker is woken for one that needs no second thread: more
each time that it was of no use, as where other programs keep its processor busy."""

_MARGIN = 8
"""Words of padding around the mailbox, so that unrelated writes never touch its cache lines."""


class Standby:
    """Shares repeated passes of this process with one worker thread."""

    def __init__(self) -> None:
        from crossdevice.kernels.host.llvm import standby

        self._share, self._stand_by = standby.compiled_sharing(), standby.compiled_standby()
        self._scratch = array("q", bytes(SCRATCH_BYTES))
        mailbox = [0] * (standby.SCRATCH + 1)
        mailbox[standby.SCRATCH] = self._scratch.buffer_info()[0]
        margin = [0] * _MARGIN
        self._words = array("q", margin + mailbox + margin)
        self._mailbox = self._words.buffer_info()[0] + _MARGIN * WORD_BYTES
        self._state, self._awake = _MARGIN + standby.STATE, _MARGIN + standby.AWAKE
        self._has_processors = granted_processors() > 1
        self._start_anew()
        runtime.renew_after_fork(self._start_anew)

    def _start_anew(self) -> None:
        """Resets the state; also called in a forked process, where the worker does not exist."""
        self._words[self._state] = self._words[self._awake] = 0
        self._is_coming: Callable[[], bool] = bool
        self._ended_ns = self._num_close = 0
        self._num_needed = FEWEST_PASSES

    def run(
        self,
        work: Callable[[], None],
        num_participants: int,
        kernel: int,
        places: Sequence[int],
        scratch: int,
    ) -> None:
        """Acts as `run_together`, but with the awake worker, if there is one.

        What `work` does is done by the kernel at this address with these two lists of rows.
        """
        is_ready = self._is_ready(num_participants > 1)
        if not is_ready and num_participants > 1:
            run_together(work, num_participants)
        elif self._share(self._mailbox, kernel, *places, scratch, is_ready):
            self._num_needed = FEWEST_PASSES
        self._ended_ns = time.perf_counter_ns()

    def _is_ready(self, is_worth_waking: bool) -> bool:
        """Returns whether a worker is awake or coming, and wakes one for large or close passes."""
        if not self._has_processors or num_threads() == 1:
            return False
        # A second wake-up would cancel the first, so that no worker ever comes.
        if self._words[self._awake] or self._is_coming():
            return True
        if not is_worth_waking:
            is_close = time.perf_counter_ns() - self._ended_ns < STANDBY_SECONDS * 1e9
            self._num_close = self._num_close + 1 if is_close else 0
            if self._num_close < self._num_needed:
                return False
            self._num_close, self._num_needed = 0, min(2 * self._num_needed, MOST_PASSES)
        self._is_coming = wake_worker(self._wait_for_passes, self._dismiss)
        return True

    def _dismiss(self) -> None:
        self._words[self._awake] = 0

    def _wait_for_passes(self) -> None:
        # A method, so that the worker keeps this object and its memory alive.
        self._stand_by(self._mailbox, int(STANDBY_SECONDS / LOOK_SECONDS))


@functools.cache
def standby() -> Standby:
    """Returns the standby worker of this process."""
    return Standby()
