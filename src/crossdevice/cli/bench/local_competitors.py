"""Competitors that run in this process: crossdevice itself, and hand-written loops in NumPy and PyTorch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from crossdevice.algorithms.base import CrossDeviceOps
from crossdevice.algorithms.registry import ALGORITHMS
from crossdevice.backends.registry import backend_named
from crossdevice.cli.bench import data
from crossdevice.cli.bench.calls import Arrays, Calls, Competitor, Results, TimedCall
from crossdevice.cli.bench.workload import ResultPlace, Workload
from crossdevice.errors import OptionError
from crossdevice.values.device import host_device
from crossdevice.values.distributed import PerReplica, components_of, destinations_on
from crossdevice.values.options import DEFAULT_OPTIONS, CommunicationOptions
from crossdevice.values.registry import loaded


def ops_named(name: str) -> CrossDeviceOps:
    """Returns the algorithm of that name, or an instance of `module:class` for unregistered algorithms."""
    try:
        kind = loaded(name) if ":" in name else ALGORITHMS.load(name)
    except (ImportError, AttributeError) as error:
        raise OptionError(f"algorithm {name!r} cannot be loaded: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, CrossDeviceOps)):
        raise OptionError(f"algorithm {name!r} is {kind!r}; expected a subclass of CrossDeviceOps")
    return kind()


class CrossDeviceCompetitor(Competitor):
    """One algorithm with one set of options, on arrays of one library."""

    def __init__(
        self,
        algorithm: str,
        backend: str = "numpy",
        options: CommunicationOptions = DEFAULT_OPTIONS,
        name: str | None = None,
    ) -> None:
        self.name = name or f"crossdevice {algorithm}"
        self.algorithm = ops_named(algorithm)
        self._backend = backend_named(backend)
        self._options = options
        self.precision = options.precision

    def ready(self, work: Workload, inputs: Sequence[data.Arrays]) -> Calls:
        """Prepares calls; results are given memory, new, or replace inputs that can be written to."""
        arrays = Arrays(work, inputs, self._backend)
        collective = self._reduction if work.reduces else getattr(self, f"_{work.collective}")
        calls: dict[ResultPlace, TimedCall] = {"fresh": collective(work, arrays.inputs, None)}
        if arrays.can_be_written and not self._options.share_results and work.collective != "gather":
            calls["given"] = collective(work, arrays.inputs, arrays.given)
            if arrays.can_replace:
                calls["in_place"] = collective(work, arrays.replaced, arrays.replaced)
        return Calls(
            work,
            calls,
            read=lambda results: arrays.read(list(zip(*map(components_of, results), strict=True))),
            refill=arrays.refill,
            poison=arrays.poison,
            rounds_once=self._rounds_once(work),
        )

    def _rounds_once(self, work: Workload) -> bool:
        """Returns True if results are rounded once: products have no wider type than float64."""
        narrow = (work.op, work.dtype) == ("PROD", "float64")
        return self._options.precision in (("exact",) if narrow else ("exact", "accurate"))

    def _reduction(self, work: Workload, inputs: Results, out: Results | None) -> TimedCall:
        ops, op, options = self.algorithm, work.op, self._options
        values = [PerReplica(column) for column in zip(*inputs, strict=True)]
        to_one = work.num_results == 1
        pairs = [(value, "cpu:0" if to_one else value) for value in values]
        outs: list[Any] = [None]
        if out is not None:
            outs = list(out[0] if to_one else zip(*out, strict=True))
        if len(values) > 1:
            return lambda: ops.batch_reduce(op, pairs, options, out=None if out is None else outs)
        return lambda: [ops.reduce(op, *pairs[0], options, out=outs[0])]

    def _broadcast(self, work: Workload, inputs: Results, out: Results | None) -> TimedCall:
        ops, value = self.algorithm, inputs[0][0]
        targets = destinations_on(map(host_device, range(work.num_devices)))
        outs = None if out is None else [arrays[0] for arrays in out]
        return lambda: [ops.broadcast(value, targets, out=outs)]

    def _gather(self, work: Workload, inputs: Results, out: Results | None) -> TimedCall:  # noqa: ARG002
        ops, options = self.algorithm, self._options
        value = PerReplica([arrays[0] for arrays in inputs])
        return lambda: [ops.gather(value, "cpu:0", 0, options)]


_FUNCTIONS = {"SUM": "add", "MEAN": "add", "MIN": "minimum", "MAX": "maximum", "PROD": "multiply"}
"""Names that NumPy and PyTorch share."""


class NumpyLoop(Competitor):
    """`total = a + b; total += c; ...`, then a copy for every other destination."""

    name = "numpy"

    def __init__(self) -> None:
        self._library: Any = np
        self._copy: Callable[[Any], Any] = np.copy
        self._copy_into: Callable[[Any, Any], None] = np.copyto

    def ready(self, work: Workload, inputs: Sequence[data.Arrays]) -> Calls:
        """Prepares calls; results can be given, new, or replace the inputs."""
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
        """Prepares calls with new results: views of one long tensor per replica."""
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
