"""A named array that can be assigned to, on one device."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from crossdevice.errors import ConversionError, ShapeMismatchError
from crossdevice.values.context_variables import set_within
from crossdevice.values.device import Device, device_of, host_device
from crossdevice.values.distributed import DistributedValues
from crossdevice.values.reduce_op import VariableAggregation, VariableSynchronization
from crossdevice.values.replica_scope import current_replica

_creator: contextvars.ContextVar[Callable[..., Any] | None] = contextvars.ContextVar(
    "crossdevice_variable_creator", default=None
)


def variables_made_by(creator: Callable[..., Any]) -> AbstractContextManager[None]:
    """In the block, `Variable(...)` without a device is what `creator` makes of the other arguments."""
    return set_within(_creator, creator)


class _MadeInScope(type):
    """Calls the creator of the scope instead of the class, as TensorFlow's variables do."""

    def __call__(
        cls,
        value: Any,
        device: Device | str | None = None,
        name: str = "Variable",
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation = VariableAggregation.NONE,
    ) -> Any:
        creator = _creator.get()
        if cls is not Variable or device is not None or creator is None or current_replica() is not None:
            return super().__call__(value, device, name, synchronization, aggregation)
        return creator(value, name=name, synchronization=synchronization, aggregation=aggregation)


class Variable(metaclass=_MadeInScope):
    """An array with a name and a device; as a destination it names its device and is never written.

    In a strategy's scope, without a device, this creates what `strategy.create_variable` creates.

    >>> counter = Variable(1.0, device="cpu:2", name="counter")
    >>> counter.assign_add(2.0).value(), counter.device
    (3.0, Device('cpu:2'))
    """

    __slots__ = ("__weakref__", "_value", "aggregation", "device", "name", "synchronization")

    def __init__(
        self,
        value: Any,
        device: Device | str | None = None,
        name: str = "Variable",
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation = VariableAggregation.NONE,
    ) -> None:
        self._value = value
        self.device = Device.parse(device) if device is not None else device_of(value) or host_device(0)
        self.name = name
        self.synchronization = synchronization
        self.aggregation = aggregation

    def value(self) -> Any:
        """The array it holds now."""
        return self._value

    def read_value(self) -> Any:
        """The same as `value`."""
        return self._value

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its array."""
        return tuple(getattr(self._value, "shape", ()))

    @property
    def dtype(self) -> Any:
        """The dtype of its array."""
        return self._value.dtype

    def assign(self, value: Any) -> Variable:
        """Replaces the value; the shape must stay."""
        if isinstance(value, DistributedValues):
            raise ConversionError(
                f"variable {self.name!r} holds one array; got a {type(value).__name__} of several"
            )
        shape = tuple(getattr(value, "shape", ()))
        if shape != self.shape:
            raise ShapeMismatchError(
                f"variable {self.name!r} has shape {self.shape}; got a value of shape {shape}"
            )
        self._value = value
        return self

    def assign_add(self, delta: Any) -> Variable:
        """Adds to the value."""
        return self.assign(self._value + delta)

    def assign_sub(self, delta: Any) -> Variable:
        """Subtracts from the value."""
        return self.assign(self._value - delta)

    def __repr__(self) -> str:
        return f"Variable({self._value!r}, device='{self.device}', name={self.name!r})"
