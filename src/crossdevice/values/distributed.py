"""Containers: one component per device; rows of a larger array by index, as of embedding tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Self

from crossdevice.errors import ConversionError, DeviceMismatchError, StructureMismatchError
from crossdevice.values.delegation import DelegatesToArray, as_array
from crossdevice.values.device import Device, device_of, host_device, is_of_keras, misplaced
from crossdevice.values.nesting import first_leaf
from crossdevice.values.quantities import counted, kind_text
from crossdevice.values.replica_scope import current_component


class IndexedSlices:
    """`values[i]` belongs to row `indices[i]` of an array of shape `dense_shape`.

    Indices may repeat; repeated rows are added when the value is converted to a dense array.

    Args:
        values: the rows.
        indices: the number of each row in the whole array.
        dense_shape: the shape of the whole array; needed where it is made dense.

    >>> import numpy as np, crossdevice as cd
    >>> rows = IndexedSlices(np.float32([[1], [2], [3]]), indices=np.array([0, 2, 2]), dense_shape=(4, 1))
    >>> cd.to_dense(rows).ravel()
    array([1., 0., 5., 0.], dtype=float32)
    """

    __slots__ = ("dense_shape", "indices", "values")

    def __init__(self, values: Any, indices: Any, dense_shape: Any = None) -> None:
        self.values = values
        self.indices = indices
        self.dense_shape = None if dense_shape is None else _checked_shape(dense_shape)

    def with_parts(self, values: Any, indices: Any, dense_shape: tuple[int, ...] | None) -> Any:
        """Returns sparse rows of the same kind, in the library they came from."""
        return IndexedSlices(values, indices, dense_shape)

    @property
    def device(self) -> Device | str:
        """The device of `values`; `"cpu"` for host memory, as NumPy says it."""
        return device_of(self.values) or "cpu"

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of the array that the rows belong to, if it is known."""
        return self.dense_shape

    @property
    def dtype(self) -> Any:
        """The dtype of `values`."""
        return self.values.dtype

    def __repr__(self) -> str:
        parts = f"values={self.values!r}, indices={self.indices!r}, dense_shape={self.dense_shape}"
        return f"IndexedSlices({parts})"


def _checked_shape(given: Any) -> tuple[int, ...]:
    try:
        shape = tuple(map(int, given))
    except (TypeError, ValueError):
        shape = ()
    if not shape or min(shape) < 0:
        raise ConversionError(
            f"dense_shape must be the shape of an array with rows, such as (4, 2); got {given!r}"
        )
    return shape


class DistributedValues:
    """One component per replica, each on a device.

    Host arrays do not know their device: without `devices` they are on `cpu:0`, `cpu:1`, ... by
    position. A component may be a nested structure of arrays.

    Args:
        values: the components, one per replica.
        devices: the device of each component; those of arrays that know theirs, and `cpu:0`, `cpu:1`, ...
            for others.

    Raises:
        StructureMismatchError: there are not as many devices as components.
        DeviceError: a device name cannot be read, or there is no such device.

    >>> value = DistributedValues([1.0, 2.0], devices=["cpu:2", "cpu:3"])
    >>> value.values, value.devices
    ((1.0, 2.0), (Device('cpu:2'), Device('cpu:3')))
    """

    __slots__ = ("__weakref__", "_devices", "_given_devices", "_values")

    def __init__(self, values: Iterable[Any], devices: Sequence[Device | str] | None = None) -> None:
        if type(values) is not list and type(values) is not tuple:
            self._check_listed(values)
        self._values = tuple(values)
        self._given_devices: tuple[Device, ...] | None = None
        self._devices: tuple[Device, ...] | None = None
        if devices is not None:
            if isinstance(devices, str) or not isinstance(devices, Sequence):
                raise ConversionError(f"devices must be a list of device names, got {devices!r}")
            if len(devices) != len(self._values):
                found = f"{counted(len(self._values), 'component')} and {counted(len(devices), 'device')}"
                raise StructureMismatchError(f"got {found}; expected one device for each component")
            self._given_devices = self._devices = tuple(
                _checked_device(component, Device.parse(device), replica)
                for replica, (component, device) in enumerate(zip(self._values, devices, strict=True))
            )

    def _check_listed(self, values: Any) -> None:
        """Refuses what is not a list of components; abstract classes are slow to ask."""
        if isinstance(values, (Mapping, AbstractSet, str, bytes)):
            hint = " (if that is what one replica has, put it into a list)"
        elif isinstance(values, Iterable):
            return
        else:
            hint = ""
        raise ConversionError(
            f"{kind_text(self)} takes a list of components, one for each replica; got "
            f"{kind_text(values)}{hint}"
        )

    @classmethod
    def of(cls, values: tuple[Any, ...], devices: tuple[Device, ...]) -> Self:
        """Returns an instance of components known to be on these devices, without checks."""
        made = cls.__new__(cls)
        made._values, made._given_devices, made._devices = values, devices, devices
        return made

    @property
    def values(self) -> tuple[Any, ...]:
        """The components, in replica order."""
        return self._values

    @property
    def devices(self) -> tuple[Device, ...]:
        """The device of each component."""
        if self._devices is None:
            self._devices = tuple(
                device_of(first_leaf(component)) or host_device(replica)
                for replica, component in enumerate(self._values)
            )
        return self._devices

    def __repr__(self) -> str:
        lines = "".join(f"\n  {d}: {v!r}," for d, v in zip(self.devices, self._values, strict=True))
        return f"{type(self).__name__}({lines}\n)" if lines else f"{type(self).__name__}()"


def _checked_device(component: object, device: Device, replica: int) -> Device:
    elsewhere = misplaced(first_leaf(component), device)
    if elsewhere is not None:
        raise DeviceMismatchError(
            f"replica {replica} was placed on {device}, but its array is on {elsewhere}; "
            "copy it there first, or leave `devices` out"
        )
    return device


class PerReplica(DistributedValues):
    """Values that differ from replica to replica, such as gradients before they are reduced.

    Args:
        values: the components, one per replica.
        devices: the device of each, as in DistributedValues.

    Raises:
        StructureMismatchError: there are not as many devices as components.
        DeviceError: a device name cannot be read, or there is no such device.

    >>> PerReplica([1.0, 2.0]).devices
    (Device('cpu:0'), Device('cpu:1'))
    """

    __slots__ = ()

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        """Converts this replica's component inside a replica function; refused outside of one."""
        replica = current_component()
        if replica is None:
            raise ConversionError(
                "a PerReplica is not one array outside of a replica function; reduce or gather it, "
                "or take one of its .values"
            )
        return as_array(self._values[replica], dtype, copy)


class DelegatingValues(DelegatesToArray, DistributedValues):
    """Distributed values that compute as one of their components does; subclasses say which, by `current`."""

    __slots__ = ()


class Mirrored(DelegatingValues):
    """The same value on several devices.

    Arithmetic, ordering, indexing and attributes are those of one component: the running replica's
    component, or the first one outside of replica functions. `==` is identity.

    Args:
        values: the components, one per replica.
        devices: the device of each, as in DistributedValues.

    Raises:
        StructureMismatchError: there are not as many devices as components.
        DeviceError: a device name cannot be read, or there is no such device.

    >>> (Mirrored([2.0, 2.0]) + 1, Mirrored(["ab", "ab"]).upper())
    (3.0, 'AB')
    """

    __slots__ = ()

    def current(self) -> Any:
        """Returns the running replica's component; the first outside of replica functions.

        Returns:
            The component.
        """
        return self._values[current_component() or 0]


def component_of(value: Any) -> Any:
    """Returns the value itself; for one that delegates, the component that counts here."""
    return value.current() if isinstance(value, DelegatingValues) else value


def as_distributed(value: Any) -> Any:
    """Converts values and variables of tf.distribute to ours, and Keras variables to their contents."""
    kind = type(value)
    # Known by their names: TensorFlow is not imported to ask.
    if is_of_keras(value):
        return as_distributed(value.value)
    if not kind.__module__.startswith("tensorflow.python.distribute.") or not hasattr(value, "values"):
        return value
    is_per_replica = any(base.__name__ == "PerReplica" for base in kind.__mro__)
    return PerReplica(value.values) if is_per_replica else Mirrored(value.values)


def destinations_on(devices: Iterable[Device | str]) -> PerReplica:
    """Returns an empty value on each of these devices, as a destination."""
    read = tuple(Device.parse(device) for device in devices)
    return PerReplica.of((None,) * len(read), read)


def components_of(value: Any) -> tuple[Any, ...]:
    """Returns the components of a distributed value; any other value is its own only one.

    >>> components_of(PerReplica([1.0, 2.0])), components_of(3.0)
    ((1.0, 2.0), (3.0,))
    """
    return value.values if isinstance(value, DistributedValues) else (value,)
