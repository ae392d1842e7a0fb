"""A single fault: its kind, and the calls it affects."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

from crossdevice.backends.registry import backend_of_type
from crossdevice.errors import OptionError
from crossdevice.strategies.data.regrouping import map_structure
from crossdevice.values.delegation import operand_of
from crossdevice.values.device import device_of, host_device
from crossdevice.values.distributed import DistributedValues, PerReplica
from crossdevice.values.indexed_slices import IndexedSlices


@dataclasses.dataclass
class Injected:
    """Counter of a fault in this process, given to the block of `faults`.

    Args:
        count: how often the fault has happened.

    >>> import crossdevice as cd
    >>> from crossdevice.testing import faults
    >>> with faults(cd.RingAllReduce(), delay=0.0, raises=TimeoutError) as injected:
    ...     injected.count
    0
    """

    count: int = 0


@dataclasses.dataclass
class Fault:
    """A fault and the calls it strikes."""

    delay: float
    raises: BaseException | type[BaseException] | None
    corrupt: Callable[[Any], Any] | None
    drop: bool
    calls: frozenset[int] | None
    injected: Injected = dataclasses.field(default_factory=Injected)

    @property
    def strikes(self) -> bool:
        """True if the fault strikes before the call."""
        return self.delay > 0 or self.raises is not None

    def is_due(self, call: int) -> bool:
        """Returns True if the fault strikes this call."""
        return self.calls is None or call in self.calls

    def strike(self) -> None:
        """Counts, is late, and raises."""
        self.injected.count += 1
        time.sleep(self.delay)
        if self.raises is not None:
            raise self.raises

    def brought(self, value: Any, replica: int) -> Any:
        """Returns the value as a faulty replica brings it."""
        return map_structure(lambda leaf: self._brought(leaf, replica), value)

    def _brought(self, leaf: Any, replica: int) -> Any:
        is_distributed = isinstance(leaf, DistributedValues)
        values = list(leaf.values) if is_distributed else [leaf]
        if replica >= len(values):
            raise OptionError(
                f"replica {replica} is to be faulty, but the value has {len(values)} in this process"
            )
        if self.corrupt is not None:
            values[replica] = map_structure(self._corrupted, values[replica])
        if not is_distributed and not self.drop:
            return values[0]
        devices = list(leaf.devices) if is_distributed else []
        if self.drop:
            if len(values) == 1:
                raise OptionError("the only replica cannot be dropped")
            del values[replica], devices[replica]
        return PerReplica.of(tuple(values), tuple(devices))

    def _corrupted(self, array: Any) -> Any:
        assert self.corrupt is not None
        array = operand_of(array)
        if isinstance(array, IndexedSlices):
            return array.with_parts(self._corrupted(array.values), array.indices, array.dense_shape)
        backend = backend_of_type(type(array))
        copy = array if backend is None else backend.copy(array, device_of(array) or host_device(0))
        return self.corrupt(copy)


@contextlib.contextmanager
def replaced(target: Any, **methods: Any) -> Iterator[None]:
    """Gives an object other methods, or attributes, for a block."""
    attributes = vars(target)  # past `__setattr__`, for which they would be settings
    before = {name: attributes[name] for name in methods if name in attributes}
    attributes.update(methods)
    try:
        yield
    finally:
        for name in methods:
            del attributes[name]
        attributes.update(before)
