"""Copying one value to devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from crossdevice.backends.protocol import Array, Backend
from crossdevice.errors import OutError
from crossdevice.execution.reading.leaf_spec import Dense, LeafSpec, bytes_of
from crossdevice.execution.reading.outputs import check_out, check_overlaps, read_out, wrapped
from crossdevice.execution.reading.values import Leaf, one_backend, read_value
from crossdevice.execution.tracing import READING, Work, flight_recorder, now, recorded, transfer
from crossdevice.values.device import Device
from crossdevice.values.distributed import IndexedSlices, component_of

PutArray: TypeAlias = "Callable[[Backend, Array, Device, Device], Array]"
"""Puts an array on a device: (backend, array, its device, the target device)."""


def copied_to(value: Any, destinations: tuple[Device, ...]) -> Any:
    """The value in new memory on each destination."""
    return _on_each(value, destinations, "broadcast", _copy)


def shared_with(value: Any, destinations: tuple[Device, ...]) -> Any:
    """The value itself where a destination shares its memory, a copy elsewhere."""
    return _on_each(value, destinations, "broadcast, shared", _shared)


def _on_each(value: Any, destinations: tuple[Device, ...], name: str, put: PutArray) -> Any:
    started = now()
    read = read_value(component_of(value))
    (source,) = read.devices
    backends = [_checked_backend(leaf, read.devices, destinations) for leaf in read.leaves]
    flight_recorder.events.append((READING, started, now(), 1))
    with recorded(_work(name, read.leaves, backends, source, destinations)):
        results = [
            [_put_parts(put, backend, leaf.arrays[0], source, device) for device in destinations]
            for leaf, backend in zip(read.leaves, backends, strict=True)
        ]
    return wrapped(results, read.structure, destinations)


def copied_into(value: Any, destinations: tuple[Device, ...], out: Any) -> Any:
    """The value, written to the arrays of `out`."""
    started = now()
    read = read_value(component_of(value))
    (source,) = read.devices
    outs = read_out(out, read, destinations)
    specs: list[LeafSpec] = []
    for leaf, arrays in zip(read.leaves, outs, strict=True):
        if leaf.is_sparse:
            raise OutError(f"out cannot hold IndexedSlices{leaf.at_path}: their number of rows is not known")
        backend = _checked_backend(leaf, read.devices, destinations)
        dtype, shape = backend.dtype_of(leaf.arrays[0]), backend.shape_of(leaf.arrays[0])
        specs.append(LeafSpec(backend, dtype, shape, read.devices, destinations))
        check_out(arrays, specs[-1], dtype, leaf.path)
    check_overlaps(
        [Dense(leaf.arrays, spec, out) for leaf, spec, out in zip(read.leaves, specs, outs, strict=True)]
    )
    flight_recorder.events.append((READING, started, now(), 1))
    backends = [spec.backend for spec in specs]
    with recorded(_work("broadcast into out", read.leaves, backends, source, destinations)):
        for backend, leaf, arrays in zip(backends, read.leaves, outs, strict=True):
            for target, device in zip(arrays, destinations, strict=True):
                _write(backend, leaf.arrays[0], source, target, device)
    return wrapped(outs, read.structure, destinations)


def _write(backend: Backend, array: Array, source: Device, target: Array, device: Device) -> None:
    if target is array:
        return
    with recorded(transfer(source, device, bytes_of(backend, array))):
        shares_memory = backend.memory_of(source) == backend.memory_of(device)
        backend.write(target, array if shares_memory else backend.copy(array, device))


def _work(
    name: str, leaves: Sequence[Leaf], backends: Sequence[Backend], source: Device, targets: Sequence[Device]
) -> Work:
    num_bytes = sum(
        bytes_of(backend, part)
        for leaf, backend in zip(leaves, backends, strict=True)
        for part in _parts_of(leaf.arrays[0])
    )
    return Work("copy", name, (source, *targets), num_bytes)


def _parts_of(array: Any) -> tuple[Array, ...]:
    return (array.values, array.indices) if isinstance(array, IndexedSlices) else (array,)


def _checked_backend(leaf: Leaf, devices: tuple[Device, ...], destinations: tuple[Device, ...]) -> Backend:
    return one_backend(_parts_of(leaf.arrays[0])[:1], devices, leaf.path, destinations)


def _put_parts(put: PutArray, backend: Backend, array: Any, source: Device, device: Device) -> Any:
    if not isinstance(array, IndexedSlices):
        return put(backend, array, source, device)
    values, indices = (put(backend, part, source, device) for part in _parts_of(array))
    return array.with_parts(values, indices, array.dense_shape)


def _copy(backend: Backend, array: Array, source: Device, device: Device) -> Array:
    with recorded(transfer(source, device, bytes_of(backend, array))):
        return backend.copy(array, device)


def _shared(backend: Backend, array: Array, source: Device, device: Device) -> Array:
    if backend.memory_of(source) != backend.memory_of(device):
        return _copy(backend, array, source, device)
    return backend.read_only(array, device)
