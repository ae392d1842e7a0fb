"""Checking `out=`, and wrapping results."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray

from crossdevice.backends.protocol import HOST_MEMORY, Array, Backend
from crossdevice.backends.registry import backend_of_type
from crossdevice.errors import OutError
from crossdevice.execution.reading.leaf_spec import Dense, LeafSpec, Outs
from crossdevice.execution.reading.overlaps import check_overlaps
from crossdevice.execution.reading.values import Value, at
from crossdevice.values.device import Device, misplaced
from crossdevice.values.distributed import DistributedValues, Mirrored
from crossdevice.values.nesting import flatten, spelled_structure, unflatten


def wrapped(
    results: Sequence[Sequence[Any]],
    structure: Any,
    destinations: tuple[Device, ...],
    container: type[DistributedValues] = Mirrored,
) -> Any:
    """Results, given per leaf and destination: bare for one destination, in a container for several."""
    components = [
        column[0] if structure is None else unflatten(structure, list(column))
        for column in (zip(*results, strict=True) if results else [()] * len(destinations))
    ]
    return components[0] if len(destinations) == 1 else container.of(tuple(components), destinations)


def read_out(out: Any, value: Value, destinations: tuple[Device, ...]) -> list[tuple[Array, ...]]:
    """The arrays of `out`, for each leaf one per destination."""
    components = out_components(out, destinations)
    if value.structure is None:
        return [tuple(components)]
    columns = []
    for component, device in zip(components, destinations, strict=True):
        leaves, structure = flatten(component)
        if structure != value.structure:
            raise OutError(
                f"out for {device} has another structure than the value: {spelled_structure(structure)}"
            )
        columns.append(leaves)
    return list(zip(*columns, strict=True))


class Expected(NamedTuple):
    """Requirements on the arrays of `out` for one leaf: the library, the dtype, and a shape for each."""

    backend: Backend
    dtype: str
    shapes: Sequence[tuple[int, ...]]
    destinations: tuple[Device, ...]
    path: str


def check_outs_of_shapes(outs: Outs, expected: Sequence[Expected]) -> None:
    """Refuses memory that does not fit results, or overlaps other memory.

    For results that are complete before `out` is written to, so it may overlap inputs, but not itself.
    """
    written = []
    for out, (backend, dtype, shapes, destinations, path) in zip(outs, expected, strict=True):
        if out is not None:
            specs = [LeafSpec(backend, dtype, shape, destinations, destinations) for shape in shapes]
            for position, (array, spec) in enumerate(zip(out, specs, strict=True)):
                check_array(array, position, spec, dtype, path)
            written.append(Dense((), specs[0], out))
    check_overlaps(written)


def dtype_of_out(components: Sequence[Any]) -> str | None:
    """The name of the first component's dtype; None if it is not an array."""
    backend = backend_of_type(type(components[0])) if components else None
    if backend is None or not hasattr(components[0], "dtype"):
        return None
    return backend.dtype_of(components[0])


def out_components(out: Any, destinations: tuple[Device, ...]) -> Sequence[Any]:
    """Returns the memory in `out` for each destination."""
    if isinstance(out, DistributedValues):
        components: Sequence[Any] = out.values
    elif len(destinations) > 1 and isinstance(out, (list, tuple)):
        components = out
    else:
        components = (out,)
    if len(components) != len(destinations):
        raise OutError(
            f"out has {len(components)} components; expected {len(destinations)}, one per destination"
        )
    return components


def delivered(results: Sequence[Array], out: Sequence[Array] | None, backend: Backend) -> tuple[Array, ...]:
    """The results themselves, or the arrays of `out` with the results written to them."""
    if out is None:
        return tuple(results)
    for target, result in zip(out, results, strict=True):
        backend.write(target, result)
    return tuple(out)


def check_outs(leaves: Sequence[Dense], dtypes: Sequence[str]) -> None:
    """Refuses memory of checked leaves that does not fit their results, or overlaps other memory."""
    for leaf, dtype in zip(leaves, dtypes, strict=True):
        if leaf.out is not None and not _is_in_place(leaf, dtype):
            check_out(leaf.out, leaf.spec, dtype, leaf.path)
    check_overlaps(leaves)


def _is_in_place(leaf: Dense, dtype: str) -> bool:
    """True if results replace their inputs, for which only writability is left to check."""
    spec = leaf.spec
    return (
        spec.devices == spec.destinations
        and spec.dtype == dtype
        and spec.shares_host_memory
        and not spec.backend.is_immutable
        and all(map(operator.is_, leaf.out or (), leaf.arrays))
        and all(spec.backend.writable_view(array) is not None for array in leaf.arrays)
    )


def check_out(out: Sequence[Array], spec: LeafSpec, dtype: str, path: str) -> None:
    """Refuses arrays of another shape, dtype, library or device, and memory that cannot be written."""
    for position, array in enumerate(out):
        check_array(array, position, spec, dtype, path)


def check_array(array: Array, position: int, spec: LeafSpec, dtype: str, path: str) -> None:
    """Refuses one array of `out` that does not fit the result on the destination of its position."""
    device = spec.destinations[position]
    problem = _problem_of(array, spec, dtype, device)
    if problem is not None:
        raise OutError(f"out[{position}] ({device}){at(path)} {problem}")


def _problem_of(array: Any, spec: LeafSpec, dtype: str, device: Device) -> str | None:
    backend = spec.backend
    if not hasattr(array, "dtype") or backend_of_type(type(array)) is not backend:
        return f"is a {type(array).__name__}; expected an array of {backend.name}"
    if backend.is_immutable:
        return f"is an array of {backend.name}, which cannot be written to; leave out= away, results are new"
    if backend.autograd is not None and backend.autograd.is_recorded(array):
        return "requires a gradient; what is written to it would not be recorded: detach() it, or no_grad()"
    if backend.shape_of(array) != spec.shape:
        return f"has shape {backend.shape_of(array)}; expected {spec.shape}"
    if backend.dtype_of(array) != dtype:
        return f"has dtype {backend.dtype_of(array)}; expected {dtype}"
    elsewhere = misplaced(array, device)
    if elsewhere is not None:
        return f"is on {elsewhere}; expected an array on {device}"
    if backend.memory_of(device) == HOST_MEMORY and backend.writable_view(array) is None:
        return f"{_why_not_writable(array)}; copy the result into it instead"
    return None


def _why_not_writable(array: Any) -> str:
    """Says why results cannot be written to a host array; each library knows only some of these reasons."""

    def says(question: str, default: bool = False) -> bool:
        return bool(getattr(array, question, lambda: default)())

    flags = getattr(array, "flags", None)
    reasons = {
        "is a masked array": hasattr(array, "mask"),
        "is read-only": not getattr(flags, "writeable", True),
        "was made for inference": says("is_inference"),
        "is not contiguous": not getattr(flags, "c_contiguous", says("is_contiguous", True)),
        "is not native: its bytes are in reverse order": not getattr(array.dtype, "isnative", True),
        "is a view that conjugates or negates": says("is_conj") or says("is_neg"),
    }
    unknown = "cannot be written to where it is: it is read-only, not contiguous or not native"
    return next((reason for reason, holds in reasons.items() if holds), unknown)


def written_view(backend: Backend, out: Array) -> NDArray[Any]:
    """The memory of a host array that was writable when the call began: other ranks may have taken long."""
    view = backend.writable_view(out)
    if view is None:
        raise OutError("out has become read-only since it was checked")
    return view
