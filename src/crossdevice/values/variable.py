"""Variables as seen by readers: an array on a device."""

from __future__ import annotations

from typing import Any

from crossdevice.values.delegation import DelegatesToArray
from crossdevice.values.device import Device


class PlacedArray(DelegatesToArray):
    """An array and the device it is on; as a destination it says where, and is never written."""

    __slots__ = ("_value", "device")

    _value: Any
    device: Device

    def operand(self) -> Any:
        """The array itself: to be read, never to be written or handed on."""
        return self._value
