"""One fault: what goes wrong, and in which calls."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

from crossdevice.testing.components import with_component_changed, without_component


@dataclasses.dataclass
class Injected:
    """What `faults` gives to its block: how often the fault has happened, in this process.

    >>> import crossdevice as cd
    >>> from crossdevice.testing import faults
    >>> with faults(cd.RingAllReduce(), delay=0.0, raises=TimeoutError) as injected:
    ...     injected.count
    0
    """

    count: int = 0


@dataclasses.dataclass
class Fault:
    """What goes wrong, and in which calls."""

    delay: float
    raises: BaseException | type[BaseException] | None
    corrupt: Callable[[Any], Any] | None
    drop: bool
    calls: frozenset[int] | None
    injected: Injected = dataclasses.field(default_factory=Injected)

    @property
    def strikes(self) -> bool:
        """Whether something happens before the call."""
        return self.delay > 0 or self.raises is not None

    def is_due(self, call: int) -> bool:
        """Whether a call goes wrong."""
        return self.calls is None or call in self.calls

    def strike(self) -> None:
        """Counts, is late, and raises."""
        self.injected.count += 1
        time.sleep(self.delay)
        if self.raises is not None:
            raise self.raises

    def brought(self, value: Any, replica: int) -> Any:
        """What a faulty replica makes of a value."""
        if self.corrupt is not None:
            value = with_component_changed(value, replica, self.corrupt)
        return without_component(value, replica) if self.drop else value


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
