"""Gradients of micro-batches, added without rounding: the same bits on any number of workers."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from crossdevice.combining.between_ranks import (
    BUCKET_BYTES,
    RoundedSum,
    ShardedSums,
    gathered_json,
    write_own,
    write_totals,
)
from crossdevice.errors import (
    ContextError,
    ConversionError,
    CrossDeviceError,
    DtypeError,
    MismatchError,
    OptionError,
)
from crossdevice.execution.fingerprints import ROOT
from crossdevice.integrations.torch.communication_hook import check_group, formed_group
from crossdevice.integrations.torch.gradient_sums import (
    DenseSum,
    GradientSum,
    RowSum,
    SumsOnGpu,
    no_weight,
    whole_weight,
)
from crossdevice.integrations.torch.tensor_kinds import is_instance_of
from crossdevice.kernels.host.running_sum import add_all
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.recording.recorder import digests_by_path, is_recording, write_call, write_mark
from crossdevice.values.dtypes import FLOATS, PARTS
from crossdevice.values.launchers import launched
from crossdevice.values.options import whole_number
from crossdevice.values.quantities import counted, kind_text
from crossdevice.values.reduce_op import ReduceOp


class ExactStep(NamedTuple):
    """Totals of a step's gradients, on all workers together.

    Args:
        weight: the sum of all weights.
        micro_batches: the number of gradients that were added.
        apart: elements of this worker that its float64 could not hold, and which were kept as fractions.
        bytes_sent: what this worker sent to others.

    >>> ExactStep(weight=64, micro_batches=8, apart=0, bytes_sent=0).weight
    64
    """

    weight: int
    micro_batches: int
    apart: int
    bytes_sent: int


class ExactGradients:
    """Adds gradients of micro-batches without rounding, on this worker and then over all of them.

    Each worker calls `add` after the backward pass of every micro-batch it runs, and all call `finish` at the
    end of the step. Then `.grad` of every parameter is the weighted mean over all micro-batches of all
    workers, rounded once: its bits depend neither on the number of workers nor on who ran which micro-batch,
    nor in which order. It needs 16 bytes a parameter (24 for float64) beside the gradients.

    All workers make theirs together. From then on the others name a worker that is lost.

    Plain modules need no wrapper. DistributedDataParallel runs its backward passes under `no_sync()`, or with
    PyTorch's `noop_hook`. Modules of FSDP2 are refused: their gradients were rounded while they were
    scattered. `ExactReduceScatter` is for them.

    Args:
        parameters: `model.parameters()` or `model.named_parameters()`; errors of the latter name parameters.
        group: the workers: a group of crossdevice or of torch.distributed, of any backend. None means the
            default group of torch.distributed, if there is one, else this process alone.
        bucket_bytes: how much of the sums travels at once: the least that a worker gives. It changes no bits.
        is_sharded: each of W workers keeps the sums of its shard of the parameters, 16 / W bytes a parameter,
            and the gradients of every micro-batch travel, 4 bytes a parameter. All workers call `add` equally
            often, those without a micro-batch `add(0)`. Right where memory is scarce and micro-batches few.
            Gradients have to be dense, and are added on the host. It changes no bits either.

    Raises:
        OptionError: there are no parameters or other objects among them, the group is of another kind, or
            the process was launched as one of several and no group says so.
        DeadlineError: other workers did not make theirs in time.

    >>> model = torch.nn.Linear(2, 1)
    >>> exact = ExactGradients(model.parameters())
    >>> for examples in (torch.ones(3, 2), torch.zeros(5, 2)):
    ...     model(examples).mean().backward()
    ...     exact.add(weight=len(examples))
    >>> exact.finish().weight, model.weight.grad
    (8, tensor([[0.3750, 0.3750]]))
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        group: ProcessGroup | dist.ProcessGroup | None = None,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        is_sharded: bool = False,
    ) -> None:
        named = _named(parameters)
        check_group(group)
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._bucket_bytes = whole_number("bucket_bytes", bucket_bytes, 1)
        self._given = group
        self._group = group if isinstance(group, ProcessGroup) else None
        self._sums: dict[int, GradientSum] = {}
        self._kept: dict[int, GradientSum] = {}  # of earlier steps, to reuse their memory
        self._on_gpu = SumsOnGpu()
        self._is_sharded = is_sharded
        self._shards: ShardedSums | None = None
        self._bytes_sent = 0
        self._weight = self._micro_batches = 0
        self._results: dict[int, weakref.ref[torch.Tensor]] = {}
        size = launched(os.environ).size
        if group is None and not _has_default_group() and size > 1:
            raise OptionError(
                f"this process was launched as one of {size}, and no group says so: give group=, or call "
                "torch.distributed.init_process_group before"
            )
        # Already here: a worker that is lost before it first finishes a step is known to the others then.
        self._workers()

    @property
    def weight(self) -> int:
        """The sum of the weights that this worker has added in this step."""
        return self._weight

    @property
    def micro_batches(self) -> int:
        """The number of gradients that this worker has added in this step."""
        return self._micro_batches

    @property
    def apart(self) -> int:
        """The number of elements that do not fit in float64 numbers, and are kept as fractions."""
        of_shards = self._shards.num_apart if self._shards is not None else 0
        return of_shards + self._on_gpu.num_apart + sum(each.num_apart for each in self._sums.values())

    @torch.no_grad()
    def add(self, weight: int = 1) -> None:
        """Adds the gradients that a backward pass has left in `.grad`, times a weight, and clears them.

        No other worker takes part, unless sums are sharded. Parameters without a gradient count as if they
        had one of zeros.

        Args:
            weight: a whole number, 0 or more: how many examples or tokens the loss is a mean of. With a loss
                that is a sum, leave it at 1 and call `finish("sum")`.

        Raises:
            OptionError: the weight is not a whole number from 0 to 2**53.
            ContextError: gradients still hold the result of the last step.
            DtypeError: a gradient is not of floats or complex numbers, or of another dtype than before.
            ConversionError: a gradient is sharded, or sparse in another way than an embedding's.
            MismatchError: sums are sharded, and another worker cannot add its gradients.
        """
        found = [(n, p.grad) for n, p in enumerate(self._parameters) if p.grad is not None]
        if is_recording():
            named = {f"{ROOT}[{self._names[n]!r}]": gradient for n, gradient in found}
            write_mark("gradients of a micro-batch", {}, digests_by_path(named))
        group = self._workers() if self._is_sharded else None
        if group is not None and group.size > 1:
            self._add_to_shards(group, weight, found)
            return
        factor = whole_weight(weight)
        for number, gradient in found:
            self._check(number, gradient)
        if factor:
            for number, gradient in found:
                self._sums[number] = self._sums.get(number) or self._sum_for(number, gradient)
            taken = self._on_gpu.add(dict(found), factor, self._sums)
            add_all(
                [
                    (self._sums[n].running_for(gradient), [self._sums[n].flat(gradient)], [float(factor)])
                    for n, gradient in found
                    if n not in taken
                ]
            )
        self._count(found, factor)

    @torch.no_grad()
    def finish(self, op: ReduceOp | str = ReduceOp.MEAN) -> ExactStep:
        """Sets `.grad` to the mean over all micro-batches of all workers; each worker calls it.

        A worker may have added nothing. A parameter that no micro-batch had a gradient of keeps `None`.

        Args:
            op: `"mean"` divides by the sum of all weights, `"sum"` does not divide.

        Returns:
            The weight and the number of micro-batches of all workers, and what it took.

        Raises:
            OptionError: the operation is neither, or the weights add up to 0.
            ContextError: no worker has added anything.
            MismatchError: workers differ in what they finish, or one has gradients that it has not added.
            DeadlineError: other workers did not come in time.
            ProcessGroupError: a worker was lost.
        """
        op = ReduceOp(op)
        if op not in (ReduceOp.MEAN, ReduceOp.SUM):
            raise OptionError(f"gradients are combined by mean or sum; got {op.name}")
        group = self._workers()
        own: dict[str, Any] = {
            "op": op.name,
            "parameters": self._described(),
            "bucket_bytes": self._bucket_bytes,
            "weight": self._weight,
            "micro_batches": self._micro_batches,
            "sums": {str(number): total.kind for number, total in self._sums.items()},
            "left": next(
                (n for n, p in zip(self._names, self._parameters, strict=True) if p.grad is not None), ""
            ),
        }
        if group is None or group.size == 1:
            members: tuple[str, ...] = ("this worker",)
            of_ranks = [own]
        else:
            # Two calls: what is wrong is found by all alike between them, and the group stays usable.
            with group.call("ExactGradients.finish", b"compare exact gradients") as call:
                of_ranks, members = gathered_json(call, own), group.members
        self._check_ranks(members, of_ranks)
        weight = sum(facts["weight"] for facts in of_ranks)
        if not any(facts["micro_batches"] for facts in of_ranks):
            raise ContextError("no worker has added any gradients, so there is nothing to finish")
        if op is ReduceOp.MEAN and not weight:
            raise no_weight()
        self._on_gpu.move_to_host(self._sums)
        kinds = {int(n): kind for facts in of_ranks for n, kind in facts["sums"].items()}
        apart = self.apart
        divisor = Fraction(weight) if op is ReduceOp.MEAN else Fraction(1)
        sums = {n: self._sums.get(n) or self._empty_sum(n, kinds[n]) for n in sorted(kinds)}
        if group is None or group.size == 1:
            outs, sent = _written(None, sums, divisor, self._bucket_bytes)
        elif self._shards is not None:
            with group.call(
                f"share exact gradients of {counted(len(sums), 'parameter')}", b"exact shards"
            ) as call:
                outs = {n: np.empty(total.size, total.part) for n, total in sums.items()}
                sent = self._bytes_sent + self._shards.write(call, outs, divisor)
        else:
            with group.call(
                f"combine exact gradients of {counted(len(sums), 'parameter')}", b"exact"
            ) as call:
                outs, sent = _written(call, sums, divisor, _least_bucket_bytes(of_ranks))
        for number, total in sums.items():
            parameter = self._parameters[number]
            parameter.grad = total.gradient(outs[number], parameter)
            self._results[number] = weakref.ref(parameter.grad)
        if is_recording():
            named = {f"{ROOT}[{self._names[n]!r}]": self._parameters[n].grad for n in sums}
            rank = 0 if group is None else group.rank
            write_call(f"exact {op.name} of gradients", rank, {}, digests_by_path(named))
        micro_batches = sum(facts["micro_batches"] for facts in of_ranks)
        self._kept |= sums
        self.clear()
        return ExactStep(weight, micro_batches, apart, sent)

    def clear(self) -> None:
        """Drops what this worker has added in this step; `.grad` stays unchanged."""
        self._on_gpu.clear()
        self._kept |= {number: total.emptied() for number, total in self._sums.items()}
        self._sums = {}
        if self._shards is not None:
            self._shards.clear()
        self._weight = self._micro_batches = self._bytes_sent = 0

    def _add_to_shards(
        self, group: ProcessGroup, weight: int, found: Sequence[tuple[int, torch.Tensor]]
    ) -> None:
        """Adds gradients where their shards are; an error on one worker is raised on all."""
        own_error: CrossDeviceError | None = None
        factor = 0
        try:
            factor = whole_weight(weight)
            for number, gradient in found:
                self._check(number, gradient)
                self._check_shardable(number, gradient)
        except CrossDeviceError as error:
            own_error = error
        own = {
            "problem": str(own_error or ""),
            "parameters": self._described() if self._shards is None else None,
            "bucket_bytes": self._bucket_bytes,
            "weight": factor,
            "held": [number for number, _ in found],
        }
        with group.call(_ADD_TO_SHARDS, b"add to shards") as call:
            of_ranks = gathered_json(call, own)
            problem = _problem_of(group.members, of_ranks)
            if not problem:
                shards = self._shards = self._shards or self._new_shards(of_ranks)
                flats = {}
                for number, gradient in found if factor else ():
                    total = self._sums[number] = self._sums.get(number) or self._sum_for(number, gradient)
                    flats[number] = total.flat(gradient)
                held, weights = [each["held"] for each in of_ranks], [each["weight"] for each in of_ranks]
                self._bytes_sent += shards.add(call, flats, held, weights)
        if own_error is not None:
            raise own_error
        if problem:
            raise MismatchError(problem)
        self._count(found, factor)

    def _count(self, found: Sequence[tuple[int, torch.Tensor]], factor: int) -> None:
        """Counts a micro-batch that has been added, and drops its gradients."""
        for number, _ in found:
            self._parameters[number].grad = None
        self._weight += factor
        self._micro_batches += bool(found or factor)

    def _new_shards(self, of_ranks: Sequence[Mapping[str, Any]]) -> ShardedSums:
        whole = [DenseSum(str(each.dtype).removeprefix("torch."), each.shape) for each in self._parameters]
        sizes, dtypes = [each.size for each in whole], [each.part for each in whole]
        return ShardedSums(sizes, dtypes, len(of_ranks), _least_bucket_bytes(of_ranks))

    def _check_shardable(self, number: int, gradient: torch.Tensor) -> None:
        parameter = self._parameters[number]
        if gradient.layout != torch.strided or gradient.dtype != parameter.dtype:
            raise ConversionError(
                f"the gradient of {self._names[number]} is a {gradient.layout} tensor of {gradient.dtype}; "
                f"sums are sharded for dense gradients of the parameter's dtype, {parameter.dtype}"
            )

    def _described(self) -> list[Any]:
        return [
            [name, str(each.dtype), list(each.shape)]
            for name, each in zip(self._names, self._parameters, strict=True)
        ]

    def _workers(self) -> ProcessGroup | None:
        """Returns the group of all workers, which they form together as soon as there is a default group."""
        if self._group is None and (self._given is not None or _has_default_group()):
            ranks = dist.get_process_group_ranks(self._given)
            if len(ranks) > 1:
                self._group = formed_group(self._given, "exact gradients")
        return self._group

    def _check(self, number: int, gradient: torch.Tensor) -> None:
        """Refuses a gradient that cannot be added, before any is."""
        name, last = self._names[number], self._results.get(number)
        if last is not None and last() is gradient:
            raise ContextError(
                f"the gradient of {name} still holds the result of the last step, to which the backward pass "
                "has added; call optimizer.zero_grad() before it"
            )
        if is_instance_of(gradient, "torch.distributed.tensor", "DTensor"):
            raise ConversionError(
                f"the gradient of {name} is a DTensor, which was rounded when it was scattered; "
                "expected one of a module that is not sharded"
            )
        if gradient.layout == torch.sparse_coo and gradient.sparse_dim() == 1 and gradient.ndim > 1:
            kind = "rows"
        elif gradient.layout == torch.strided and not gradient.is_nested and not gradient.is_meta:
            kind = "dense"
        else:
            raise ConversionError(
                f"the gradient of {name} is a {gradient.layout} tensor on {gradient.device}; expected a "
                "dense one with data, or torch.sparse_coo with one sparse axis, as embeddings make them"
            )
        dtype = str(gradient.dtype).removeprefix("torch.")
        if dtype not in FLOATS and dtype not in PARTS:
            raise DtypeError(
                f"the gradient of {name} has dtype {dtype}; expected one of {', '.join((*FLOATS, *PARTS))}"
            )
        known = self._sums.get(number)
        if known is not None and known.kind != [kind, dtype]:
            raise DtypeError(
                f"the gradient of {name} is {kind} of {dtype}; those added before are "
                f"{' of '.join(known.kind)}"
            )

    def _check_ranks(self, members: Sequence[str], of_ranks: Sequence[Mapping[str, Any]]) -> None:
        """Raises an error of one worker on all workers."""
        seen: dict[str, tuple[str, list[str]]] = {}
        problem = ""
        for name, facts in zip(members, of_ranks, strict=True):
            if facts["left"]:
                problem = problem or (
                    f"{name} has a gradient of {facts['left']} that was not added: call add() after each "
                    "backward pass, or clear the gradients"
                )
            if facts["op"] != of_ranks[0]["op"]:
                problem = problem or (
                    f"{name} finishes with another op than {members[0]}: "
                    f"{facts['op']}, not {of_ranks[0]['op']}"
                )
            if facts["parameters"] != of_ranks[0]["parameters"]:
                problem = problem or (
                    f"{name} finishes with other parameters than {members[0]}: "
                    f"{_differing(facts['parameters'], of_ranks[0]['parameters'])}"
                )
            for number, kind in facts["sums"].items():
                first, known = seen.setdefault(number, (name, kind))
                if known != kind:
                    problem = problem or (
                        f"{name} has gradients of {self._names[int(number)]} that are {' of '.join(kind)}; "
                        f"those of {first} are {' of '.join(known)}"
                    )
        if problem:
            error = MismatchError(problem)
            error.is_on_all_ranks = True
            raise error

    def _sum_for(self, number: int, gradient: torch.Tensor) -> GradientSum:
        kind = "dense" if gradient.layout == torch.strided else "rows"
        return self._empty_sum(number, [kind, str(gradient.dtype).removeprefix("torch.")])

    def _empty_sum(self, number: int, kind: list[str]) -> GradientSum:
        kept = self._kept.pop(number, None)
        if kept is not None and kept.kind == kind:
            return kept.emptied()
        made = RowSum if kind[0] == "rows" else DenseSum
        return made(kind[1], self._parameters[number].shape)


def _written(
    call: GroupCall | None, sums: Mapping[int, GradientSum], divisor: Fraction, bucket_bytes: int
) -> tuple[dict[int, NDArray[Any]], int]:
    """Returns the sums of all ranks, rounded, and the bytes sent for them."""
    if call is not None:
        for total in sums.values():
            total.match_ranks(call)
    outs = {number: np.empty(total.running.size, total.part) for number, total in sums.items()}
    tasks = [RoundedSum(total.running, outs[number], divisor) for number, total in sums.items()]
    if call is None:
        write_own(tasks)
        return outs, 0
    return outs, write_totals(call, tasks, bucket_bytes)


def _problem_of(members: Sequence[str], of_ranks: Sequence[Mapping[str, Any]]) -> str:
    """Returns the reason the workers' micro-batches cannot be added; empty if they can."""
    for name, facts in zip(members, of_ranks, strict=True):
        problem = facts["problem"]
        if not problem and facts["parameters"] != of_ranks[0]["parameters"]:
            problem = f"its parameters differ: {_differing(facts['parameters'], of_ranks[0]['parameters'])}"
        if problem:
            return f"{name} cannot add its gradients to those of others: {problem}"
    return ""


_ADD_TO_SHARDS = "ExactGradients.add (with is_sharded equally often on all; add(0) without a micro-batch)"


def _least_bucket_bytes(of_ranks: Sequence[Mapping[str, Any]]) -> int:
    """Returns the size of buckets that all workers use, whatever each was given."""
    return min(facts["bucket_bytes"] for facts in of_ranks)


def _named(parameters: object) -> list[tuple[str, torch.Tensor]]:
    """Returns parameters with their names, or with their numbers in place of names."""
    # A tensor and a state_dict are iterables too, of rows and of names, which never have a gradient.
    if isinstance(parameters, (torch.Tensor, Mapping)) or not isinstance(parameters, Iterable):
        raise OptionError(
            f"parameters must be model.parameters() or model.named_parameters(); got {kind_text(parameters)}"
        )
    named = [
        each if isinstance(each, tuple) and len(each) == 2 else (f"parameter {number}", each)
        for number, each in enumerate(parameters)
    ]
    if not named:
        raise OptionError("there are no parameters; got an empty iterable: was it used up before?")
    for name, each in named:
        if not isinstance(each, torch.Tensor):
            raise OptionError(
                f"{name} is {kind_text(each)}; expected a tensor, as in model.parameters(), or a pair of a "
                "name and a tensor, as in model.named_parameters()"
            )
    return named


def _has_default_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _differing(found: Sequence[list[Any]], known: Sequence[list[Any]]) -> str:
    """Names the parameters that one worker lacks or has besides, else the first that differs."""
    names, of_others = [each[0] for each in found], [each[0] for each in known]
    lacks = [name for name in of_others if name not in {*names}]
    adds = [name for name in names if name not in {*of_others}]
    if len(found) != len(known):
        odd = [f"it {verb} {_listed(which)}" for verb, which in (("lacks", lacks), ("has", adds)) if which]
        return f"it has {len(found)}, not {len(known)}" + "".join(f"; {text}" for text in odd)
    number = next(n for n, (one, other) in enumerate(zip(found, known, strict=True)) if one != other)
    (name, dtype, shape), (other, *kind) = found[number], known[number]
    return f"number {number} is {name} of {dtype} {shape}, not {other} of {' '.join(map(str, kind))}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
