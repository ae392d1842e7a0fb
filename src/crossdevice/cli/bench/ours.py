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

    def ready(self, work: Workload, inputs: Sequence[data.Arrays]) -> Calls:
        """Results are given memory, new ones, or replace inputs, as far as arrays can be written to."""
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
        """Nothing is wider than float64 to multiply in; sums of it are compensated."""
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
