"""Groups on torch.distributed: bytes go over gloo, notes hang in a store; the default group is left alone."""

from __future__ import annotations

import atexit
import contextlib
import ipaddress
import logging
import os
import re
import socket
import threading
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, from_numpy

from crossdevice.errors import DeadlineError, OptionError, ProcessGroupError
from crossdevice.process_groups.board import ranks_named
from crossdevice.process_groups.group import LONGEST_SECONDS, TIMEOUT_SECONDS, Checks, ProcessGroup
from crossdevice.process_groups.protocol import AllReduceOf, Message
from crossdevice.process_groups.torch_collectives import nccl_of
from crossdevice.values.launchers import Launch

logger = logging.getLogger("crossdevice")

SILENT_SECONDS = 10.0
"""How long ranks are waited for before that is said."""

HANG_UP_TAG, CONTACT_TAG = (1 << 31) - 1, (1 << 31) - 2
"""Of messages that nobody takes."""

SMALLEST_PAUSE_SECONDS, LARGEST_PAUSE_SECONDS = 0.001, 0.25


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
) -> ProcessGroup:
    """A group of the processes that call this with the same size and name, each with a rank of its own.

    They meet in `store`, else in the store of torch.distributed's default group if there is one, else in a
    store that rank 0 keeps at `address` and `port`. The n-th group that a rank forms is made with the n-th
    of the others, so a group that broke can be formed again.

    Args:
        name: tells apart groups of the same size that different processes form in one store.
        timeout_seconds: for forming the group, and then for each of its calls.
    """
    if store is None:
        store = _default_store()
    if store is None:
        if address is None or port is None:
            raise OptionError("ranks meet at an address and port of rank 0, or in a store; got neither")
        store = store_at(address, port, is_keeper=rank == 0, timeout_seconds=timeout_seconds)
    engine = TorchEngine(store, rank, size, address=address, name=name, timeout_seconds=timeout_seconds)
    return ProcessGroup(engine, timeout_seconds=timeout_seconds, checks=checks)


def form_in_cluster(cluster: Launch, *, name: str, timeout_seconds: float) -> TorchEngine:
    """The engine of this process of a launch."""
    store = _default_store()
    if store is None:
        if cluster.address is None or cluster.port is None:
            raise OptionError(
                f"torch.distributed needs an address of rank 0: set MASTER_ADDR and MASTER_PORT; "
                f"recognised {cluster.recognised}"
            )
        is_keeper = cluster.rank == 0 and not cluster.has_store
        store = store_at(cluster.address, cluster.port, is_keeper=is_keeper, timeout_seconds=timeout_seconds)
    return TorchEngine(
        dist.PrefixStore(f"restart {cluster.restart}", store),
        cluster.rank,
        cluster.size,
        address=cluster.address,
        name=name,
        timeout_seconds=timeout_seconds,
    )


class TorchEngine:
    """One rank on gloo. Connections are made at once, all to all, over the way that leads to `address`.

    GLOO_SOCKET_IFNAME names another interface.
    """

    name = "gloo"
    largest_tag = CONTACT_TAG - 1
    _connected_ones: ClassVar[weakref.WeakSet[TorchEngine]] = weakref.WeakSet()

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        address: str | None = None,
        name: str = "",
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        if not 0 <= rank < size:
            raise OptionError(f"a rank is a number from 0 to size - 1; got rank {rank} of {size}")
        if not dist.is_available() or not dist.is_gloo_available():
            raise OptionError("this PyTorch was built without torch.distributed's gloo")
        self.rank = rank
        self.size = size
        prefix = f"crossdevice/{name}/{size}"
        turns = f"{prefix}/turns of {rank}"
        end = time.monotonic() + timeout_seconds
        try:
            self._store = dist.PrefixStore(f"{prefix}/{store.add(turns, 1)}", store)
            host = self._host_met_by_all(_way_to(address), end)
        except DeadlineError:
            # As if this rank had not come: its next try is to meet the others' first.
            with contextlib.suppress(RuntimeError):  # not every store can forget
                self._store.delete_key(f"address of {rank}")
                store.add(turns, -1)
            raise
        except RuntimeError as error:
            raise ProcessGroupError(
                f"the store in which rank {rank} waited for the others of a group of {size} is gone: has the "
                f"process that keeps it, most often rank 0, ended? (torch.distributed: {_reason(error)})"
            ) from None
        self._is_out = False
        self._awaited: _Awaited | None = None
        self._doubted: _Awaited | None = None
        self._is_store_gone = False
        nccl = nccl_of(self._store, rank, size)
        self.device_all_reduces: Mapping[str, AllReduceOf] = (
            {} if nccl is None else {"cuda": nccl.all_reduce_of}
        )
        self._gloo: Any = self._connected(host, end - time.monotonic())
        self._connected_ones.add(self)

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int, timeout_seconds: float
    ) -> None:
        """All at once; gloo keeps messages of one tag in order, and sends them once they are asked for."""
        gloo, timeout = self._gloo, timedelta(seconds=timeout_seconds)
        self._is_out = True
        try:
            messages = [
                _Awaited(peer, call([_tensor(memory)], peer, tag))
                for call, these in ((gloo.recv, receives), (gloo.send, sends))
                for peer, memory in these
                if memory.nbytes
            ]
            for awaited in messages:
                self._awaited = awaited
                awaited.work.wait(timeout)
        except RuntimeError as error:
            raise ConnectionError(_reason(error)) from None
        self._awaited = None
        self._is_out = False

    def post(self, note: str) -> None:
        """Notes hang in the store under the rank's number."""
        if self._is_store_gone:
            raise ConnectionError("the store is gone")
        try:
            self._store.set(f"note of {self.rank}", note)
        except RuntimeError:
            self._is_store_gone = True  # each further try would print a page of warnings
            raise

    def notes(self) -> Mapping[int, str]:
        """All that hang there; an empty one was put up by each rank when it came."""
        return {rank: note for rank, note in enumerate(self._everyones("note")) if note}

    def check_contact(self, silent: Collection[int]) -> None:
        """Gloo waits on if a connection ends in the middle of a message, but takes no new ones for it."""
        awaited, gloo = self._awaited, self._gloo
        if awaited is None or awaited.peer not in silent or gloo is None:
            return
        try:
            gloo.send([_tensor(np.zeros(1, np.uint8))], awaited.peer, CONTACT_TAG)
        except RuntimeError as error:
            if awaited is self._doubted:
                raise ConnectionError(_reason(error)) from None
            self._doubted = awaited  # its message may have come just before it left

    def abandon(self) -> None:
        """Hangs up. What is on its way ends with an error, here and at the other end.

        Else whoever comes late would get what has been written to the memory since.
        """
        gloo = self._gloo
        if gloo is not None and self._is_out:
            _hang_up(gloo, [peer for peer in range(self.size) if peer != self.rank])

    def close(self) -> None:
        """Hangs up, and leaves."""
        self.abandon()
        self._gloo = None

    @classmethod
    def close_all(cls) -> None:
        """Hangs up wherever something is on its way, so that no thread is inside gloo when Python ends."""
        for engine in list(cls._connected_ones):
            engine.close()

    def _host_met_by_all(self, own: str | None, end: float) -> str | None:
        """Waits until all ranks have said that they are there, and by which address they can be reached."""
        self._store.set(f"note of {self.rank}", "")
        self._store.set(f"address of {self.rank}", own or "")
        pause, say_so = SMALLEST_PAUSE_SECONDS, time.monotonic() + SILENT_SECONDS
        while not self._store.check(self._keys("address")):
            if time.monotonic() > end:
                raise self._not_formed()
            if time.monotonic() > say_so:
                say_so = end
                logger.warning(
                    "waiting for %s to form a group of %d", ranks_named(self._missing()), self.size
                )
            time.sleep(pause)
            pause = min(2 * pause, LARGEST_PAUSE_SECONDS)
        addresses = self._everyones("address")
        # A host's own name often leads back to itself only (127.0.1.1), where others cannot follow.
        elsewhere = next((address for address in addresses if address and not _is_loopback(address)), None)
        return _way_to(elsewhere) if own and _is_loopback(own) and elsewhere else own

    def _not_formed(self) -> DeadlineError:
        missing = self._missing()
        present = [rank for rank in range(self.size) if rank not in missing]
        return DeadlineError(
            f"the group of {self.size} was not formed: {ranks_named(missing)} did not come; "
            f"{ranks_named(present)} came. Are all processes started, and do they agree on their number and "
            "on the address?"
        )

    def _missing(self) -> list[int]:
        """Ranks that have not come to form the group."""
        return [rank for rank, key in enumerate(self._keys("address")) if not self._store.check([key])]

    def _keys(self, what: str) -> list[str]:
        return [f"{what} of {rank}" for rank in range(self.size)]

    def _everyones(self, what: str) -> list[str]:
        """What all ranks have put into the store, in one question where the store can answer it."""
        store, keys = self._store, self._keys(what)
        found = store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
        return [text.decode() for text in found]

    def _connected(self, host: str | None, seconds: float) -> Any:
        timeout = timedelta(seconds=min(max(seconds, 1.0), LONGEST_SECONDS))
        try:
            if host is None or os.environ.get("GLOO_SOCKET_IFNAME"):
                return dist.ProcessGroupGloo(self._store, self.rank, self.size, timeout)
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            options._timeout = timeout
            return dist.ProcessGroupGloo(self._store, self.rank, self.size, options)
        except RuntimeError as error:
            raise ProcessGroupError(
                f"rank {self.rank} could not connect to all others from {host or 'its default interface'}; "
                f"GLOO_SOCKET_IFNAME names another interface (gloo: {_reason(error)})"
            ) from None


atexit.register(TorchEngine.close_all)  # before couriers are waited for: what is registered last runs first


class _Awaited(NamedTuple):
    """A message on its way, with the rank at its other end."""

    peer: int
    work: dist.Work


class _Adopted:
    """Memory that is only sent, but that PyTorch would warn about because it is read-only."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._memory = memory
        self.__array_interface__ = {**memory.__array_interface__, "data": (memory.ctypes.data, False)}


def _tensor(memory: NDArray[Any]) -> Tensor:
    """The memory itself, as bytes."""
    flat = memory.reshape(-1).view(np.uint8)
    return from_numpy(flat if flat.flags.writeable else np.asarray(_Adopted(flat)))


def _reason(error: Exception) -> str:
    """The one sentence of an error that tells something: no line of gloo's source, no advice."""
    first_line = str(error).strip().partition("\n")[0]
    return re.sub(r"^\[[^]]*\] ", "", first_line).partition(". This is typically")[0]


def _hang_up(gloo: Any, peers: Sequence[int]) -> None:
    """Closes all connections of a gloo group, which it does by itself only when a receive comes too late.

    A peer that is gone cannot be waited for, so each is tried.
    """
    for peer in peers:
        with contextlib.suppress(RuntimeError):
            gloo.recv([_tensor(np.empty(1, np.uint8))], peer, HANG_UP_TAG).wait(timedelta(milliseconds=1))


# ---------------------------------------------------------------- where ranks meet

_kept: dict[tuple[str, int], dist.Store] = {}
_keeping = threading.Lock()


def store_at(address: str, port: int, *, is_keeper: bool, timeout_seconds: float) -> dist.Store:
    """The store at an address, one per process: whoever keeps it keeps it until the process ends."""
    with _keeping:
        if (address, port) not in _kept:
            try:
                # As torch.distributed does it, so that a default group may be formed at the same port.
                _kept[address, port] = dist.TCPStore(
                    address,
                    port,
                    is_master=is_keeper,
                    timeout=timedelta(seconds=min(timeout_seconds, LONGEST_SECONDS)),
                    wait_for_workers=False,
                    multi_tenant=True,
                )
            except (RuntimeError, TimeoutError) as error:
                what, question = (
                    ("be kept", "is this host's address, and is the port free")
                    if is_keeper
                    else ("be reached", "where rank 0 is, and has it been started")
                )
                raise ProcessGroupError(
                    f"the store at {address}:{port}, where ranks meet, could not {what}: is that {question}? "
                    f"(torch.distributed: {_reason(error)})"
                ) from None
        return _kept[address, port]


def _default_store() -> dist.Store | None:
    """That of torch.distributed's default group, if this process has formed it."""
    if dist.is_available() and dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    return None


def _way_to(address: str | None) -> str | None:
    """The own address from which packets to that one leave; nothing is sent to find out."""
    if address is None:
        return None
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as unsent:
            unsent.connect(target)
            return str(unsent.getsockname()[0])
    except OSError:
        return None


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
