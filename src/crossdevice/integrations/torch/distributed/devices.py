"""Collectives of tensors on GPUs: on a stream of their own, ordered with the program's by events.

Messages from rank to rank go through the host, by an engine that knows its memory alone. NCCL makes the
collectives of groups that have asked for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from crossdevice.algorithms.collective_all_reduce import CollectiveAllReduce
from crossdevice.integrations.torch.distributed.dispatch_modes import never_compiled
from crossdevice.integrations.torch.distributed.work import NO_TIMEOUT, CallQueue, EndedWork, StartedWork
from crossdevice.values.options import CommunicationOptions


class DeviceCopies:
    """Collectives that copy GPU tensors: from each other's memory where they can, else through the host's."""

    def __init__(self, ops: CollectiveAllReduce) -> None:
        self._ops = ops

    def all_gather(
        self, of_ranks: Sequence[torch.Tensor], own: torch.Tensor, what: str, seconds: float | None = None
    ) -> None:
        """Fills in the tensors of all ranks, which may have different sizes."""
        del what
        everything = self._ops.all_gather(own.reshape(-1), options=_options(seconds))
        parts = everything.split([tensor.numel() for tensor in of_ranks])
        for target, part in zip(of_ranks, parts, strict=True):
            target.copy_(part.view(target.shape))

    def broadcast(
        self, tensors: Sequence[torch.Tensor], root: int, what: str, seconds: float | None = None
    ) -> None:
        """Copies the root's tensors to those of all others."""
        del what
        for tensor in tensors:
            value = self._ops.value_of_rank(tensor, root, _options(seconds))
            if value is not tensor:
                tensor.copy_(value)

    def all_to_all(
        self,
        received: Sequence[torch.Tensor | None],
        sent: Sequence[torch.Tensor | None],
        what: str,
        seconds: float | None = None,
    ) -> None:
        """Sends each rank a part and receives one from each; None stands for nothing."""
        del what
        like = next(tensor for tensor in (*sent, *received) if tensor is not None)
        flats = [like.new_empty(0) if tensor is None else tensor.reshape(-1) for tensor in sent]
        sizes = [flat.numel() for flat in flats]
        everything = self._ops.all_to_all(torch.cat(flats), sizes=sizes, options=_options(seconds))
        start = 0
        for target in received:
            if target is not None:
                target.copy_(everything[start : start + target.numel()].view(target.shape))
                start += target.numel()


class DeviceWork(StartedWork):
    """A collective on a side stream: `wait` orders the current stream after it.

    The host waits for what the host does: the steps that ranks take together.
    """

    def __init__(
        self,
        queue: CallQueue,
        name: str,
        function: Callable[[], Any],
        results: Sequence[Any],
        device: torch.device,
        stream: torch.cuda.Stream,
    ) -> None:
        self._device, self._stream = device, stream
        self._after = torch.cuda.Event()
        before = torch.cuda.current_stream(device).record_event()

        def run() -> None:
            with torch.cuda.device(device), torch.cuda.stream(stream), torch.no_grad():
                stream.wait_event(before)
                function()
                self._after.record(stream)

        super().__init__(queue, name, run, results)

    def is_completed(self) -> bool:
        """Returns True once the GPU has ended it, well or not."""
        return super().is_completed() and (self._error is not None or self._after.query())

    @never_compiled
    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Orders the current stream after it; blocks the host until it is on the side stream."""
        super().wait(timeout)
        torch.cuda.current_stream(self._device).wait_event(self._after)
        return True

    def _new_future(self) -> torch.futures.Future[Any]:
        return torch.futures.Future(devices=[self._device])

    def _settle(self, future: torch.futures.Future[Any]) -> None:
        with torch.cuda.stream(self._stream):  # the future keeps the stream's event
            super()._settle(future)


class ReceivedWork(EndedWork):
    """A message for tensors on a GPU that an engine receives on the host: `wait` copies it to them.

    If a future is asked for, a thread of its own waits and copies: in that of the group, collectives would
    wait for the message.
    """

    def __init__(
        self,
        name: str,
        work: dist.Work,
        received: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
    ) -> None:
        super().__init__(name, targets)
        self._work, self._received = work, received
        self._is_copied = False
        self._beside: StartedWork | None = None

    def is_completed(self) -> bool:
        """Returns True once the message has come, well or not."""
        return self._work.is_completed()

    def is_success(self) -> bool:
        """Returns True if it has come without an error."""
        return self._work.is_success()

    def exception(self) -> BaseException | None:
        """Returns its error; None if there was none."""
        error: BaseException | None = self._work.exception()
        return error

    @never_compiled
    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Blocks until the message has come; the current stream copies it, or is ordered after the copy."""
        if self._beside is not None:
            return self._beside.wait(timeout)
        self._work.wait() if timeout == NO_TIMEOUT else self._work.wait(timeout)
        if not self._is_copied:
            self._is_copied = True
            self._copy()
        return True

    @never_compiled
    def get_future(self) -> torch.futures.Future[Any]:
        """Returns a future for the tensors it writes to."""
        if self._is_copied:
            return super().get_future()
        if self._beside is None:
            self._beside = started_beside(self._name, self._receive, self._results)
        return self._beside.get_future()

    def _receive(self) -> None:
        self._work.wait()
        self._copy()

    def _copy(self) -> None:
        with torch.no_grad():
            for target, tensor in zip(self._results, self._received, strict=True):
                target.copy_(tensor)

    def _new_future(self) -> torch.futures.Future[Any]:
        on = {target.device for target in self._results if target.is_cuda}
        return torch.futures.Future(devices=list(on))

    @never_compiled
    def result(self) -> list[Any]:
        """Returns the tensors it wrote to, once the message has come."""
        self.wait()
        return super().result()

    def _source_rank(self) -> int:
        """Returns the rank that has sent it."""
        return self._work._source_rank()


def started_beside(name: str, function: Callable[[], Any], results: Sequence[torch.Tensor]) -> StartedWork:
    """Starts a function on a thread and a stream of its own, in no order with the calls of a group."""
    queue = CallQueue(f"crossdevice {name}")

    def run() -> None:
        try:
            function()
        finally:
            queue.stop()

    device = results[0].device
    stream = torch.cuda.Stream(device)
    for tensor in results:
        tensor.record_stream(stream)
    work = DeviceWork(queue, name, run, results, device, stream)
    queue.start(work)
    return work


def on_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns contiguous copies on the host; waits for pending work of the current stream on the tensors."""
    return [tensor.detach().cpu().contiguous() for tensor in tensors]


def _options(seconds: float | None) -> CommunicationOptions | None:
    return None if seconds is None or math.isinf(seconds) else CommunicationOptions(timeout_seconds=seconds)


def nccl_asked_for(group: dist.ProcessGroup) -> bool:
    """Returns True if the program has named NCCL beside this backend, as in "cpu:crossdevice,cuda:nccl"."""
    config = distributed_c10d._world.pg_backend_config.get(group, "")
    return "cuda:nccl" in str(config)


def nccl_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Returns a group on NCCL; its first collective creates communicators."""
    if not dist.is_nccl_available():
        raise RuntimeError("Distributed package doesn't have NCCL built in")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    made = dist.ProcessGroupNCCL(dist.PrefixStore("cuda/", store), rank, size, options)
    made._set_sequence_number_for_group()
    return made
