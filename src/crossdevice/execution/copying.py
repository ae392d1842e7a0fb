"""Copying one value to devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from crossdevice.backends.protocol import Array, Backend
from crossdevice.errors import OutError
from crossdevice.execution.intake import Leaf, one_backend, read_value
from crossdevice.execution.leaf_spec import Dense, LeafSpec
from crossdevice.execution.outputs import check_out, read_out, wrapped
from crossdevice.execution.overlaps import check_overlaps
from crossdevice.execution.tracing import Work, recorded
from crossdevice.values.device import Device
from crossdevice.values.distributed import DelegatingValues
from crossdevice.values.indexed_slices import IndexedSlices


def copied_to(value: Any, destinations: tuple[Device, ...]) -> Any:
    """The value in new memory on each destination."""
    return _on_each(value, destinations, _copy)


def shared_with(value: Any, destinations: tuple[Device, ...]) -> Any:
    """The value itself where a destination shares its memory, a copy elsewhere."""
    return _on_each(value, destinations, _shared)


def _on_each(
    value: Any, destinations: tuple[Device, ...], place: Callable[[Backend, Array, Device, Device], Array]
) -> Any:
    read = read_value(component_of(value))
    (source,) = read.devices
    backends = [_checked_backend(leaf, read.devices, destinations) for leaf in read.leaves]
    with recorded(Work("copy", "broadcast", (source, *destinations))):
        results = [
            [_placed(place, backend, leaf.arrays[0], source, device) for device in destinations]
            for leaf, backend in zip(read.leaves, backends, strict=True)
        ]
    return wrapped(results, read.structure, destinations)


def copied_into(value: Any, destinations: tuple[Device, ...], out: Any) -> Any:
    """The value, written to the arrays of `out`."""
    read = read_value(component_of(value))
    outs = read_out(out, read, destinations)
    specs: list[LeafSpec] = []
    for leaf, arrays in zip(read.leaves, outs, strict=True):
        if leaf.is_sparse:
            raise OutError(f"out cannot hold IndexedSlices{leaf.at_path}: their number of rows is not known")
        backend = _checked_backend(leaf, read.devices, destinations)
        array = leaf.arrays[0]
        dtype = backend.dtype_of(array)
        specs.append(LeafSpec(backend, dtype, backend.shape_of(array), read.devices, destinations))
        check_out(arrays, specs[-1], dtype, leaf.path)
    check_overlaps(
        [Dense(leaf.arrays, spec, out) for leaf, spec, out in zip(read.leaves, specs, outs, strict=True)]
    )
    for spec, leaf, arrays in zip(specs, read.leaves, outs, strict=True):
        for target in arrays:
            if target is not leaf.arrays[0]:
                spec.backend.write(
                    target, spec.backend.copy(leaf.arrays[0], _device_of(spec, arrays, target))
                )
    return wrapped(outs, read.structure, destinations)


def _device_of(spec: LeafSpec, arrays: Any, target: Array) -> Device:
    return next(device for device, array in zip(spec.destinations, arrays, strict=True) if array is target)


def component_of(value: Any) -> Any:
    """The value itself; of one that delegates, the component that counts here."""
    return value.current() if isinstance(value, DelegatingValues) else value


def _checked_backend(leaf: Leaf, devices: tuple[Device, ...], destinations: tuple[Device, ...]) -> Backend:
    array = leaf.arrays[0]
    backend = one_backend([array.values if isinstance(array, IndexedSlices) else array], devices, leaf.path)
    for device in destinations:
        backend.check_device(device)
    return backend


def _placed(
    place: Callable[[Backend, Array, Device, Device], Array],
    backend: Backend,
    array: Any,
    source: Device,
    device: Device,
) -> Any:
    if not isinstance(array, IndexedSlices):
        return place(backend, array, source, device)
    values, indices = (place(backend, part, source, device) for part in (array.values, array.indices))
    return array.with_parts(values, indices, array.dense_shape)


def _copy(backend: Backend, array: Array, source: Device, device: Device) -> Array:  # noqa: ARG001
    return backend.copy(array, device)


def _shared(backend: Backend, array: Array, source: Device, device: Device) -> Array:
    if backend.memory_of(source) != backend.memory_of(device):
        return backend.copy(array, device)
    return backend.read_only(array, device)
