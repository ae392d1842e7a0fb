"""`crossdevice run`: starts a program as several processes of this host, and ends them together."""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import functools
import os
import queue
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Self

from crossdevice.errors import CrossDeviceError, OptionError
from crossdevice.process_groups.cluster import environments_of_ranks
from crossdevice.process_groups.notes.introduction import own_name

OWN_END_SECONDS = 5.0
"""Time for other ranks after a failure to print their errors and to end by themselves."""

ENDING_SECONDS = 5.0
"""The same after SIGTERM, before they are killed."""

QUIET_SECONDS = 600.0
"""Time for a program of which only the results are shown."""

LONGEST_FOLDER = 60
"""Bytes of the path of a temporary folder; that of a socket in it has at most 104."""

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

STANDARD_INPUT = "-"

FOLDER_PREFIX = "crossdevice-run-"

HELD = "held"
"""A file in the folder where ranks meet, locked until the launcher and all its processes have ended."""

_PARENT_ENDS = 1  # prctl's PR_SET_PDEATHSIG


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options; all arguments after the program are the program's own."""
    parser.usage = "crossdevice run -n N [-m] program [argument ...]"
    parser.add_argument(
        "-n", "--processes", type=int, required=True, metavar="N", help="number of processes, on this host"
    )
    parser.add_argument("-m", "--module", action="store_true", help="the program is a module: python -m")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="a Python file or module, its arguments")


def run(arguments: argparse.Namespace) -> int:
    """Runs the program, and returns the exit status of the first process that failed; 0 if none did."""
    size, program = arguments.processes, arguments.program
    if size < 1:
        raise OptionError(f"-n must be 1 or more; got {size}")
    if not program:
        raise OptionError("which program? For example: crossdevice run -n 4 train.py")
    if program[0] == STANDARD_INPUT and size > 1:
        raise OptionError(
            "a program cannot be read from the standard input, which only rank 0 gets; name a file"
        )
    if not arguments.module and program[0] != STANDARD_INPUT and not Path(program[0]).exists():
        raise OptionError(
            f"there is no file {program[0]!r} in {Path.cwd()}. The program is a Python file, or a module "
            "after -m; crossdevice run starts Python itself"
        )
    command = [sys.executable, *(["-m"] if arguments.module else []), *program]
    folders = _folder_of_folders()
    _remove_abandoned_folders(folders)
    with (
        tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, dir=folders) as folder,
        _held(Path(folder)) as lock,
        _Ranks(lock) as ranks,
    ):
        return ranks.run(command, environments_of_ranks(size, folder))


@contextmanager
def _held(folder: Path) -> Iterator[int]:
    """Locks a folder, by an open file that processes inherit."""
    made = folder / f"{HELD}.made"
    lock = os.open(made, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made.rename(folder / HELD)  # whoever finds the file finds it locked
        yield lock
    finally:
        os.close(lock)


def _folder_of_folders() -> Path:
    """Returns where launches make their folders: that of temporary files, unless its path is too long."""
    folder = tempfile.gettempdir()
    return Path(folder if len(os.fsencode(folder)) <= LONGEST_FOLDER else "/tmp")


def _remove_abandoned_folders(folders: Path) -> None:
    """Removes folders that launchers of this user have left, which were killed, once nobody holds them."""
    for folder in folders.glob(f"{FOLDER_PREFIX}*"):
        with suppress(OSError):  # another launcher removes it, or it is another user's or held
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            lock = os.open(folder / HELD, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


class _Ranks:
    """Processes with output labelled by rank; they end together.

    Args:
        lock: an open file that all of them inherit.
    """

    def __init__(self, lock: int) -> None:
        self._lock = lock
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._codes: dict[int, int] = {}
        """Exit codes of ended processes, which are reaped last: until then their numbers are not reused."""
        self._readers: list[threading.Thread] = []
        self._writing = threading.Lock()
        self._unwritten: OSError | None = None
        self._received: list[int] = []
        self._num_told = 0
        """Processes that were started before the last signal."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._send(signal.SIGKILL, set(range(len(self._processes))) - set(self._codes))
        for process in self._processes:
            process.wait()

    def run(self, command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> int:
        """Starts all, and returns the exit status of the first that failed, or of the signal that came."""
        with self._forwarding():
            self._start(command, environments)
            status, left, end = 0, set(range(len(self._processes))), None
            if self._received:  # while processes were being started
                status, end = 128 + self._received[0], time.monotonic() + OWN_END_SECONDS
            wanted = iter((signal.SIGTERM, signal.SIGKILL))
            while left:
                rank = self._next_ended(end)
                if rank is None:
                    following = next(wanted, signal.SIGKILL)
                    self._send(following, left)
                    end = time.monotonic() + ENDING_SECONDS
                elif rank < 0:  # a signal has come, and was handed on
                    status = status or 128 + self._received[0]
                    end = end or time.monotonic() + OWN_END_SECONDS
                else:
                    left.discard(rank)
                    code = self._codes[rank]
                    if code and not status:
                        status = _status(code)
                        self._say(rank, code, left)
                        end = time.monotonic() + OWN_END_SECONDS
        if status and sys.platform == "linux":  # what failed ranks have started does not outlive them
            self._send(signal.SIGKILL, set(self._codes))
        end = time.monotonic() + ENDING_SECONDS
        for reader in self._readers:  # what the program has left behind may hold its output open
            reader.join(max(end - time.monotonic(), 0.0))
        if self._unwritten is not None and not status:
            raise self._unwritten
        return status

    def _start(self, command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> None:
        die_with_us = _dying_with(os.getpid())
        for rank, environment in enumerate(environments):
            if self._received:
                break
            # In sessions of their own: a terminal's Ctrl-C comes to this process, which hands it on once.
            try:
                process = subprocess.Popen(
                    command,
                    env={**environment, "PYTHONUNBUFFERED": "1"},
                    stdin=subprocess.DEVNULL if rank else None,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                    preexec_fn=die_with_us,
                    pass_fds=(self._lock,),
                )
            except OSError as error:
                self._close_outputs()  # without free file numbers, the folder could not be removed
                raise OptionError(
                    f"rank {rank} of {len(environments)} cannot be started: {error.strerror}. "
                    "Start fewer, or raise the limits that `ulimit -n` (open files, two for each rank) and "
                    "`ulimit -u` (processes) show"
                ) from error
            self._processes.append(process)
        if self._received:  # it came while the last one was being started
            self._send(self._received[0], set(range(self._num_told, len(self._processes))))
        for rank, process in enumerate(self._processes):
            prefix = f"[{rank}] ".encode()
            assert process.stdout is not None
            assert process.stderr is not None
            for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                self._run_thread(_copy, prefix, source, functools.partial(self._write, target.buffer))
            threading.Thread(target=self._report_end, args=(rank, process), daemon=True).start()

    def _close_outputs(self) -> None:
        for process in self._processes:
            for source in (process.stdout, process.stderr):
                assert source is not None
                source.close()

    def _write(self, target: IO[bytes], text: bytes) -> None:
        """Writes lines of one rank; if that fails, what ranks print is still read, so that they go on."""
        with self._writing:
            try:
                target.write(text)
                target.flush()
            except BrokenPipeError:  # the reader has seen enough
                pass
            except OSError as error:
                self._unwritten = self._unwritten or error

    def _run_thread(self, function: Callable[..., None], *args: object) -> None:
        self._readers.append(threading.Thread(target=function, args=args, daemon=True))
        self._readers[-1].start()

    def _report_end(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        if sys.platform == "linux":
            ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            assert ended is not None
            self._codes[rank] = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        else:
            self._codes[rank] = process.wait()
        self._ended.put(rank)

    def _next_ended(self, end: float | None) -> int | None:
        """Returns the rank that has ended next, -1 for a signal, None if none has by then."""
        while True:
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return None
            with suppress(queue.Empty):  # not all at once: a handler runs between two waits
                return self._ended.get(timeout=0.5 if left is None else min(left, 0.5))

    def _say(self, rank: int, code: int, left: set[int]) -> None:
        how = f"ended with exit code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
        host = own_name().partition(",")[0]
        text = f"crossdevice run: rank {rank} ({host}, process {self._processes[rank].pid}) {how}"
        if left:
            has, by_whom = "the other one has", "itself"
            if len(left) > 1:
                has, by_whom = f"the other {len(left)} have", "themselves"
            text += f"; {has} {OWN_END_SECONDS:g} seconds to end by {by_whom}"
        print(text, file=sys.stderr, flush=True)

    def _send(self, number: int, ranks: set[int]) -> None:
        for rank in ranks:
            with suppress(ProcessLookupError, PermissionError):  # no process left, on Linux and elsewhere
                os.killpg(self._processes[rank].pid, number)

    @contextmanager
    def _forwarding(self) -> Iterator[None]:
        """Hands on signals that end this process; a second one kills."""

        def hand_on(number: int, _: object) -> None:
            self._received.append(number)
            self._num_told = len(self._processes)
            running = set(range(len(self._processes))) - set(self._codes)
            self._send(number if len(self._received) == 1 else signal.SIGKILL, running)
            self._ended.put(-1)

        before = {number: signal.signal(number, hand_on) for number in FORWARDED}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class LaunchError(CrossDeviceError, RuntimeError):
    """A launched program that failed, or did not end."""


def run_quietly(what: str, command: Sequence[str], writes: Path, environment: Mapping[str, str]) -> None:
    """Runs a command that is to write a file; if it fails, the error has its last words."""
    try:
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=QUIET_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{what} did not end in {QUIET_SECONDS:g} seconds") from None
    if ended.returncode or not writes.exists():
        said = [line for line in ended.stderr.splitlines() if line.strip()]
        raise LaunchError(f"{what} failed: {said[-1] if said else 'no error was printed'}")


def _status(code: int) -> int:
    """Returns the exit status as a shell does."""
    return code if code > 0 else 128 - code


def _dying_with(parent: int) -> Callable[[], None] | None:
    """Makes the system end a process with its parent, even if that is killed; on Linux only."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl

    def prepare() -> None:
        prctl(_PARENT_ENDS, signal.SIGKILL)
        if os.getppid() != parent:  # it ended just before
            os._exit(1)

    return prepare


def _copy(prefix: bytes, source: IO[bytes], write: Callable[[bytes], None]) -> None:
    """Copies lines, each with a prefix, once they are complete: with a newline, or a carriage return."""
    kept: list[bytes] = []  # pieces of a line that has not ended: joined once, however long it is
    has_returned = False
    while chunk := os.read(source.fileno(), 1 << 16):
        *lines, rest = _lines(chunk)
        if lines:
            lines[0] = b"".join([*kept, lines[0]])
            kept.clear()
            # A newline that follows a carriage return belongs to the line before.
            first = b"" if has_returned and lines[0] == b"\n" else prefix
            write(first + prefix.join(lines))
        has_returned = chunk.endswith(b"\r")
        if rest:
            kept.append(rest)
    if kept:
        write(prefix + b"".join(kept) + b"\n")
    source.close()


def _lines(text: bytes) -> list[bytes]:
    """Splits after the end of each line; the last item has no end, and may be empty."""
    lines = text.splitlines(keepends=True)
    return lines if lines and not lines[-1].endswith((b"\n", b"\r")) else [*lines, b""]
