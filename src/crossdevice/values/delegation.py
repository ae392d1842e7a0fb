"""Objects that compute as an array does, which they find when they are asked."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from crossdevice.values.device import Device


class DelegatesToArray:
    """Arithmetic, ordering, indexing and attributes of `current`; `==` is identity."""

    __slots__ = ()

    def current(self) -> Any:
        """Returns the array that stands for this object here and now."""
        raise NotImplementedError

    def operand(self) -> Any:
        """Returns the same for arithmetic, which only reads it."""
        return self.current()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copying and pickling look for these on half-made objects
            raise AttributeError(name)
        return getattr(self.current(), name)

    def __getitem__(self, key: Any) -> Any:
        return self.current()[key]

    def __iter__(self) -> Iterator[Any]:
        # Without this Python would ask for items until one is out of range; JAX has no such index.
        return iter(self.current())

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return as_array(self.current(), dtype, copy)

    def __bool__(self) -> bool:
        return bool(self.operand())

    def __pos__(self) -> Any:
        return +self.current()  # which PyTorch returns as it is

    if TYPE_CHECKING:  # made below

        def _binary(self, other: Any, /) -> Any: ...
        def _unary(self) -> Any: ...

        __add__ = __sub__ = __mul__ = __matmul__ = __truediv__ = __floordiv__ = __mod__ = __pow__ = _binary
        __and__ = __or__ = __xor__ = __lt__ = __le__ = __gt__ = __ge__ = _binary
        __radd__ = __rsub__ = __rmul__ = __rmatmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = _binary
        __rpow__ = __rand__ = __ror__ = __rxor__ = _binary
        __neg__ = __abs__ = __invert__ = _unary


def operand_of(value: Any) -> Any:
    """Returns the operand a value stands for in arithmetic."""
    return value.operand() if isinstance(value, DelegatesToArray) else value


def as_array(component: Any, dtype: Any, copy: Any) -> Any:
    """Calls a component's `__array__`, which does not know `copy` in every library; numbers have none."""
    if not hasattr(component, "__array__"):
        return sys.modules["numpy"].array(component, dtype)  # which has called this
    array = component.__array__() if dtype is None else component.__array__(dtype)
    return array.copy() if copy else array


def _forward(operation: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *others: operation(operand_of(self), *map(operand_of, others))


def _reflected(operation: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: operation(operand_of(other), operand_of(self))


_BINARY = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor")
_OTHERS = ("lt", "le", "gt", "ge", "neg", "abs", "invert")
# Python looks for operators on the class itself, so `__getattr__` would never be asked for them.
for _name in (*_BINARY, *_OTHERS):
    _word = _name.rstrip("_")
    setattr(DelegatesToArray, f"__{_word}__", _forward(pow if _name == "pow" else getattr(operator, _name)))
    if _name in _BINARY:
        setattr(DelegatesToArray, f"__r{_word}__", _reflected(getattr(operator, _name)))


class PlacedArray(DelegatesToArray):
    """An array and its device; as a destination it names the device, and is never written."""

    __slots__ = ("_value", "device")

    _value: Any
    device: Device

    def operand(self) -> Any:
        """Returns the array itself: to be read, never to be written or handed on."""
        return self._value
