"""A named array that can be assigned to, on one device."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from crossdevice.backends.numpy_backend import array_of_numbers
from crossdevice.backends.protocol import Backend
from crossdevice.backends.registry import backend_of_type
from crossdevice.errors import (
    ConversionError,
    CrossDeviceError,
    DtypeError,
    DtypeMismatchError,
    LibraryMismatchError,
    OptionError,
    ShapeMismatchError,
)
from crossdevice.strategies.running.loaded_libraries import refuse_graph
from crossdevice.strategies.variables.row_updates import ScatterMethods, rows_of, scatter_with, whole_array
from crossdevice.values.delegation import DelegatesToArray, PlacedArray, operand_of
from crossdevice.values.device import Device, device_of, host_device
from crossdevice.values.distributed import DelegatingValues, DistributedValues
from crossdevice.values.dtypes import COMPLEXES, FLOATS
from crossdevice.values.nesting import is_number, is_number_list
from crossdevice.values.quantities import kind_text
from crossdevice.values.reduce_op import (
    VariableAggregation,
    VariableSynchronization,
    as_aggregation,
    as_setting,
)
from crossdevice.values.replica_scope import RUNNING_CODE

_NUMBERS = ("bool", "int", "uint", "float", "bfloat", "complex")
"""Prefixes of the names of number dtypes."""


class Reference:
    """A variable as a key: equal to other references of the same variable, which `deref` returns."""

    __slots__ = ("_variable",)

    def __init__(self, variable: Any) -> None:
        self._variable = variable

    def deref(self) -> Any:
        """Returns the variable itself."""
        return self._variable

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reference) and self._variable is other._variable

    def __hash__(self) -> int:
        return id(self._variable)

    def __repr__(self) -> str:
        return f"Reference({self._variable!r})"


class ReadsAsArray(DelegatesToArray):
    """Read access to a variable, without memory that could be written to."""

    __slots__ = ()

    def current(self) -> Any:
        """Returns the array: a read-only view if the library has such, else a copy."""
        array = self.operand()
        backend = backend_of_variable(array)
        if isinstance(array, np.ndarray | np.generic):
            return backend.read_only(np.asarray(array), host_device(0))
        return array if backend.is_immutable else self._copied()

    value = read_value = current

    def ref(self) -> Reference:
        """Returns a key for dictionaries, equal for one variable only."""
        return Reference(self)

    def numpy(self) -> Any:
        """Returns the elements as a NumPy array of its own."""
        array = self.operand()
        backend = backend_of_variable(array)
        return backend.to_host(array).reshape(backend.shape_of(array)).copy()

    def __float__(self) -> float:
        return float(self.operand())

    def __int__(self) -> int:
        return int(self.operand())

    def __dlpack__(self, **arguments: Any) -> Any:
        return self._copied().__dlpack__(**arguments)

    def __dlpack_device__(self) -> Any:
        return self.operand().__dlpack_device__()

    def _copied(self) -> Any:
        array = self.operand()
        return backend_of_variable(array).copy(array, device_of(array) or host_device(0))


class _MadeInScope(type):
    """Creation of variables through the strategy that was entered, as TensorFlow's variables do."""

    @property
    def __signature__(cls) -> inspect.Signature:
        """The signature of the constructor, which tools would look for in `__call__`."""
        signature = inspect.signature(cls.__init__)  # type: ignore[misc] # of this very class
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        strategy = RUNNING_CODE.get().strategy
        if cls is not Variable or strategy is None or kwargs.get("device") is not None:
            return super().__call__(*args, **kwargs)
        try:
            given = inspect.signature(Variable.__init__).bind(None, *args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"Variable() {error}") from None
        given.pop("self")
        given.pop("device", None)
        return strategy.create_variable(**given)

    def __instancecheck__(cls, instance: Any) -> bool:
        return cls.__subclasscheck__(type(instance))

    def __subclasscheck__(cls, subclass: type) -> bool:
        """Returns True for variables of strategies too, so that programs can check for assignable objects."""
        return super().__subclasscheck__(subclass) or (cls is Variable and ReadsAsArray in subclass.__mro__)


class Variable(ScatterMethods, ReadsAsArray, PlacedArray, metaclass=_MadeInScope):
    """An array with a name and a device; as a destination it says where, and is never written.

    Without a device, in a strategy's scope or in one of its replicas, it is what
    `strategy.create_variable` makes. It computes as its array does; `==` is identity.

    Args:
        initial_value: an array, a number, a list of numbers, or a function that makes one of them.
        trainable: True, False, or None for what the synchronization implies.
        name: the name of the variable.
        dtype: the dtype of the variable; that of the initial value if None.
        synchronization: when copies are brought together, as in `Strategy.create_variable`.
        aggregation: how values that replicas write are combined, as in `Strategy.create_variable`.
        shape: what the shape of the initial value must be.
        device: where the variable is. None is the current strategy's devices, or `cpu:0` outside of one.

    Raises:
        ConversionError: the initial value cannot be read as an array.
        ShapeMismatchError: it has another shape.
        DeviceError: a device name cannot be read, or there is no such device.

    >>> counter = Variable(1.0, device="cpu:2", name="counter")
    >>> float(counter.assign_add(2.0) * 2), counter.device
    (6.0, Device('cpu:2'))
    """

    __slots__ = ("__weakref__", "aggregation", "name", "synchronization", "trainable")

    def __init__(
        self,
        initial_value: Any,
        trainable: bool | None = None,
        *,
        name: str | None = None,
        dtype: Any = None,
        synchronization: VariableSynchronization | str = VariableSynchronization.AUTO,
        aggregation: VariableAggregation | str | None = VariableAggregation.NONE,
        shape: Any = None,
        device: Device | str | None = None,
    ) -> None:
        self.name = checked_name(name)
        self.trainable = checked_trainable(trainable, self.name) is not False
        self.synchronization = as_setting(VariableSynchronization, synchronization)
        self.aggregation = as_aggregation(aggregation)
        array = initial_array(initial_value, dtype, shape, self.name)
        self.device = Device.parse(device) if device is not None else device_of(array) or host_device(0)
        backend = backend_of_variable(array)
        backend.check_device(self.device)
        self._value = backend.copy(array, self.device)

    def operand(self) -> Any:
        """Returns the array itself: to be read, never to be written or handed on."""
        refuse_graph(self._value, self.name)
        return self._value

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its array."""
        return tuple(self._value.shape)

    @property
    def dtype(self) -> Any:
        """The dtype of its array."""
        return self._value.dtype

    def assign(
        self,
        value: Any,
        use_locking: bool = False,  # noqa: ARG002
        name: str | None = None,  # noqa: ARG002
        read_value: bool = True,
    ) -> Variable | Any:
        """Replaces the value; the shape and the dtype stay.

        Args:
            value: an array, a number, or IndexedSlices, which are made dense.
            use_locking: as in TensorFlow; it changes nothing.
            name: as in TensorFlow; it changes nothing.
            read_value: False returns None.

        Returns:
            The variable; None if `read_value` is False.

        Raises:
            ShapeMismatchError: the value has another shape.
            ConversionError: the value cannot be read as an array.
        """
        self.store(backend_of_variable(self._value).copy(self._converted(value), self.device))
        return self if read_value else None

    def assign_add(
        self,
        delta: Any,
        use_locking: bool = False,  # noqa: ARG002
        name: str | None = None,  # noqa: ARG002
        read_value: bool = True,
    ) -> Variable | Any:
        """Adds to the value.

        Args:
            delta: what is added, as in `assign`.
            use_locking: as in `assign`.
            name: as in `assign`.
            read_value: False returns None.

        Returns:
            The variable; None if `read_value` is False.

        Raises:
            ShapeMismatchError: the value has another shape.
            ConversionError: the value cannot be read as an array.
        """
        self.store(self.computed(operator.add, self._converted(delta)))
        return self if read_value else None

    def assign_sub(
        self,
        delta: Any,
        use_locking: bool = False,  # noqa: ARG002
        name: str | None = None,  # noqa: ARG002
        read_value: bool = True,
    ) -> Variable | Any:
        """Subtracts from the value.

        Args:
            delta: what is subtracted, as in `assign`.
            use_locking: as in `assign`.
            name: as in `assign`.
            read_value: False returns None.

        Returns:
            The variable; None if `read_value` is False.

        Raises:
            ShapeMismatchError: the value has another shape.
            ConversionError: the value cannot be read as an array.
        """
        self.store(self.computed(operator.sub, self._converted(delta)))
        return self if read_value else None

    def _scatter(self, method: str, slices: Any) -> Variable:
        rows = rows_of(method, slices)
        scatter_with(method)(self, rows.with_parts(self._converted(rows.values), rows.indices, None))
        return self

    def computed(self, operation: Callable[[Any, Any], Any], other: Any) -> Any:
        """Computes a new array from the value and another of its library, on the variable's device."""
        if not _broadcasts(tuple(other.shape), self.shape):
            raise self._misshaped(other)
        with backend_of_variable(self._value).working_on(self.device):
            return operation(self._value, other)

    def store(self, fresh: Any) -> Variable:
        """Replaces the value by an array of its library, dtype and device, which it then owns alone."""
        if tuple(fresh.shape) != self.shape:
            raise self._misshaped(fresh)
        self._value = np.asarray(fresh) if isinstance(fresh, np.generic) else fresh
        return self

    def _converted(self, value: Any) -> Any:
        if isinstance(value, DistributedValues) and not isinstance(value, DelegatingValues):
            raise ConversionError(
                f"variable {self.name!r} holds one array; got {kind_text(value)} of several"
            )
        backend = backend_of_variable(self._value)
        value = whole_array(operand_of(value), self.name)
        return converted(value, backend, backend.dtype_of(self._value), self.name)

    def _misshaped(self, value: Any) -> ShapeMismatchError:
        return ShapeMismatchError(
            f"variable {self.name!r} has shape {self.shape}; got a value of shape {tuple(value.shape)}"
        )

    def __repr__(self) -> str:
        return f"Variable({self._value!r}, device='{self.device}', name={self.name!r})"


def checked_name(name: Any) -> str:
    """Returns the argument of that name, or TensorFlow's for a variable without one."""
    if name is None or isinstance(name, str):
        return name or "Variable"
    raise OptionError(f"the name of a variable must be a string or None, got {kind_text(name)}")


def checked_trainable(trainable: Any, name: str) -> bool | None:
    """Returns the argument of that name, if it is one."""
    if trainable is None or isinstance(trainable, bool):
        return trainable
    raise OptionError(
        f"trainable of variable {name!r} must be True, False or None, got {trainable!r}; "
        "a device is given by name: device=..."
    )


def initial_array(initial_value: Any, dtype: Any, shape: Any, name: str) -> Any:
    """Returns an initial value as an array of its library."""
    array = operand_of(initial_value() if callable(initial_value) else initial_value)
    if is_number(array) or is_number_list(array):
        array = array_of_numbers(array)
    backend = backend_of_type(type(array))
    if backend is None or not hasattr(array, "dtype"):
        raise _no_array(array, name)
    _check_plain(array, backend, name)
    if shape is not None and _shape_of_sizes(shape, name) != backend.shape_of(array):
        raise ShapeMismatchError(
            f"variable {name!r} was given shape {tuple(shape)} and a value of shape {backend.shape_of(array)}"
        )
    if dtype is None:
        return array
    try:
        return backend.cast(array, _dtype_name(dtype))
    except CrossDeviceError:
        raise
    except Exception as error:  # each library has its own
        raise DtypeError(
            f"variable {name!r} cannot have dtype {dtype!r} in {backend.name}: {error}"
        ) from error


def _shape_of_sizes(sizes: Any, name: str) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, sizes))
    except TypeError:
        raise OptionError(
            f"the shape of variable {name!r} must be a tuple of whole numbers, got {sizes!r}"
        ) from None


def converted(value: Any, backend: Backend, dtype: str, name: str) -> Any:
    """Returns a value as an array of a library and dtype; accepts NumPy arrays for every library."""
    if is_number(value) or isinstance(value, (list, tuple)):
        try:
            value = np.asarray(float(value) if _is_huge(value) else value)
        except ValueError:
            raise ConversionError(
                f"variable {name!r} was given {value!r}, whose lists differ in length or depth"
            ) from None
    source = backend_of_type(type(value))
    if source is None or isinstance(value, DistributedValues):
        raise _no_array(value, name)
    _check_plain(value, source, name)
    found = source.dtype_of(value)
    if found != dtype and not found.startswith(_NUMBERS):
        raise DtypeMismatchError(f"variable {name!r} is {dtype}; it was given {found}")
    if source is not backend:
        if source.name != "numpy":
            raise LibraryMismatchError(
                f"variable {name!r} holds arrays of {backend.name}; it was given one of {source.name}"
            )
        value = backend.from_host(np.array(value).reshape(-1), source.shape_of(value), host_device(0))
    found = backend.dtype_of(value)
    if _kind_of(found) > _kind_of(dtype):
        raise DtypeMismatchError(f"variable {name!r} is {dtype}; it was given {found}, which would lose part")
    if backend.autograd is not None:  # a variable that is added to in every step would keep all of them
        value = backend.autograd.unrecorded(value)
    return value if found == dtype else backend.cast(value, dtype)


def _is_huge(value: Any) -> bool:
    """Returns True for a Python integer that no integer dtype holds."""
    return isinstance(value, int) and not -(2**63) <= value < 2**64


def _no_array(value: Any, name: str) -> ConversionError:
    return ConversionError(f"variable {name!r} was given {kind_text(value)}; expected an array or a number")


def _check_plain(array: Any, backend: Backend, name: str) -> None:
    """Refuses arrays that are more than their elements: masked, sparse and sharded ones, and tracers."""
    if hasattr(array, "dtype"):
        plain = array if backend.autograd is None else backend.autograd.unrecorded(array)
        backend.check_array(plain, f"the value given to variable {name!r}")


def _broadcasts(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Returns True if an array of one shape broadcasts to another."""
    pairs = zip(reversed(shape), reversed(whole), strict=False)
    return len(shape) <= len(whole) and all(own in (1, wanted) for own, wanted in pairs)


def _kind_of(dtype: str) -> int:
    """Orders kinds of dtypes: booleans and integers fit into floats, floats into complex numbers."""
    return 2 if dtype in COMPLEXES else 1 if dtype in FLOATS else 0


def backend_of_variable(array: Any) -> Backend:
    """Returns the library of a variable's array."""
    backend = backend_of_type(type(array))
    assert backend is not None, "variables are made of arrays"
    return backend


def _dtype_name(dtype: Any) -> str:
    """Returns a name such as `float32`, from a name or from the dtype objects of the array libraries."""
    named = getattr(dtype, "__name__", None) or getattr(dtype, "name", None) or dtype
    return str(named).rpartition(".")[2]
