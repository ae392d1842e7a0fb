"""crossdevice itself as a competitor: any algorithm, any backend, through the public calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
    """The algorithm of that name, or an instance of `module:class`, for algorithms that are nobody's yet."""
    if ":" not in name:
        return _made(ALGORITHMS.load(name), name)
    try:
        return _made(loaded(name), name)
    except (ImportError, AttributeError) as error:
        raise OptionError(f"algorithm {name!r} cannot be loaded: {error}") from error


def _made(kind: Any, name: str) -> CrossDeviceOps:
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

    def ready(self, work: Workload, inputs: Sequence[data.Arrays]) -> Calls:
        """Results are given memory, new ones, or replace inputs, as far as arrays can be written to."""
        arrays = Arrays(work, inputs, self._backend)
        collective = {
            "all_reduce": self._reduction,
            "reduce": self._reduction,
            "broadcast": self._broadcast,
            "gather": self._gather,
        }[work.collective]
        calls: dict[ResultPlace, TimedCall] = {"fresh": collective(work, arrays.inputs, None)}
        if arrays.can_be_written and not self._options.share_results and work.collective != "gather":
            calls["given"] = collective(work, arrays.inputs, arrays.given)
            if arrays.can_replace:
                calls["in_place"] = collective(work, arrays.replaced, arrays.replaced)
        return Calls(
            work,
            calls,
            read=lambda results: arrays.read(_by_destination(results)),
            refill=arrays.refill,
            poison=arrays.poison,
            rounds_once=self._rounds_once(work),
        )

    def _rounds_once(self, work: Workload) -> bool:
        """Nothing is wider than float64 to multiply in; sums of it are compensated."""
        precision = self._options.precision
        return precision == "exact" or (
            precision == "accurate" and (work.op, work.dtype) != ("PROD", "float64")
        )

    def _reduction(self, work: Workload, inputs: Results, out: Results | None) -> TimedCall:
        ops, op, options = self.algorithm, work.op, self._options
        values = [PerReplica(column) for column in zip(*inputs, strict=True)]
        if work.num_results == 1:
            targets: list[Any] = ["cpu:0"] * len(values)
            outs = None if out is None else list(out[0])
        else:
            targets = list(values)
            outs = None if out is None else list(zip(*out, strict=True))
        if len(values) > 1:
            pairs = list(zip(values, targets, strict=True))
            return lambda: ops.batch_reduce(op, pairs, options, out=outs)
        value, target = values[0], targets[0]
        only = None if outs is None else outs[0]
        return lambda: [ops.reduce(op, value, target, options, out=only)]

    def _broadcast(self, work: Workload, inputs: Results, out: Results | None) -> TimedCall:
        ops, value = self.algorithm, inputs[0][0]
        targets = destinations_on(map(host_device, range(work.num_devices)))
        outs = None if out is None else [arrays[0] for arrays in out]
        return lambda: [ops.broadcast(value, targets, out=outs)]

    def _gather(self, work: Workload, inputs: Results, out: Results | None) -> TimedCall:  # noqa: ARG002
        ops, options = self.algorithm, self._options
        value = PerReplica([arrays[0] for arrays in inputs])
        return lambda: [ops.gather(value, "cpu:0", 0, options)]


def _by_destination(results: Sequence[Any]) -> Results:
    return list(zip(*map(components_of, results), strict=True))
