"""What people write by hand: a loop over the replicas in NumPy or PyTorch, in this process."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from crossdevice.backends.registry import backend_named
from crossdevice.cli.bench import data
from crossdevice.cli.bench.calls import Arrays, Calls, Competitor, Results, TimedCall
from crossdevice.cli.bench.workload import ResultPlace, Workload


class NumpyLoop(Competitor):
    """`total = a + b; total += c; ...`, then a copy for every other destination."""

    name = "numpy"

    def __init__(self) -> None:
        self._combine: dict[str, Callable[..., Any]] = {
            "MIN": np.minimum,
            "MAX": np.maximum,
            "PROD": np.multiply,
            "SUM": np.add,
        }
        self._copy: Callable[[Any], Any] = np.copy
        self._copy_into: Callable[[Any, Any], None] = np.copyto
        self._concatenate: Callable[..., Any] = np.concatenate

    def ready(self, work: Workload, inputs: Sequence[data.Arrays]) -> Calls:
        """Results can be given, new, or replace the inputs."""
        self.check(work)
        arrays = Arrays(work, inputs, backend_named(self.name))
        loop = {
            "all_reduce": self._reduce,
            "reduce": self._reduce,
            "broadcast": self._broadcast,
            "gather": self._gather,
        }[work.collective]
        calls: dict[ResultPlace, TimedCall] = {
            "fresh": lambda: loop(work, arrays.inputs, None),
            "given": lambda: loop(work, arrays.inputs, arrays.given),
        }
        if arrays.can_replace:
            calls["in_place"] = lambda: loop(work, arrays.replaced, arrays.replaced)
        return Calls(work, calls, read=arrays.read, refill=arrays.refill, poison=arrays.poison)

    def _reduce(self, work: Workload, inputs: Results, out: Results | None) -> Results:
        combine, columns = self._combine["SUM" if work.op == "MEAN" else work.op], []
        for number, (first, second, *others) in enumerate(zip(*inputs, strict=True)):
            total = combine(first, second) if out is None else combine(first, second, out=out[0][number])
            for other in others:
                combine(total, other, out=total)
            if work.op == "MEAN":
                total /= work.num_devices
            columns.append([total, *self._copies(total, work.num_results - 1, out, number)])
        return list(zip(*columns, strict=True))

    def _broadcast(self, work: Workload, inputs: Results, out: Results | None) -> Results:
        value = inputs[0][0]
        if out is None:
            return [[self._copy(value)] for _ in range(work.num_results)]
        for (target,) in out:
            if target is not value:
                self._copy_into(target, value)
        return out

    def _gather(self, work: Workload, inputs: Results, out: Results | None) -> Results:  # noqa: ARG002
        parts = [arrays[0] for arrays in inputs]
        return [[self._concatenate(parts) if out is None else self._concatenate(parts, out=out[0][0])]]

    def _copies(self, total: Any, number_of_copies: int, out: Results | None, number: int) -> list[Any]:
        if out is None:
            return [self._copy(total) for _ in range(number_of_copies)]
        for arrays in out[1 : 1 + number_of_copies]:
            self._copy_into(arrays[number], total)
        return [arrays[number] for arrays in out[1 : 1 + number_of_copies]]


class TorchLoop(NumpyLoop):
    """The same with tensors, and PyTorch's own threads."""

    name = "torch"

    def __init__(self) -> None:
        torch: Any = importlib.import_module("torch")
        self._combine = {"MIN": torch.minimum, "MAX": torch.maximum, "PROD": torch.mul, "SUM": torch.add}
        self._copy, self._copy_into = torch.clone, torch.Tensor.copy_
        self._concatenate = torch.cat


class TorchFlatten(Competitor):
    """Concatenates each replica's arrays, adds and clones the long tensors, and splits them again."""

    name = "torch_flatten"
    collectives = ("all_reduce",)
    ops = ("SUM", "MEAN")

    def __init__(self) -> None:
        self._torch: Any = importlib.import_module("torch")

    def ready(self, work: Workload, inputs: Sequence[data.Arrays]) -> Calls:
        """All results are new: views of one long tensor per replica."""
        self.check(work)
        arrays = Arrays(work, inputs, backend_named("torch"))
        lengths = [array.size for array in inputs[0]]

        def call() -> Results:
            flat = [self._torch.cat([part.reshape(-1) for part in parts]) for parts in arrays.inputs]
            total = flat[0]
            for other in flat[1:]:
                total += other
            if work.op == "MEAN":
                total /= work.num_devices
            return [
                [part.view(shape) for part, shape in zip(one.split(lengths), work.shapes, strict=True)]
                for one in (total, *(total.clone() for _ in flat[1:]))
            ]

        return Calls(work, {"fresh": call}, read=arrays.read)
