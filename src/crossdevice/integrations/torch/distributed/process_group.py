"""A process group of torch.distributed with the collectives of crossdevice."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
from torch.utils._pytree import tree_leaves

from crossdevice.algorithms.collective_all_reduce import CollectiveAllReduce
from crossdevice.integrations.torch.distributed import copies, devices
from crossdevice.integrations.torch.distributed.checks import (
    ArgumentError,
    check_alike,
    check_coalesced,
    check_contiguous,
    check_lists,
    check_own,
    check_own_part,
    check_peer,
    check_root,
    check_root_lists,
    check_single,
    check_tag,
    check_tensors,
    check_whole,
    split_lengths,
)
from crossdevice.integrations.torch.distributed.devices import nccl_asked_for, nccl_group
from crossdevice.integrations.torch.distributed.dispatch_modes import seen_by_modes
from crossdevice.integrations.torch.distributed.options import BackendOptions, read_options
from crossdevice.integrations.torch.distributed.reductions import Reduction, late_kernels
from crossdevice.integrations.torch.distributed.work import (
    CallQueue,
    EndedWork,
    SeveralWorks,
    StartedWork,
    ended_elsewhere,
    named,
    recorded,
)
from crossdevice.process_groups.engines.torch_engine import UPPER_TAGS, TorchEngine
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.recording.recorder import as_one_call, digests_of, is_recording, write_call
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.quantities import counted

Tensors = Sequence[torch.Tensor]

SMALLEST_TIMEOUT = timedelta(0)
"""Threshold: values that C++ leaves unset are less."""


class CrossdeviceProcessGroup(dist.ProcessGroup):
    """The ranks of one group of torch.distributed, as `init_process_group("crossdevice")` makes it.

    Reductions are those of `CollectiveAllReduce`, copies those of a `ProcessGroup`. Calls run one after the
    other in the order of the program: asynchronous ones in a thread of the group, or in the thread that
    waits for them first. What goes from one rank to another, and sparse tensors, go over gloo.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, options: BackendOptions
    ) -> None:
        super().__init__(rank, size)  # the constructor with a store cannot be subclassed
        self._rank, self._size, self._store = rank, size, store
        self._communication = options.communication
        self._options: dict[timedelta, CommunicationOptions] = {}
        self.options = options
        timeout = timeout if options.deadline is None else options.deadline
        options._timeout = timeout
        seconds = timeout.total_seconds()
        # Its gloo group also carries the program's messages: a second one would double what a group costs.
        engine = TorchEngine(
            dist.PrefixStore("crossdevice", store), rank, size, timeout_seconds=seconds, first_tag=UPPER_TAGS
        )
        self._formed = ProcessGroup(engine, timeout_seconds=seconds)
        self._gloo: Any = engine.gloo
        self._gloo._set_default_timeout(timeout)
        self._nccl: Any = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self.of_operators = dist.ProcessGroup(rank, size)
        """Calls the operators `c10d::*`, for `dispatch_modes`."""
        # The base class hands to gloo what is not overridden here, such as `monitored_barrier`.
        kind = dist.ProcessGroup.BackendType.GLOO
        for group in (self, self.of_operators):
            group._register_backend(torch.device("cpu"), kind, self._gloo)
            if torch.cuda.is_available():
                group._register_backend(torch.device("cuda"), kind, self._gloo)
            group._set_default_backend(kind)
        self._sequence = 0
        self._coalesced: list[dist.Work] | None = None
        self._reductions: dict[Any, Reduction] = {}
        self._queue = CallQueue("crossdevice process group")
        late_kernels.postpone()
        self._has_late_kernels = not late_kernels.is_settled
        self._ops = CollectiveAllReduce(group=self._formed, options=self._communication)
        self._copies = copies.HostCopies(self._formed)
        self._device_copies = devices.DeviceCopies(self._ops)

    # ---------------------------------------------------------------- reductions

    @seen_by_modes
    def allreduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None) -> dist.Work:
        """Combines the tensors of all ranks in place; several of one rank count as those of several."""
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        opts = _read(AllreduceOptions, opts, op, timeout)
        if tensors and tensors[0].layout != torch.strided:
            return self._delegate("all_reduce", tensors, lambda: self._gloo.allreduce(tensors, opts))
        check_alike("allreduce", tensors)
        nccl = self._nccl_for(tensors[0])
        if nccl is not None:
            return nccl.allreduce(tensors, opts)
        reduction, options = self._reduction(opts.reduceOp, tensors), self._options_of(opts)

        def call() -> None:
            if len(tensors) == 1 and _is_dense(tensors[0]):
                reduction.all_reduce(self._ops, reduction.memory(tensors[0]), options)
                return
            with _dense(tensors) as dense:
                if len(dense) == 1:
                    reduction.all_reduce(self._ops, reduction.memory(dense[0]), options)
                    return
                flats = [reduction.memory(tensor) for tensor in dense]
                total = reduction.of_replicas(self._ops, flats, options)
                for flat in flats:
                    flat[...] = total

        return self._run("all_reduce", call, tensors, tensors, opts)

    @seen_by_modes
    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        """Combines each tensor with those of all ranks in its place, all of them in one go."""
        opts = _read((AllreduceCoalescedOptions, AllreduceOptions), opts)
        check_tensors("allreduce_coalesced", tensors)
        nccl = self._nccl_for(tensors[0])
        if nccl is not None:
            return nccl.allreduce_coalesced(tensors, opts)
        reduction, options = self._reduction(opts.reduceOp, tensors), self._options_of(opts)

        def call() -> None:
            with _dense(tensors) as dense, _each_once(dense) as apart:
                reduction.batch(self._ops, [reduction.memory(tensor) for tensor in apart], options)

        return self._run("all_reduce", call, tensors, tensors, opts)

    @seen_by_modes
    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None, root: int | None = None
    ) -> dist.Work:
        """Combines the tensors of all ranks on one of them; those of the others stay as they are."""
        if isinstance(tensors, torch.Tensor):
            tensors, root, opts = [tensors], opts if root is None else root, None
        opts = _read(ReduceOptions, opts, op, timeout, root)
        check_alike("reduce", tensors)
        check_root("reduce", opts.rootRank, self._size, opts.rootTensor, len(tensors))
        check_single("reduce", tensors)
        nccl = self._nccl_for(tensors[0])
        if nccl is not None:
            return nccl.reduce(tensors, opts)
        reduction, options = self._reduction(opts.reduceOp, tensors), self._options_of(opts)
        is_root = opts.rootRank == self._rank

        def call() -> None:
            # Others than the root make the same call, and throw its result away.
            with _dense(tensors, writes=is_root) as (own,):
                flat = reduction.memory(own)
                total = reduction.of_replicas(self._ops, [flat], options)
                if is_root:
                    flat[...] = total

        return self._run("reduce", call, tensors, tensors, opts)

    @seen_by_modes
    def reduce_scatter_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - PyTorch's name
        opts: Any = None,
    ) -> dist.Work:
        """Combines the inputs of all ranks; each rank gets its part."""
        opts = _read(ReduceScatterOptions, opts)
        check_tensors("reduce_scatter", [input])
        check_whole("reduce_scatter", input, output, self._size)
        return self._reduce_scatter("_reduce_scatter_base", [output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    @seen_by_modes
    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Reduces and scatters several inputs together."""
        opts = _read(ReduceScatterOptions, opts)
        for output, each in zip(outputs, inputs, strict=True):
            check_whole("reduce_scatter", each, output, self._size)
        return self._reduce_scatter("reduce_scatter_tensor_coalesced", outputs, inputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    @seen_by_modes
    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, op: Any = None
    ) -> dist.Work:
        """Combines the parts that all ranks have for this one, of a list for each output."""
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = _read(ReduceScatterOptions, opts, op, timeout)
        check_lists("reduce_scatter", inputs, outputs, self._size, "input")
        nccl = self._nccl_for(outputs[0])
        if nccl is not None:
            return nccl.reduce_scatter(outputs, inputs, opts)
        wholes = [torch.cat([part.detach().reshape(-1) for part in parts]) for parts in inputs]
        sizes = [[part.numel() for part in parts] for parts in inputs]
        for output, lengths in zip(outputs, sizes, strict=True):
            if output.numel() != lengths[self._rank]:
                raise ArgumentError(
                    f"crossdevice reduce_scatter: output has {counted(output.numel(), 'element')}, and the "
                    f"part of rank {self._rank} has {lengths[self._rank]}"
                )
        return self._reduce_scatter("reduce_scatter", outputs, wholes, opts, sizes)

    def _reduce_scatter(
        self,
        name: str,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        opts: Any,
        sizes: list[list[int]] | None = None,
    ) -> dist.Work:
        nccl = self._nccl_for(outputs[0])
        if nccl is not None:
            return nccl.reduce_scatter_tensor_coalesced(outputs, inputs, opts)
        reduction, options = self._reduction(opts.reduceOp, inputs), self._options_of(opts)

        def call() -> None:
            with _dense(outputs) as written, _dense(inputs, writes=False) as read:
                for number, (out, whole) in enumerate(zip(written, read, strict=True)):
                    lengths = [out.numel()] * self._size if sizes is None else sizes[number]
                    flat = reduction.memory(whole)
                    reduction.scatter(self._ops, flat, lengths, reduction.memory(out), options)

        return self._run(name, call, outputs, inputs, opts)

    # ---------------------------------------------------------------- copies

    @seen_by_modes
    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: Any = None, root: int | None = None
    ) -> dist.Work:
        """Copies the tensors of one rank to all others."""
        if isinstance(tensors, torch.Tensor):
            tensors, root, opts = [tensors], opts if root is None else root, None
        opts = _read(BroadcastOptions, opts, None, timeout, root)
        check_alike("broadcast", tensors)
        check_root("broadcast", opts.rootRank, self._size, opts.rootTensor, len(tensors))
        nccl = self._nccl_for(tensors[0])
        if nccl is not None:
            return nccl.broadcast(tensors, opts)
        root, chosen, seconds = opts.rootRank, opts.rootTensor, self._seconds_of(opts)
        what = f"broadcast from rank {root} of {_what(tensors[chosen])}"

        def call() -> None:
            with _dense(tensors, writes=self._rank != root or len(tensors) > 1) as dense:
                self._copies_of(dense[0]).broadcast([dense[chosen]], root, what, seconds)
                for tensor in dense:
                    if tensor is not dense[chosen]:
                        tensor.copy_(dense[chosen])

        return self._run("broadcast", call, tensors, tensors, opts)

    @seen_by_modes
    def all_gather_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - PyTorch's name
        opts: Any = None,
    ) -> dist.Work:
        """Puts the inputs of all ranks end to end."""
        return self._all_gather_single("_allgather_base", [output], [input], _read(AllgatherOptions, opts))

    _allgather_base = all_gather_single

    @seen_by_modes
    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Gathers several inputs together."""
        opts = _read(AllgatherOptions, opts)
        return self._all_gather_single("allgather_into_tensor_coalesced", outputs, inputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _all_gather_single(
        self, name: str, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any
    ) -> dist.Work:
        check_tensors("all_gather", inputs[:1])
        for output, each in zip(outputs, inputs, strict=True):
            check_whole("all_gather", output, each, self._size)
        nccl = self._nccl_for(inputs[0])
        if nccl is not None:
            return nccl.allgather_into_tensor_coalesced(outputs, inputs, opts)
        seconds = self._seconds_of(opts)

        def call() -> None:
            with _dense(outputs) as written, _dense(inputs, writes=False) as read:
                for out, own in zip(written, read, strict=True):
                    parts = out.view(-1).chunk(self._size) if out.numel() else [out] * self._size
                    what = f"all_gather of {_what(own)} into one tensor"
                    self._copies_of(own).all_gather(parts, own, what, seconds)

        return self._run(name, call, outputs, inputs, opts)

    @seen_by_modes
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Fills each list with the tensors of all ranks; these may have other sizes."""
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = _read(AllgatherOptions, opts, None, timeout)
        check_lists("allgather", outputs, inputs, self._size, "output")
        nccl = self._nccl_for(inputs[0])
        if nccl is not None:
            return nccl.allgather(outputs, inputs, opts)
        return self._all_gather("all_gather", outputs, inputs, opts)

    @seen_by_modes
    def allgather_coalesced(self, outputs: Any, inputs: list[torch.Tensor], opts: Any = None) -> dist.Work:
        """Fills for each rank a list with its tensors."""
        opts = _read(AllgatherOptions, opts)
        check_coalesced("allgather_coalesced", outputs, inputs, self._size)
        by_input = [list(each) for each in zip(*outputs, strict=True)]
        return self._all_gather("all_gather", by_input, inputs, opts, outputs)

    def _all_gather(
        self,
        name: str,
        outputs: Sequence[Tensors],
        inputs: Tensors,
        opts: Any,
        results: Sequence[Any] | None = None,
    ) -> dist.Work:
        is_of_devices = len(inputs) > 1 and results is None  # then all of them have one size
        for targets, own in zip(outputs, inputs, strict=True):
            for place in range(len(targets)) if is_of_devices else [self._rank]:
                check_own(name, targets[place], own, place)
        seconds, number = self._seconds_of(opts), len(inputs)
        everything = [tensor for each in outputs for tensor in each]

        def call() -> None:
            with _dense(everything) as written, _dense(inputs, writes=False) as read:
                if is_of_devices:  # every list gets the tensors of all devices of all ranks
                    own = torch.cat([each.reshape(-1) for each in read])
                    whole = own.new_empty(self._size * own.numel())
                    what = f"all_gather of {counted(number, 'tensor')}, {_what(read[0])}"
                    self._copies_of(own).all_gather(whole.chunk(self._size), own, what, seconds)
                    parts = whole.chunk(self._size * number)
                    for place, tensor in enumerate(written):
                        tensor.copy_(parts[place % len(parts)].view(tensor.shape))
                    return
                for place, own in enumerate(read):
                    targets = written[place * self._size : (place + 1) * self._size]
                    what = f"all_gather of {own.dtype} {[target.numel() for target in targets]}"
                    self._copies_of(own).all_gather(targets, own, what, seconds)

        return self._run(name, call, results if results is not None else _results(outputs), inputs, opts)

    @seen_by_modes
    def gather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, root: int | None = None
    ) -> dist.Work:
        """Brings the tensors of all ranks to one."""
        if isinstance(inputs, torch.Tensor):
            outputs, inputs, root = (
                [outputs] if len(outputs) else [],
                [inputs],
                opts if root is None else root,
            )
            opts = None
        opts = _read(GatherOptions, opts, None, timeout, root)
        root = opts.rootRank
        check_root_lists("gather", outputs, inputs, root, self._rank, self._size, "output")
        nccl = self._nccl_for(inputs[0])
        if nccl is not None:
            return nccl.gather(outputs, inputs, opts)
        seconds, targets = self._seconds_of(opts), outputs[0] if self._rank == root else []
        what = f"gather on rank {root} of {_what(inputs[0])}"

        def call() -> None:
            with _dense(targets) as written, _dense(inputs, writes=False) as (own,):
                sent = [own if peer == root else None for peer in range(self._size)]
                self._copies_of(own).all_to_all(written or [None] * self._size, sent, what, seconds)

        return self._run("gather", call, list(targets), inputs, opts)

    @seen_by_modes
    def scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, root: int | None = None
    ) -> dist.Work:
        """Gives each rank one of the tensors of one rank."""
        if isinstance(outputs, torch.Tensor):
            outputs, inputs, root = [outputs], [inputs] if len(inputs) else [], opts if root is None else root
            opts = None
        opts = _read(ScatterOptions, opts, None, timeout, root)
        root = opts.rootRank
        check_root_lists("scatter", inputs, outputs, root, self._rank, self._size, "input")
        nccl = self._nccl_for(outputs[0])
        if nccl is not None:
            return nccl.scatter(outputs, inputs, opts)
        seconds, sources = self._seconds_of(opts), inputs[0] if self._rank == root else []
        what = f"scatter from rank {root} of {_what(outputs[0])}"

        def call() -> None:
            with _dense(outputs) as (out,), _dense(sources, writes=False) as read:
                received = [out if peer == root else None for peer in range(self._size)]
                self._copies_of(out).all_to_all(received, read or [None] * self._size, what, seconds)

        return self._run("scatter", call, outputs, sources or outputs, opts)

    @seen_by_modes
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - PyTorch's name
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
        timeout: Any = None,
    ) -> dist.Work:
        """Gives each rank a part of the input, and puts the parts of all ranks end to end."""
        opts = _read(AllToAllOptions, opts, None, timeout)
        check_tensors("all_to_all", [input, output])
        check_contiguous([input, output])
        lengths = [
            split_lengths(tensor, sizes, self._size)
            for tensor, sizes in ((output, output_split_sizes), (input, input_split_sizes))
        ]
        check_own_part("all_to_all", output, input, lengths, self._rank)
        nccl = self._nccl_for(input)
        if nccl is not None:
            return nccl.alltoall_base(output, input, list(output_split_sizes), list(input_split_sizes), opts)
        seconds, what = self._seconds_of(opts), f"all_to_all of {input.dtype}"

        def call() -> None:
            with _dense([output]) as (out,), _dense([input], writes=False) as (own,):
                received, sent = _split(out, lengths[0]), _split(own, lengths[1])
                self._copies_of(own).all_to_all(received, sent, what, seconds)

        return self._run("all_to_all", call, [output], [input], opts)

    alltoall_base = all_to_all_single

    @seen_by_modes
    def alltoall(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None, timeout: Any = None
    ) -> dist.Work:
        """Gives each rank one of the inputs, and takes one from each."""
        opts = _read(AllToAllOptions, opts, None, timeout)
        check_tensors("all_to_all", [*inputs, *outputs])
        for tensors, of in ((outputs, "output"), (inputs, "input")):
            if len(tensors) != self._size:
                raise ArgumentError(
                    f"crossdevice all_to_all: {of} tensor list size {len(tensors)} does not match world size "
                    f"{self._size}"
                )
        check_own("all_to_all", outputs[self._rank], inputs[self._rank], self._rank)
        nccl = self._nccl_for(inputs[0])
        if nccl is not None:
            return nccl.alltoall(outputs, inputs, opts)
        seconds, what = self._seconds_of(opts), f"all_to_all of {inputs[0].dtype}"

        def call() -> None:
            with _dense(outputs) as received, _dense(inputs, writes=False) as sent:
                self._copies_of(sent[0]).all_to_all(received, sent, what, seconds)

        return self._run("all_to_all", call, outputs, inputs, opts)

    @seen_by_modes
    def barrier(self, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Returns when all ranks have come."""
        opts = _read(BarrierOptions, opts, None, timeout)
        if opts.device is not None and opts.device.type == "cuda" and nccl_asked_for(self):
            return self._get_backend(torch.device("cuda")).barrier(opts)
        seconds = self._seconds_of(opts)
        return self._run("barrier", lambda: self._copies.barrier(seconds), [], [], opts)

    # ---------------------------------------------------------------- from rank to rank

    @seen_by_modes
    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> dist.Work:
        """Sends a tensor to one rank, over gloo; over NCCL from GPUs that use it."""
        check_peer("send", dst, self._rank, self._size)
        check_tag("send", tag, UPPER_TAGS)
        if self._has_no_engine(tensors[0]):
            sent = devices.on_host(tensors)
            return self._delegate("send", tensors, lambda: self._gloo.send(sent, dst, tag))
        engine = self._engine_for(tensors[0])
        return self._delegate("send", tensors, lambda: engine.send(tensors, dst, tag))

    @seen_by_modes
    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> dist.Work:
        """Receives a tensor from one rank."""
        check_peer("recv", src, self._rank, self._size)
        check_tag("recv", tag, UPPER_TAGS)
        return self._receive("recv", tensors, lambda engine, received: engine.recv(received, src, tag))

    @seen_by_modes
    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> dist.Work:
        """Receives a tensor from any rank."""
        check_tag("recv", tag, UPPER_TAGS)
        return self._receive(
            "recvAnySource", tensors, lambda engine, received: engine.recv_anysource(received, tag)
        )

    def _receive(self, name: str, tensors: Tensors, begin: Callable[[Any, Tensors], dist.Work]) -> dist.Work:
        if self._has_no_engine(tensors[0]):
            received = [torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") for tensor in tensors]
            return self._delegate(
                name,
                tensors,
                lambda: devices.ReceivedWork(name, begin(self._gloo, received), received, tensors),
            )
        engine = self._engine_for(tensors[0])
        return self._delegate(name, tensors, lambda: begin(engine, tensors))

    def _has_no_engine(self, tensor: torch.Tensor) -> bool:
        """Returns True for a tensor on a GPU without NCCL: gloo would take its memory for the host's."""
        return tensor.is_cuda and self._nccl_for(tensor) is None

    def _engine_for(self, tensor: torch.Tensor) -> Any:
        return self._nccl_for(tensor) or self._gloo

    def _delegate(self, name: str, tensors: Tensors, begin: Callable[[], dist.Work]) -> dist.Work:
        """Delegates a call to an engine of PyTorch; its own `Work` says when the call has ended."""
        self._sequence += 1
        work = ended_elsewhere(name, tensors, begin) if torch.autograd._profiler_enabled() else begin()
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    # ---------------------------------------------------------------- several in one

    def _start_coalescing(self, device: torch.device) -> None:  # noqa: ARG002
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:  # noqa: ARG002
        started, self._coalesced = self._coalesced or [], None
        return SeveralWorks(started)

    # ---------------------------------------------------------------- the group

    def getBackendName(self) -> str:  # noqa: N802 - PyTorch's name
        """Returns the name under which it is registered."""
        return "crossdevice"

    _get_backend_name = name = getBackendName

    def _set_group_name(self, name: str) -> None:
        super()._set_group_name(name)
        self.of_operators._set_group_name(name)

    def get_group_store(self) -> dist.Store:
        """Returns the store in which its ranks met."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the deadline of collectives that are given none."""
        self.options._timeout = timeout
        self._gloo._set_default_timeout(timeout)

    def _set_sequence_number_for_group(self) -> None:
        """Starts counting its collectives."""
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        """Returns the number of collectives that were begun."""
        return self._sequence

    def _get_backend(self, device: torch.device) -> Any:
        """Returns PyTorch's engine for operations on a device that are delegated."""
        if torch.device(device).type == "cuda" and nccl_asked_for(self):
            if self._nccl is None:
                timeout = self._gloo.options._timeout
                self._nccl = nccl_group(self._store, self._rank, self._size, timeout)
                self._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, self._nccl)
            return self._nccl
        return super()._get_backend(torch.device(device))

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> CrossdeviceProcessGroup | None:
        """Returns a group of some of its ranks, which call this; None on others."""
        del device_types
        ranks = sorted(new_ranks)
        if self._rank not in ranks:
            return None
        name = group_name or f"{self.group_name}:split:{ranks}"
        group = CrossdeviceProcessGroup(
            dist.PrefixStore(f"{name}/", self._store),
            ranks.index(self._rank),
            len(ranks),
            timeout or self._gloo.options._timeout,
            opts if isinstance(opts, BackendOptions) else BackendOptions(self._communication.precision),
        )
        group._set_group_name(name)
        group._set_group_desc(group_desc or f"{self.group_desc}:split")
        return group

    def shutdown(self) -> None:
        """Ends the group on this rank and gives up work in progress."""
        self._queue.stop()
        self._formed.close()
        for engine in (self._gloo, self._nccl):
            if engine is not None:
                engine.shutdown()

    def abort(self) -> None:
        """Ends the group on this rank at once."""
        self.shutdown()

    def __repr__(self) -> str:
        return (
            f"<CrossdeviceProcessGroup: rank {self._rank} of {self._size}, {self._communication.precision}>"
        )

    # ---------------------------------------------------------------- how calls are made

    def _run(
        self, name: str, call: Callable[[], None], results: Sequence[Any], tensors: Tensors, opts: Any
    ) -> dist.Work:
        """Makes a call now, if the program waits for it and nothing is under way; else starts it."""
        self._sequence += 1
        if tensors and tensors[0].is_meta:  # which have nothing to exchange, as in gloo
            return EndedWork(name, results)
        if is_recording():
            call = self._recorded_bits(name, call, results, tensors)
        is_profiled = torch.autograd._profiler_enabled()
        on_gpu = bool(tensors) and tensors[0].is_cuda
        is_async = getattr(opts, "asyncOp", True)  # older versions do not say, and wait for a started call
        if not (is_async or is_profiled or on_gpu or self._coalesced is not None):
            try:
                if self._queue.run_now(call):
                    return EndedWork(name, results)
            except Exception as error:
                raise named(error) from error.__cause__
        if is_profiled:
            call = recorded(name, tensors, call)
        work = (
            self._gpu_work(name, call, results, tensors)
            if on_gpu
            else StartedWork(self._queue, name, call, results)
        )
        self._queue.start(work)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _recorded_bits(
        self, name: str, call: Callable[[], None], results: Sequence[Any], tensors: Tensors
    ) -> Callable[[], None]:
        """Records the call as one event of a record of bits, calls of crossdevice inside included."""

        def run() -> None:
            before = digests_of(list(tensors))
            with as_one_call():
                call()
            write_call(name.strip("_").removesuffix("_base"), self._rank, before, digests_of(list(results)))

        return run

    def _gpu_work(
        self, name: str, call: Callable[[], None], results: Sequence[Any], tensors: Tensors
    ) -> StartedWork:
        device = tensors[0].device
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)
        # A program may release them before the stream is done: the allocator keeps their memory until then.
        for tensor in tree_leaves([tensors, results]):
            tensor.record_stream(stream)
        return devices.DeviceWork(self._queue, name, call, results, device, stream)

    def _reduction(self, op: Any, tensors: Tensors) -> Reduction:
        if self._has_late_kernels:
            self._note_reduction(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
        kind, dtype = op.op if isinstance(op, dist.ReduceOp) else op, tensors[0].dtype
        if kind == dist.ReduceOp.RedOpType.PREMUL_SUM:
            return Reduction(op, dtype)
        known = self._reductions.get((kind, dtype))
        if known is None:
            known = self._reductions[kind, dtype] = Reduction(op, dtype)
        return known

    def _note_reduction(self, num_bytes: int) -> None:
        """Prepares calls again once kernels are loaded: calls prepared before keep using NumPy."""
        late_kernels.note_reduction(num_bytes)
        if late_kernels.is_settled:
            self._has_late_kernels = False
            self._reductions.clear()
            self._ops = CollectiveAllReduce(group=self._formed, options=self._communication)

    def _options_of(self, opts: Any) -> CommunicationOptions:
        timeout = opts.timeout
        if timeout <= SMALLEST_TIMEOUT:
            timeout = self._gloo.options._timeout
        known = self._options.get(timeout)
        if known is None:
            known = self._options[timeout] = self._communication.merge(
                CommunicationOptions(timeout_seconds=timeout.total_seconds())
            )
        return known

    def _seconds_of(self, opts: Any) -> float:
        timeout: timedelta = opts.timeout
        return (timeout if timeout > SMALLEST_TIMEOUT else self._gloo.options._timeout).total_seconds()

    def _copies_of(self, tensor: torch.Tensor) -> copies.HostCopies | devices.DeviceCopies:
        return self._copies if tensor.is_cpu else self._device_copies

    def _nccl_for(self, tensor: torch.Tensor) -> Any:
        """Returns NCCL for tensors on GPUs, if the program has asked for it."""
        return None if tensor.is_cpu or not nccl_asked_for(self) else self._get_backend(tensor.device)


def _read(
    kind: Any, opts: Any, op: Any = None, timeout: timedelta | None = None, root: int | None = None
) -> Any:
    """Reads the options of a call, also of overloads that take them as single arguments."""
    if isinstance(opts, kind):
        return opts
    made = (kind[0] if isinstance(kind, tuple) else kind)()
    if isinstance(opts, timedelta):
        timeout = opts
    elif opts is not None:
        op = opts
    if op is not None:
        made.reduceOp = op
    if timeout is not None:
        made.timeout = timeout
    if root is not None:
        made.rootRank = root
    return made


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


@contextlib.contextmanager
def _dense(tensors: Tensors, *, writes: bool = True) -> Iterator[Tensors]:
    """Yields the tensors if they are contiguous, else copies, which are written back."""
    dense = [
        tensor.detach() if _is_dense(tensor) else tensor.detach().resolve_conj().resolve_neg().contiguous()
        for tensor in tensors
    ]
    yield dense
    if writes:
        for tensor, copy in zip(tensors, dense, strict=True):
            if not _is_dense(tensor):
                tensor.detach().copy_(copy)


@contextlib.contextmanager
def _each_once(tensors: Tensors) -> Iterator[Tensors]:
    """Yields the tensors, or copies if one occurs twice; the last copy is written last."""
    if len({tensor.data_ptr() for tensor in tensors}) == len(tensors):
        yield tensors
        return
    copies_of_all = [tensor.clone() for tensor in tensors]
    yield copies_of_all
    for tensor, copy in zip(tensors, copies_of_all, strict=True):
        tensor.copy_(copy)


def _split(whole: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
    return list(whole.split(list(lengths))) if whole.ndim else [whole]


def _what(tensor: torch.Tensor) -> str:
    """Describes a tensor for errors and other ranks."""
    return _elements_text(tensor.numel(), tensor.dtype)


@functools.lru_cache(maxsize=256)
def _elements_text(number: int, dtype: torch.dtype) -> str:
    # Kept: every collective says what it is.
    return f"{counted(number, 'element')} of {str(dtype).removeprefix('torch.')}"


def _results(lists: Sequence[Tensors]) -> list[Any]:
    return list(lists[0]) if len(lists) == 1 else list(lists)


def create(opts: Any, pg_options: Any = None) -> CrossdeviceProcessGroup:
    """Makes a group for `torch.distributed`, which calls this on each rank of it."""
    options = read_options(pg_options)
    options.group_name, options.global_ranks_in_group = opts.group_id, opts.global_ranks_in_group
    return CrossdeviceProcessGroup(opts.store, opts.group_rank, opts.group_size, opts.timeout, options)
