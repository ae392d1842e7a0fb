"""One call of a library for the whole sum, or one compiled function: the fair peers of a fused pass.

A loop of additions reads and writes its total again and again. These read every input once, as crossdevice
does. All keep to the dtype of the arrays, and copy the result to the other destinations.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from crossdevice.backends.registry import backend_named
from crossdevice.cli.bench import data
from crossdevice.cli.bench.calls import Arrays, Calls, Competitor, Results, TimedCall
from crossdevice.cli.bench.peers import PeerSetup
from crossdevice.cli.bench.workload import ResultPlace, UnsupportedWorkError, Workload


class FusedSum(Competitor):
    """A sum of all replicas in one call, on arrays of one library."""

    collectives = ("all_reduce", "reduce")
    ops = ("SUM", "MEAN")
    backend: ClassVar[str] = "torch"

    def ready(self, work: Workload, inputs: Sequence[data.Arrays]) -> Calls:
        """Prepares calls; results can be given or new."""
        self.check(work)
        arrays = Arrays(work, inputs, backend_named(self.backend))
        calls: dict[ResultPlace, TimedCall] = {}
        for place, given in (("fresh", None), ("given", arrays.given)):
            call = self.call(work, arrays.inputs, given)
            if call is not None:
                calls[place] = call  # type: ignore[index]  # mypy widens the tuple's strings
        return Calls(work, calls, read=arrays.read, refill=arrays.refill, poison=arrays.poison)

    def call(self, work: Workload, inputs: Results, out: Results | None) -> TimedCall | None:
        """Makes the call that is timed; None if results cannot be there."""
        raise NotImplementedError


class NumpyStack(FusedSum):
    """`np.add.reduce` over arrays that lie in one stack already, which costs it nothing here."""

    name = "numpy_stack"
    backend = "numpy"

    def call(self, work: Workload, inputs: Results, out: Results | None) -> TimedCall:
        """Makes the call; the stack is made before the timing."""
        stacks = [np.stack(column) for column in zip(*inputs, strict=True)]

        def run() -> Results:
            columns = []
            for number, stack in enumerate(stacks):
                into: Any = None if out is None else out[0][number]
                total = np.add.reduce(stack, axis=0, out=into)
                if work.op == "MEAN":
                    total /= work.num_devices
                others = [out and out[k][number] for k in range(1, work.num_results)]
                columns.append([total, *(_copied(np.copyto, np.copy, total, place) for place in others)])
            return list(zip(*columns, strict=True))

        return run


class TorchSum(FusedSum):
    """A sum of PyTorch's."""

    def __init__(self) -> None:
        self._torch: Any = importlib.import_module("torch")

    def _summed(self, work: Workload, out: Results | None, total_of: Callable[[int, Any], Any]) -> TimedCall:
        torch = self._torch

        def run() -> Results:
            columns = []
            for number in range(len(work.shapes)):
                total = total_of(number, out and out[0][number])
                if work.op == "MEAN":
                    total /= work.num_devices
                others = [out and out[k][number] for k in range(1, work.num_results)]
                copies = (_copied(torch.Tensor.copy_, torch.clone, total, place) for place in others)
                columns.append([total, *copies])
            return list(zip(*columns, strict=True))

        return run


class TorchStack(TorchSum):
    """`torch.sum` over arrays that lie in one stack already, which costs it nothing here."""

    name = "torch_stack"

    def call(self, work: Workload, inputs: Results, out: Results | None) -> TimedCall:
        """Makes the call; the stack is made before the timing."""
        torch = self._torch
        stacks = [torch.stack(list(column)) for column in zip(*inputs, strict=True)]
        return self._summed(work, out, lambda number, into: torch.sum(stacks[number], 0, out=into))


class TorchOneShot(TorchSum):
    """`torch.stack(...).sum(0)`: the stack is part of the call."""

    name = "torch_one_shot"

    def call(self, work: Workload, inputs: Results, out: Results | None) -> TimedCall:
        """Makes the call the common way."""
        torch, columns = self._torch, [list(column) for column in zip(*inputs, strict=True)]
        return self._summed(
            work, out, lambda number, into: torch.sum(torch.stack(columns[number]), 0, out=into)
        )


class TorchForeach(TorchSum):
    """`torch._foreach_add_` over all arrays of a replica at once."""

    name = "torch_foreach"

    def call(self, work: Workload, inputs: Results, out: Results | None) -> TimedCall:
        """Makes one call of the library for each further replica, and one for each further destination."""
        torch = self._torch

        def run() -> Results:
            first, second, *others = inputs
            if out is None:
                total = torch._foreach_add(first, second)
            else:
                total = list(out[0])
                torch._foreach_copy_(total, first)
                torch._foreach_add_(total, second)
            for other in others:
                torch._foreach_add_(total, other)
            if work.op == "MEAN":
                torch._foreach_div_(total, work.num_devices)
            results = [total]
            for k in range(1, work.num_results):
                if out is None:
                    results.append(torch._foreach_mul(total, 1))
                else:
                    torch._foreach_copy_(list(out[k]), total)
                    results.append(list(out[k]))
            return results

        return run


class TorchCompiled(TorchSum):
    """One function for the sum and all copies, compiled by `torch.compile`."""

    name = "torch_compile"

    def call(self, work: Workload, inputs: Results, out: Results | None) -> TimedCall | None:
        """Makes calls with given results: the compiler would merge new copies into one."""
        if out is None:
            return None
        torch, columns = self._torch, list(zip(*inputs, strict=True))
        targets = list(zip(*out, strict=True))

        def all_reduce(columns: Any, targets: Any) -> None:
            for column, own in zip(columns, targets, strict=True):
                total = column[0]
                for other in column[1:]:
                    total = total + other
                if work.op == "MEAN":
                    total = total / work.num_devices
                for target in own:
                    target.copy_(total)

        compiled = torch.compile(all_reduce, fullgraph=True, dynamic=False)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # what PyTorch tells itself
                compiled(columns, targets)
        except Exception as error:  # whatever the compiler, or the lack of one, raises
            reason = " ".join(str(error).split())[:200]
            raise UnsupportedWorkError(f"torch.compile fails: {type(error).__name__}: {reason}") from error

        def run() -> Results:
            compiled(columns, targets)
            return out

        return run


class JaxJit(Competitor):
    """A jitted sum of arrays on one device; the result is one array."""

    name = "jax_jit"
    collectives = ("reduce",)
    ops = ("SUM", "MEAN")

    def __init__(self, setup: PeerSetup) -> None:
        del setup
        os.environ["JAX_PLATFORMS"] = "cpu"
        self._jax: Any = importlib.import_module("jax")
        self._jax.config.update("jax_enable_x64", True)

    def ready(self, work: Workload, inputs: Sequence[data.Arrays]) -> Calls:
        """Prepares calls with new results: JAX arrays cannot be written to."""
        self.check(work)
        jax = self._jax
        columns = [[jax.device_put(array) for array in column] for column in zip(*inputs, strict=True)]

        def all_sums(columns: Any) -> Any:
            totals = []
            for first, *others in columns:
                total = first
                for other in others:
                    total = total + other
                totals.append(total / work.num_devices if work.op == "MEAN" else total)
            return totals

        compiled = jax.jit(all_sums)
        return Calls(
            work,
            {"fresh": lambda: jax.block_until_ready(compiled(columns))},
            read=lambda totals: [[np.asarray(total) for total in totals]],
        )


def _copied(copy_into: Callable[[Any, Any], Any], copy: Callable[[Any], Any], value: Any, place: Any) -> Any:
    if place is None:
        return copy(value)
    copy_into(place, value)
    return place
