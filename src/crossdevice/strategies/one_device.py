"""All work on one device, with the calls of every other strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from crossdevice.algorithms.base import CrossDeviceOps
from crossdevice.strategies.data.input import ValueContext
from crossdevice.strategies.data.regrouping import is_array, is_sparse
from crossdevice.strategies.extended import StrategyExtended
from crossdevice.strategies.mirrored import MirroredStrategy
from crossdevice.values.device import Device
from crossdevice.values.reduce_op import ReduceOp


class OneDeviceExtended(StrategyExtended):
    """Calls that combine values of the one replica: whatever it has is the whole."""

    def _same_everywhere(self, op: ReduceOp, value: Any, destinations: Any) -> Any:
        return (
            super()._same_everywhere(op, value, destinations)
            if is_array(value) or is_sparse(value)
            else value
        )


class OneDeviceStrategy(MirroredStrategy):
    """One replica on one device: to try a program that is written for several.

    Args:
        device: the name of the device.

    Raises:
        DeviceError: a device name cannot be read, or there is no such device.

    >>> strategy = OneDeviceStrategy("cpu:1")
    >>> strategy.num_replicas_in_sync, strategy.run(lambda: 2.0)
    (1, 2.0)
    """

    def __init__(self, device: Device | str) -> None:
        super().__init__([device])

    def _extended_of(self, ops: CrossDeviceOps) -> StrategyExtended:
        return OneDeviceExtended(self._devices, ops)

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Returns `value_fn(ValueContext())`: the one replica's value is bare.

        Args:
            value_fn: called once, with a ValueContext.

        Returns:
            What it returned.

        Raises:
            TypeError: it cannot be called.
        """
        return value_fn(ValueContext())

    def __repr__(self) -> str:
        return f"OneDeviceStrategy('{self._devices[0]}')"
