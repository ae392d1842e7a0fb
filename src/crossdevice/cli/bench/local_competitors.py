"""Competitors that run in this process: crossdevice itself, and sums in NumPy and PyTorch.

A loop of additions reads and writes its total again and again. A `FusedSum` is the fair peer of a fused pass:
it reads every input once. All keep to the dtype of the arrays, and copy the result to the other destinations.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from crossdevice.algorithms.base import CrossDeviceOps
from crossdevice.algorithms.registry import ALGORITHMS
from crossdevice.backends.registry import backend_named
from crossdevice.cli.bench import data
from crossdevice.cli.bench.measure import Arrays, Calls, Competitor, Results, TimedCall
from crossdevice.cli.bench.workload import ResultPlace, UnsupportedWorkError, Workload
from crossdevice.errors import OptionError
from crossdevice.values.device import host_device
from crossdevice.values.distributed import PerReplica, components_of, destinations_on
from crossdevice.values.options import DEFAULT_OPTIONS, CommunicationOptions
from crossdevice.values.registry import loaded


class LibraryPeer(Competitor):
    """A peer in this process that sums and copies by the functions of one library."""

    library: ClassVar[str] = "torch"

    def __init__(self) -> None:
        self._library: Any = importlib.import_module(self.library)

    def _copied(self, value: Any, place: Any) -> Any:
        """Returns a copy in this place; None is new memory, and `value` stays in its own."""
        if place is None:
            return value.clone() if self.library == "torch" else np.copy(value)
        if place is not value:
            place.copy_(value) if self.library == "torch" else np.copyto(place, value)
        return place


class FusedSum(LibraryPeer):
    """A sum of all replicas in one call, on arrays of one library."""

    collectives = ("all_reduce", "reduce")
    ops = ("SUM", "MEAN")

    def ready(self, work: Workload, inputs: Sequence[data.Arrays]) -> Calls:
        """Prepares calls; results can be given or new."""
        self.check(work)
        arrays = Arrays(work, inputs, backend_named(self.library))
        calls: dict[ResultPlace, TimedCall] = {}
        for place, given in (("fresh", None), ("given", arrays.given)):
            call = self.call(work, arrays.inputs, given)
            if call is not None:
                calls[place] = call  # type: ignore[index]  # mypy widens the tuple's strings
        return Calls(work, calls, read=arrays.read, refill=arrays.refill, poison=arrays.poison)

    def call(self, work: Workload, inputs: Results, out: Results | None) -> TimedCall | None:
        """Makes the call that is timed; None if results cannot be there."""
        raise NotImplementedError

    def _summed(self, work: Workload, out: Results | None, total_of: Callable[[int, Any], Any]) -> TimedCall:
        """Makes a call that copies the total of each array, given its number and place, to the others."""

        def run() -> Results:
            columns = []
            for number in range(len(work.shapes)):
                total = total_of(number, out and out[0][number])
                if work.op == "MEAN":
                    total /= work.num_devices
                others = [out and out[k][number] for k in range(1, work.num_results)]
                copies = (self._copied(total, place) for place in others)
                columns.append([total, *copies])
            return list(zip(*columns, strict=True))

        return run


class NumpyStack(FusedSum):
    """`np.add.reduce` over arrays that lie in one stack already, which costs it nothing here."""

    name = "numpy_stack"
    library = "numpy"

    def call(self, work: Workload, inputs: Results, out: Results | None) -> TimedCall:
        """Makes the call; the stack is made before the timing."""
        stacks = [np.stack(column) for column in zip(*inputs, strict=True)]
        return self._summed(work, out, lambda number, into: np.add.reduce(stacks[number], axis=0, out=into))


class TorchStack(FusedSum):
    """`torch.sum` over arrays that lie in one stack already, which costs it nothing here."""

    name = "torch_stack"

    def call(self, work: Workload, inputs: Results, out: Results | None) -> TimedCall:
        """Makes the call; the stack is made before the timing."""
        torch = self._library
        stacks = [torch.stack(list(column)) for column in zip(*inputs, strict=True)]
        return self._summed(work, out, lambda number, into: torch.sum(stacks[number], 0, out=into))


class TorchOneShot(FusedSum):
    """`torch.stack(...).sum(0)`: the stack is part of the call."""

    name = "torch_one_shot"

    def call(self, work: Workload, inputs: Results, out: Results | None) -> TimedCall:
        """Makes the call the common way."""
        torch, columns = self._library, [list(column) for column in zip(*inputs, strict=True)]
        return self._summed(
            work, out, lambda number, into: torch.sum(torch.stack(columns[number]), 0, out=into)
        )


class TorchForeach(FusedSum):
    """`torch._foreach_add_` over all arrays of a replica at once."""

    name = "torch_foreach"

    def call(self, work: Workload, inputs: Results, out: Results | None) -> TimedCall:
        """Makes one call of the library for each further replica, and one for each further destination."""
        torch = self._library

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


class TorchCompiled(FusedSum):
    """One function for the sum and all copies, compiled by `torch.compile`."""

    name = "torch_compile"

    def call(self, work: Workload, inputs: Results, out: Results | None) -> TimedCall | None:
        """Makes calls with given results: the compiler would merge new copies into one."""
        if out is None:
            return None
        torch, columns = self._library, list(zip(*inputs, strict=True))
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


class NumpyLoop(LibraryPeer):
    """`total = a + b; total += c; ...`, then a copy for every other destination."""

    name = "numpy"
    library = "numpy"

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


class TorchLoop(NumpyLoop):
    """The same with tensors, and PyTorch's own threads."""

    name = "torch"
    library = "torch"


class TorchFlatten(LibraryPeer):
    """Concatenates each replica's arrays, adds and clones the long tensors, and splits them again."""

    name = "torch_flatten"
    collectives = ("all_reduce",)
    ops = ("SUM", "MEAN")

    def ready(self, work: Workload, inputs: Sequence[data.Arrays]) -> Calls:
        """Prepares calls with new results: views of one long tensor per replica."""
        self.check(work)
        arrays = Arrays(work, inputs, backend_named("torch"))
        lengths = [array.size for array in inputs[0]]

        def call() -> Results:
            flat = [self._library.cat([part.reshape(-1) for part in parts]) for parts in arrays.inputs]
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
