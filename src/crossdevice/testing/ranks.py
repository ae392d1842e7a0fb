"""A function as the ranks of a group: threads of this process, or processes of this host."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from crossdevice.errors import OptionError, ProcessGroupError
from crossdevice.process_groups.cluster import cluster_from_env, environments_of_ranks
from crossdevice.process_groups.engines import thread_engine
from crossdevice.process_groups.group import TIMEOUT_SECONDS, Checks, ProcessGroup
from crossdevice.values.options import whole_number

ENDING_SECONDS = 30.0
"""Time for a process to end by itself after its answer."""


def run_ranks(
    size: int,
    function: Callable[[ProcessGroup], Any],
    *,
    processes: bool = False,
    return_errors: bool = False,
    timeout_seconds: float = TIMEOUT_SECONDS,
    checks: Checks = "new",
) -> list[Any]:
    """Calls `function(group)` as each rank of a group, and returns their results in the order of ranks.

    Args:
        size: the number of ranks.
        function: the program of each rank, called with its ProcessGroup.
        processes: as processes on Unix sockets, which takes a second or two, instead of threads. `function`
            has to be one that a new Python can import; what it returns or raises is pickled. The variables
            of `crossdevice run` are set, so that `cluster_from_env().form_group()` forms further groups.
        return_errors: puts what a rank raised in the place of its result, a ProcessGroupError for a process
            that was killed. By default the error of the lowest rank is raised once all have ended.
        timeout_seconds: for forming the group, and then for each of its calls.
        checks: as of ProcessGroup.

    Returns:
        A list with what each rank returned.

    Raises:
        OptionError: an argument is outside its range.
        Exception: what the lowest rank raised that did.

    >>> run_ranks(3, lambda group: group.rank)
    [0, 1, 2]
    """
    size = whole_number("size", size, least=1)
    run = _as_processes if processes else _as_threads
    outcomes = run(size, function, {"timeout_seconds": timeout_seconds, "checks": checks})
    if not return_errors:
        for outcome in outcomes:
            if isinstance(outcome, _Raised):
                raise outcome.error
    return [outcome.error if isinstance(outcome, _Raised) else outcome for outcome in outcomes]


class _Raised(NamedTuple):
    """The exception of a rank, in place of its result."""

    error: BaseException


def _as_threads(size: int, function: Callable[[ProcessGroup], Any], options: dict[str, Any]) -> list[Any]:
    def answer(group: ProcessGroup) -> Any:
        try:
            return function(group)
        except BaseException as error:
            # Others wait for a rank that has raised, unless they are told.
            group.give_up(f"{type(error).__name__}: {error}")
            return _Raised(error)

    return thread_engine.run_ranks(size, answer, **options)


def _as_processes(size: int, function: Callable[[ProcessGroup], Any], options: dict[str, Any]) -> list[Any]:
    try:
        sent = pickle.dumps(function)
    except Exception as error:
        raise OptionError(f"processes cannot be sent {function!r}: {error}") from error
    started = multiprocessing.get_context("spawn")
    ranks = []
    with tempfile.TemporaryDirectory(prefix="crossdevice-ranks-") as folder:
        try:
            for rank, environment in enumerate(environments_of_ranks(size, folder)):
                ours, theirs = started.Pipe()
                given = theirs, environment, sent, options
                process = started.Process(target=_be_rank, args=given, name=f"rank {rank}", daemon=True)
                process.start()
                theirs.close()
                ranks.append((process, ours))
            outcomes = [_answer_of(process, ours) for process, ours in ranks]
        finally:
            for _, ours in ranks:
                ours.close()  # now it may end
            for process, _ in ranks:
                process.join(ENDING_SECONDS)
                process.kill()
                process.join()
    return outcomes


def _answer_of(process: Any, ours: Connection) -> Any:
    try:
        return pickle.loads(ours.recv_bytes())
    except EOFError:
        process.join(ENDING_SECONDS)
        code = process.exitcode
        how = f"ended with exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name
        return _Raised(ProcessGroupError(f"{process.name} (process {process.pid}) gave no answer: {how}"))


def _be_rank(theirs: Connection, environment: dict[str, str], sent: bytes, options: dict[str, Any]) -> None:
    """Runs a process as one rank."""
    os.environ.clear()
    os.environ.update(environment)
    try:
        function = pickle.loads(sent)
        with cluster_from_env().form_group(**options) as group:
            outcome = function(group)
    except BaseException as error:
        error.add_note(f"of rank {environment['RANK']}:\n{traceback.format_exc()}")
        outcome = _Raised(error)
    theirs.send_bytes(_pickled(outcome))
    with contextlib.suppress(EOFError, OSError):  # until all have answered: on PyTorch rank 0 keeps the store
        theirs.recv_bytes()


def _pickled(outcome: Any) -> bytes:
    try:
        written = pickle.dumps(outcome)
        pickle.loads(written)  # exceptions may be pickled that cannot be read
    except Exception as error:
        if isinstance(outcome, _Raised):
            lost: BaseException = RuntimeError(f"{type(outcome.error).__name__}: {outcome.error}")
        else:
            lost = OptionError(f"what a rank returned cannot be pickled: {error}")
        written = pickle.dumps(_Raised(lost))
    return written
