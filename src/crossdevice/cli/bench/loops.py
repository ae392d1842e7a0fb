"""Hand-written loops over the replicas in NumPy or PyTorch, in this process."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from crossdevice.backends.registry import backend_named
from crossdevice.cli.bench import data
from crossdevice.cli.bench.calls import Arrays, Calls, Competitor, Results, TimedCall
from crossdevice.cli.bench.workload import ResultPlace, Workload

_FUNCTIONS = {"SUM": "add", "MEAN": "add", "MIN": "minimum", "MAX": "maximum", "PROD": "multiply"}
"""What NumPy and PyTorch both call them."""


class NumpyLoop(Competitor):
    """`total = a + b; total += c; ...`, then a copy for every other destination."""

    name = "numpy"

    def __init__(self) -> None:
        self._library: Any = np
        self._copy: Callable[[Any], Any] = np.copy
        self._copy_into: Callable[[Any, Any], None] = np.copyto

    def ready(self, work: Workload, inputs: Sequence[data.Arrays]) -> Calls:
        """Results can be given, new, or replace the inputs."""
        self.check(work)
        arrays = Arrays(work, inputs, backend_named(self.name))
        loop = self._reduce if work.reduces else getattr(self, f"_{work.collective}")
        calls: dict[ResultPlace, TimedCall] = {
            "fresh": lambda: loop(work, arrays.inputs, None),
            "given": lambda: loop(work, arrays.inputs, arrays.given),
        }
        if arrays.can_replace:
            calls["in_place"] = lambda: loop(work, arrays.replaced, arrays.replaced)
        return Calls(work, calls, read=arrays.read, refill=arrays.refill, poison=arrays.poison)

    def _reduce(self, work: Workload, inputs: Results, out: Results | None) -> Results:
        combine, columns = getattr(self._library, _FUNCTIONS[work.op]), []
        for number, (first, second, *others) in enumerate(zip(*inputs, strict=True)):
            total = combine(first, second, out=out and out[0][number])
            for other in others:
                combine(total, other, out=total)
            if work.op == "MEAN":
                total /= work.num_devices
            places = [out and out[k][number] for k in range(1, work.num_results)]
            columns.append([total, *(self._copied(total, place) for place in places)])
        return list(zip(*columns, strict=True))

    def _broadcast(self, work: Workload, inputs: Results, out: Results | None) -> Results:
        return [[self._copied(inputs[0][0], out and out[k][0])] for k in range(work.num_results)]

    def _gather(self, work: Workload, inputs: Results, out: Results | None) -> Results:  # noqa: ARG002
        return [[self._library.concatenate([arrays[0] for arrays in inputs], out=out and out[0][0])]]

    def _copied(self, value: Any, place: Any) -> Any:
        if place is None:
            return self._copy(value)
        if place is not value:
            self._copy_into(place, value)
        return place


class TorchLoop(NumpyLoop):
    """The same with tensors, and PyTorch's own threads."""

    name = "torch"

    def __init__(self) -> None:
        torch = self._library = importlib.import_module("torch")
        self._copy, self._copy_into = torch.clone, torch.Tensor.copy_


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
