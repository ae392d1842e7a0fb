"""Ranks that are forked from a process without threads: they start at once, and meet over pipes.

Once their group is formed, everything but notes goes through shared memory, which is what they are for; but
for what goes to ranks that are made to believe that they are on another host.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from crossdevice import runtime
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.protocol import RankLostError


class PipeEngine:
    """An engine that counts what it sends; notes are files in a folder."""

    name = "pipes"
    largest_tag = (1 << 31) - 1
    awaited_ranks = ()
    device_all_reduces = MappingProxyType({})

    def __init__(self, rank, size, peers, folder):
        self.rank, self.size, self._peers, self.folder = rank, size, peers, folder
        self.num_sent_bytes = 0

    def exchange(self, sends, receives, tag, timeout_seconds):
        going = {}
        for peer, memory in sends:
            going.setdefault(peer, []).append(tag.to_bytes(4, "little") + memory.tobytes())
            self.num_sent_bytes += memory.nbytes
        threads = [threading.Thread(target=self._send, args=each, daemon=True) for each in going.items()]
        for thread in threads:
            thread.start()
        for peer, memory in receives:
            found = bytearray(4)
            self._receive(peer, memoryview(found))
            if int.from_bytes(found, "little") != tag:  # what is waited for will not come
                time.sleep(timeout_seconds)
            self._receive(peer, memoryview(memory.reshape(-1).view(np.uint8)))
        for thread in threads:
            thread.join()

    def _receive(self, peer, buffer):
        while buffer:
            length = self._peers[peer].recv_into(buffer)
            if not length:
                raise RankLostError(peer, "end of file")
            buffer = buffer[length:]

    def _send(self, peer, pieces):
        with contextlib.suppress(OSError):  # whoever waits for its answer finds out
            for piece in pieces:
                self._peers[peer].sendall(piece)

    def post(self, note):
        path = self.folder / f"note {self.rank}"
        path.with_suffix(".part").write_text(note)
        path.with_suffix(".part").rename(path)

    def notes(self):
        return {int(path.name.split()[1]): path.read_text() for path in self.folder.glob("note ?")}

    def check_contact(self, silent):
        pass

    def abandon(self):
        pass

    def close(self):
        pass


class Ranks:
    """A group of forked processes, each of which calls `function(group)`.

    `hosts` has for each the name of the host that it is made to believe to be on.
    """

    def __init__(
        self, size: int, function: Callable[[ProcessGroup], Any], hosts: str | None = None, **options: Any
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        ends: list[dict[int, socket.socket]] = [{} for _ in range(size)]
        for one, other in itertools.combinations(range(size), 2):
            ends[one][other], ends[other][one] = socket.socketpair()
        self.pids = []
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                os.environ[runtime.HOST.variable] = hosts[rank] if hosts else ""
                for other, sockets in enumerate(ends):
                    for each in sockets.values() if other != rank else ():
                        each.close()  # or nobody would see that its owner is gone
                _be(rank, size, ends[rank], folder, function, options)
            self.pids.append(pid)
        for sockets in ends:
            for each in sockets.values():
                each.close()

    def wait_until_ready(self, seconds: float = 400.0) -> None:
        """Until every rank has called `say_ready`."""
        end = time.monotonic() + seconds
        while len(list(Path(self._folder.name).glob("ready ?"))) < len(self.pids):
            assert time.monotonic() < end, f"not ready after {seconds:g} s"
            time.sleep(0.01)

    def results(self, seconds: float = 400.0) -> list[Any]:
        """What each rank returned or raised, once all have ended; None for those that were killed."""
        end = time.monotonic() + seconds
        left = list(self.pids)
        while left:
            if time.monotonic() > end:
                for pid in left:
                    os.kill(pid, 9)
                    os.waitpid(pid, 0)
                raise AssertionError(f"{len(left)} ranks are not done after {seconds:g} s")
            left = [pid for pid in left if os.waitpid(pid, os.WNOHANG) == (0, 0)]
            time.sleep(0.01)
        folder = Path(self._folder.name)
        found = [folder / f"rank {rank}.json" for rank in range(len(self.pids))]
        results = [json.loads(path.read_text()) if path.exists() else None for path in found]
        self._folder.cleanup()
        return results


def say_ready(group):
    """Called by a rank whose group is formed, and has done what is to be done before."""
    (group._engine.folder / f"ready {group.rank}").touch()


def _be(rank, size, peers, folder, function, options):
    """Ends the process: nothing of the one it was forked from is run."""
    try:
        given = options.pop("of_ranks", [{}] * size)[rank]
        with ProcessGroup(PipeEngine(rank, size, peers, folder), **options, **given) as group:
            result = function(group)
    except BaseException as error:
        result = {"error": type(error).__name__, "text": str(error), "trace": traceback.format_exc()}
    part = folder / f"rank {rank}.part"
    part.write_text(json.dumps(result))
    part.rename(folder / f"rank {rank}.json")
    os._exit(0)
