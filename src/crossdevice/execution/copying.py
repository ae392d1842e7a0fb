"""Copying one value to devices."""

from __future__ import annotations

from typing import Any

from crossdevice.backends.protocol import Array, Backend
from crossdevice.execution.intake import Leaf, one_backend, read_value
from crossdevice.execution.leaf_spec import LeafSpec
from crossdevice.execution.outputs import check_out, check_overlaps, read_out, wrapped
from crossdevice.values.device import Device
from crossdevice.values.distributed import Mirrored
from crossdevice.values.indexed_slices import IndexedSlices


def copied_to(value: Any, destinations: tuple[Device, ...]) -> Any:
    """The value in new memory on each destination."""
    read = read_value(_component(value))
    backends = [_checked_backend(leaf, read.devices, destinations) for leaf in read.leaves]
    results = [
        [_copy(backend, leaf.arrays[0], device) for device in destinations]
        for leaf, backend in zip(read.leaves, backends, strict=True)
    ]
    return wrapped(results, read.structure, destinations)


def copied_into(value: Any, destinations: tuple[Device, ...], out: Any) -> Any:
    """The value, written to the arrays of `out`."""
    read = read_value(_component(value))
    outs = read_out(out, read, destinations)
    specs: list[LeafSpec] = []
    for leaf, arrays in zip(read.leaves, outs, strict=True):
        backend = _checked_backend(leaf, read.devices, destinations)
        array = leaf.arrays[0]
        dtype = backend.dtype_of(array)
        specs.append(LeafSpec(backend, dtype, backend.shape_of(array), read.devices, destinations))
        check_out(arrays, specs[-1], dtype, leaf.path)
    check_overlaps(specs, [leaf.arrays for leaf in read.leaves], outs)
    for spec, leaf, arrays in zip(specs, read.leaves, outs, strict=True):
        for target in arrays:
            if target is not leaf.arrays[0]:
                spec.backend.write(
                    target, spec.backend.copy(leaf.arrays[0], _device_of(spec, arrays, target))
                )
    return wrapped(outs, read.structure, destinations)


def _device_of(spec: LeafSpec, arrays: Any, target: Array) -> Device:
    return next(device for device, array in zip(spec.destinations, arrays, strict=True) if array is target)


def _component(value: Any) -> Any:
    return value.current() if isinstance(value, Mirrored) else value


def _checked_backend(leaf: Leaf, devices: tuple[Device, ...], destinations: tuple[Device, ...]) -> Backend:
    array = leaf.arrays[0]
    backend = one_backend([array.values if isinstance(array, IndexedSlices) else array], devices, leaf.path)
    for device in destinations:
        backend.check_device(device)
    return backend


def _copy(backend: Backend, array: Any, device: Device) -> Any:
    if isinstance(array, IndexedSlices):
        return IndexedSlices(
            backend.copy(array.values, device), backend.copy(array.indices, device), array.dense_shape
        )
    return backend.copy(array, device)
