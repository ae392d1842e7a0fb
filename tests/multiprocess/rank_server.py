"""Forks ranks from a process that has imported what takes longer than most of them: PyTorch and numba.

Reads requests, a line of JSON each: what to run, answered by a process ID, or a process ID, answered by how
it ended, if it has.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any


class RankServer:
    """A process that forks others."""

    def __init__(self, engine: str, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, engine],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lock = threading.Lock()  # launches of one test may be side by side

    def fork(
        self, words: Sequence[str], environment: Mapping[str, str], output: str, modules: Sequence[str] = ()
    ) -> ForkedRank:
        """A process that runs a script with its arguments, in a session of its own.

        Args:
            modules: those that the server imports first, unless it has done so for another rank.
        """
        request = {
            "words": list(words),
            "environment": dict(environment),
            "output": output,
            "modules": list(modules),
        }
        return ForkedRank(self, self.ask(request))

    def ask(self, request: Any) -> Any:
        """The answer to a request."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            return json.loads(self._process.stdout.readline())


class ForkedRank:
    """A process that a server has forked; the server knows how it has ended."""

    def __init__(self, server: RankServer, pid: int) -> None:
        self._server, self.pid = server, pid
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> None:
        """Until it has ended, as of `subprocess.Popen`."""
        end = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            self.returncode = self._server.ask(self.pid)
            if end is not None and time.monotonic() > end and self.returncode is None:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(0.02)


def serve() -> list[str]:
    """Answers requests until there are no more; returns what to run, in the processes that were forked."""
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        if isinstance(request, int):
            pid, status = os.waitpid(request, os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            import_early(request["modules"])
            if not (answer := os.fork()):
                answers.close()
                become(request)
                return request["words"]
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)


def import_early(modules: Sequence[str]) -> None:
    """Imports modules in this process, which must still have one thread."""
    for module in modules:
        importlib.import_module(module)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads: a process that is forked now may find their locks taken"


def fill_registries() -> None:
    """Has numba collect what it can compile: half a second in each process that loads a kernel."""
    with contextlib.suppress(ModuleNotFoundError):
        import_early(["crossdevice.kernels.host.llvm.numba_pass"])
        from numba.core.registry import cpu_target

        cpu_target.typing_context.refresh()
        cpu_target.target_context.refresh()


def become(request: Any) -> None:
    """Makes this process what it would be had it been started with this environment and output."""
    os.setsid()
    output = os.open(request["output"], os.O_WRONLY | os.O_APPEND)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(request["environment"])


if __name__ == "__main__":
    torch = ("torch.distributed", "torch.nn.parallel") if sys.argv[1] == "torch" else ()
    fill_registries()
    import_early([*torch, f"crossdevice.process_groups.engines.{sys.argv[1]}_engine"])
    sys.argv = serve()
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
