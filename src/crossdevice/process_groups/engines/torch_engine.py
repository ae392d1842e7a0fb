"""Groups on torch.distributed: bytes go over gloo, notes hang in a store; the default group is left alone."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, from_numpy

from crossdevice.errors import OptionError, ProcessGroupError
from crossdevice.process_groups.background import TimedCalls
from crossdevice.process_groups.engines.torch_meeting import DOUBLE_SECONDS, Meeting, everyones, way_to
from crossdevice.process_groups.engines.torch_store import (
    default_store,
    leave_behind_at_fork,
    reason_of,
    store_at,
    store_of_another,
)
from crossdevice.process_groups.group import LONGEST_SECONDS, TIMEOUT_SECONDS, Checks, ProcessGroup
from crossdevice.process_groups.protocol import DeviceCollectives, Message, RankLostError, Started
from crossdevice.values.launchers import Launch

PAUSE_SECONDS = 0.00005
"""Time between two polls for the end of a collective."""


class TorchCollectives:
    """The collectives of one rank on an engine of torch.distributed, which the first of them starts."""

    def __init__(self, store: dist.Store, rank: int, size: int, start: Callable[..., Any]) -> None:
        """Takes `start`, which makes the engine from a store, a rank, a size and a timeout."""
        self._place = (store, rank, size)
        self._start = start
        self._engine: Any = None

    def all_reduce_of(self, tensor: torch.Tensor, op: str) -> Started:
        """Enqueues an all-reduce after the work on the current stream."""
        options = dist.AllreduceOptions()
        options.reduceOp = {
            "SUM": dist.ReduceOp.SUM,
            "PROD": dist.ReduceOp.PRODUCT,
            "MIN": dist.ReduceOp.MIN,
            "MAX": dist.ReduceOp.MAX,
        }[op]
        return self._after_current_stream(tensor, lambda engine: engine.allreduce([tensor], options))

    def all_to_all_of(self, output: torch.Tensor, tensor: torch.Tensor) -> Started:
        """Enqueues an all-to-all in the same order; of bytes, since engines lack some dtypes."""
        out, sent = output.view(torch.uint8), tensor.view(torch.uint8)
        return self._after_current_stream(tensor, lambda engine: engine.alltoall_base(out, sent, [], []))

    def all_gather_of(self, output: torch.Tensor, tensor: torch.Tensor) -> Started:
        """Enqueues an all-gather in the same order."""
        out, sent = output.view(torch.uint8), tensor.view(torch.uint8)
        return self._after_current_stream(tensor, lambda engine: engine._allgather_base(out, sent))

    def _after_current_stream(self, tensor: torch.Tensor, begin: Callable[[Any], dist.Work]) -> Started:
        on_gpu = tensor.device.type == "cuda"
        stream = torch.cuda.current_stream(tensor.device) if on_gpu else None

        def run(timeout_seconds: float) -> None:
            end = time.monotonic() + timeout_seconds
            with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                if self._engine is None:
                    self._engine = self._start(*self._place, timedelta(seconds=timeout_seconds))
                    leave_behind_at_fork(self._engine)
                work = begin(self._engine)
                while not work.is_completed():
                    if time.monotonic() > end:
                        raise TimeoutError(f"no answer in {timeout_seconds:g} seconds")
                    time.sleep(PAUSE_SECONDS)
                work.wait()

        return run


def nccl_of(store: dist.Store, rank: int, size: int) -> TorchCollectives | None:
    """Returns the collectives of NCCL, if PyTorch has it and sees a GPU."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return None
    return TorchCollectives(dist.PrefixStore("nccl", store), rank, size, dist.ProcessGroupNCCL)


HANG_UP_TAG, CONTACT_TAG = (1 << 31) - 1, (1 << 31) - 2
"""Tags of messages that are never received."""

FAREWELL_TAG = (1 << 31) - 3
"""Tag of the last message of a rank, for which memory is ready on all others from the beginning."""

FAREWELL_BYTES = 4096
"""Length of a farewell: text, zeros, and at the end, which is written last, `FAREWELL_END`."""

FAREWELL_END = 1

UPPER_TAGS = 1 << 30
"""Lowest tag of an engine whose gloo group a program also uses, with lower ones."""


def form_group(
    rank: int,
    size: int,
    address: str | None = None,
    port: int | None = None,
    *,
    store: dist.Store | None = None,
    name: str = "",
    timeout_seconds: float = TIMEOUT_SECONDS,
    checks: Checks = "new",
    shared_memory: bool | None = None,
) -> ProcessGroup:
    """Forms a group of the processes that use the same size and name, each with its own rank.

    They meet in `store`, else in the store of torch.distributed's default group if there is one, else in a
    store that rank 0 keeps at `address` and `port`. The n-th group that a rank forms is made with the n-th
    of the others, so a group that broke can be formed again.

    Args:
        name: tells apart groups of the same size that different processes form in one store.
        timeout_seconds: for forming the group, and then for each of its calls.
        shared_memory: as of ProcessGroup.
    """
    deadline = TimedCalls(timeout_seconds)
    keeper = None
    if store is None:
        store = default_store()
    if store is None:
        keeper = 0
        if address is None or port is None:
            raise OptionError("ranks meet at an address and port of rank 0, or in a store; got neither")
        store = _store_at(address, port, rank, size, keeper, name, timeout_seconds)
    left = max(deadline.seconds_left(), 0.0)
    engine = TorchEngine(
        store, rank, size, address=address, name=name, timeout_seconds=left, board_keeper=keeper
    )
    return ProcessGroup(engine, timeout_seconds=timeout_seconds, checks=checks, shared_memory=shared_memory)


def form_in_cluster(cluster: Launch, *, name: str, timeout_seconds: float) -> TorchEngine:
    """Returns the engine of this process of a launch."""
    deadline = TimedCalls(timeout_seconds)
    store, keeper = default_store(), None
    prefix = f"restart {cluster.restart}"
    if store is None:
        keeper = None if cluster.has_store else 0
        if cluster.address is None or cluster.port is None:
            raise OptionError(
                f"torch.distributed needs an address of rank 0: set MASTER_ADDR and MASTER_PORT; "
                f"recognised {cluster.recognised}"
            )
        store = _store_at(
            cluster.address,
            cluster.port,
            cluster.rank,
            cluster.size,
            keeper,
            name,
            timeout_seconds,
            prefix=prefix,
        )
    return TorchEngine(
        dist.PrefixStore(prefix, store),
        cluster.rank,
        cluster.size,
        address=cluster.address,
        name=name,
        timeout_seconds=max(deadline.seconds_left(), 0.0),
        board_keeper=keeper,
        is_of_launch=True,
    )


def _store_at(
    address: str,
    port: int,
    rank: int,
    size: int,
    keeper: int | None,
    name: str,
    timeout_seconds: float,
    *,
    prefix: str = "",
) -> dist.Store:
    """Returns the store at an address; if another process keeps it as this rank, all ranks are told."""
    try:
        return store_at(address, port, is_keeper=rank == keeper, timeout_seconds=timeout_seconds)
    except ProcessGroupError:
        taken = store_of_another(address, port) if rank == keeper else None
        if taken is not None:
            theirs = dist.PrefixStore(prefix, taken) if prefix else taken
            Meeting(theirs, rank, size, name, TimedCalls(DOUBLE_SECONDS)).check_double()
        raise


class TorchEngine:
    """One rank on gloo. Connections are made at once, all to all, over the way that leads to `address`.

    GLOO_SOCKET_IFNAME names another interface. Messages have tags from `first_tag` on.
    """

    name = "gloo"

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        address: str | None = None,
        name: str = "",
        timeout_seconds: float = TIMEOUT_SECONDS,
        board_keeper: int | None = None,
        is_of_launch: bool = False,
        first_tag: int = 0,
    ) -> None:
        if not 0 <= rank < size:
            raise OptionError(f"a rank is a number from 0 to size - 1; got rank {rank} of {size}")
        if not dist.is_available() or not dist.is_gloo_available():
            raise OptionError("this PyTorch was built without torch.distributed's gloo")
        self.rank = rank
        self.size = size
        self.board_keeper = board_keeper
        self._first_tag, self.largest_tag = first_tag, FAREWELL_TAG - 1 - first_tag
        deadline = TimedCalls(timeout_seconds)
        keeps_store = board_keeper == rank
        meeting = Meeting(
            store, rank, size, name, deadline, is_of_launch=is_of_launch, keeps_store=keeps_store
        )
        host = meeting.hold(way_to(address))
        self._store = meeting.store
        self._is_out = False
        self._left: list[_Awaited] = []
        self._doubted: _Awaited | None = None
        self._is_store_gone = False
        self.farewell = ""
        nccl = nccl_of(self._store, rank, size)
        self.device_collectives: Mapping[str, DeviceCollectives] = {} if nccl is None else {"cuda": nccl}
        self._gloo: Any = self._connected(host, deadline)
        leave_behind_at_fork(self._gloo)
        others = [peer for peer in range(size) if peer != rank]
        self._mail = {peer: np.zeros(FAREWELL_BYTES, np.uint8) for peer in others}
        self._deliveries: list[dist.Work] = []
        for peer, memory in self._mail.items():
            with contextlib.suppress(RuntimeError):  # of one that has left already: the first call says so
                self._deliveries.append(self._gloo.recv([from_numpy(memory)], peer, FAREWELL_TAG))

    @property
    def store(self) -> dist.Store:
        """The store that the ranks of this group alone use, and none that was formed before in its place."""
        return self._store

    @property
    def gloo(self) -> Any:
        """PyTorch's group of these ranks; None once the engine is closed."""
        return self._gloo

    @property
    def awaited_ranks(self) -> Collection[int]:
        """The rank with a missing message, and those with messages not yet checked."""
        return {message.peer for message in self._left}

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int, timeout_seconds: float
    ) -> None:
        """Exchanges all messages at once; gloo keeps messages of one tag in order, and sends on request."""
        gloo, timeout, peer = self._gloo, timedelta(seconds=timeout_seconds), self.rank
        tag += self._first_tag
        self._is_out = True
        try:
            messages: list[_Awaited] = []
            for call, these in ((gloo.recv, receives), (gloo.send, sends)):
                for peer, memory in these:
                    if memory.nbytes:
                        messages.append(_Awaited(peer, call([_tensor(memory)], peer, tag)))
            for number, awaited in enumerate(messages):
                self._left, peer = messages[number:], awaited.peer
                awaited.work.wait(timeout)
        except RuntimeError as error:
            raise RankLostError(peer, reason_of(error)) from None
        # Not in a `finally`: after an error something is on its way, for `abandon` to hang up on.
        self._left = []
        self._is_out = False

    def post(self, note: str) -> None:
        """Stores a note under the rank's number."""
        if self._is_store_gone:
            raise ConnectionError("the store is gone")
        try:
            self._store.set(f"note of {self.rank}", note)
        except RuntimeError:
            self._is_store_gone = True  # each further try would print a page of warnings
            raise

    def notes(self) -> Mapping[int, str]:
        """Returns all notes; each rank put up an empty one when it came."""
        return {rank: note for rank, note in enumerate(everyones(self._store, "note", self.size)) if note}

    def check_contact(self, silent: Collection[int]) -> None:
        """Checks contact: gloo keeps waiting if a connection ends mid-message, but refuses new messages."""
        awaited, gloo = next(iter(self._left), None), self._gloo
        if awaited is None or awaited.peer not in silent or gloo is None:
            return
        error = _refused(gloo, awaited.peer)
        if error is not None:
            if awaited is self._doubted:
                raise RankLostError(awaited.peer, reason_of(error)) from None
            self._doubted = awaited  # its message may have come just before it left

    def gone_ranks(self) -> Collection[int]:
        """Returns the ranks with connections that take no more messages."""
        gloo = self._gloo
        return [] if gloo is None else [peer for peer in self._mail if _refused(gloo, peer) is not None]

    def farewells(self) -> Mapping[int, str]:
        """Returns what ranks have said before they hung up."""
        said = {peer: memory for peer, memory in self._mail.items() if memory[-1] == FAREWELL_END}
        return {peer: memory[:-1].tobytes().rstrip(b"\0").decode() for peer, memory in said.items()}

    def abandon(self) -> None:
        """Hangs up: unfinished messages end with an error, here and at the other end.

        Otherwise a late rank would get what has been written to the memory since.
        """
        gloo = self._gloo
        # Without a store, that is all the news that ranks of other hosts get.
        if gloo is not None and (self._is_out or self._is_store_gone):
            self._say_farewell(gloo)
            _hang_up(gloo, self._mail)

    def close(self) -> None:
        """Hangs up, and leaves."""
        self.abandon()
        gloo, self._gloo = self._gloo, None
        if gloo is not None:
            self._say_farewell(gloo)
        self._deliveries.clear()

    def _say_farewell(self, gloo: Any) -> None:
        """Sends this rank's last note to all others, once."""
        text, self.farewell = self.farewell.encode(), ""
        if not text or len(text) >= FAREWELL_BYTES:
            return
        memory = np.zeros(FAREWELL_BYTES, np.uint8)
        memory[: len(text)] = np.frombuffer(text, np.uint8)
        memory[-1] = FAREWELL_END
        for peer in self._mail:
            with contextlib.suppress(RuntimeError):  # of one that has left before
                gloo.send([from_numpy(memory)], peer, FAREWELL_TAG)

    def _connected(self, host: str | None, deadline: TimedCalls) -> Any:
        interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]

        def connect() -> Any:
            gloo = dist.ProcessGroupGloo
            options = gloo._Options()
            # Given a device, gloo connects at once: otherwise a receive waits until the other rank sends.
            if interfaces:
                options._devices = [gloo.create_device(interface=name) for name in interfaces]
            elif host is None:
                options._devices = [gloo.create_default_device()]
            else:
                options._devices = [gloo.create_device(hostname=host)]
            options._timeout = timedelta(seconds=min(max(deadline.seconds_left(), 1.0), LONGEST_SECONDS))
            return gloo(self._store, self.rank, self.size, options)

        try:
            return deadline.make(connect)
        except (RuntimeError, TimeoutError) as error:
            raise ProcessGroupError(
                f"rank {self.rank} could not connect to all others from {host or 'its default interface'}; "
                f"GLOO_SOCKET_IFNAME names another interface (gloo: {reason_of(error)})"
            ) from None


class _Awaited(NamedTuple):
    """A message on its way, with the rank at its other end."""

    peer: int
    work: dist.Work


class _Adopted:
    """Read-only memory that is only sent, wrapped since PyTorch would warn about it."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._memory = memory
        self.__array_interface__ = {**memory.__array_interface__, "data": (memory.ctypes.data, False)}


def _tensor(memory: NDArray[Any]) -> Tensor:
    """Returns the memory itself, as bytes."""
    flat = memory.reshape(-1).view(np.uint8)
    return from_numpy(flat if flat.flags.writeable else np.asarray(_Adopted(flat)))


def _refused(gloo: Any, peer: int) -> RuntimeError | None:
    """Sends a byte that is never received; returns the error if the connection has ended."""
    try:
        gloo.send([_tensor(np.zeros(1, np.uint8))], peer, CONTACT_TAG)
    except RuntimeError as error:
        return error
    return None


def _hang_up(gloo: Any, peers: Iterable[int]) -> None:
    """Closes all connections of a gloo group; gloo itself does that only after a receive times out.

    A peer that is gone cannot be waited for, so each is tried.
    """
    for peer in peers:
        with contextlib.suppress(RuntimeError):
            gloo.recv([_tensor(np.empty(1, np.uint8))], peer, HANG_UP_TAG).wait(timedelta(milliseconds=1))
