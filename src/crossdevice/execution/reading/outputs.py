"""Destinations and `out=`: read and checked, memory that overlaps refused, and results wrapped."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray

from crossdevice.backends.protocol import HOST_MEMORY, Array, Backend
from crossdevice.backends.registry import backend_of_type
from crossdevice.errors import DestinationError, OutError
from crossdevice.execution.reading.leaf_spec import Dense, LeafSpec, Outs
from crossdevice.execution.reading.values import Value, at
from crossdevice.values.delegation import PlacedArray
from crossdevice.values.device import Device, device_of, host_device, misplaced
from crossdevice.values.distributed import DistributedValues, IndexedSlices, Mirrored, as_distributed
from crossdevice.values.nesting import flatten, spelled_structure, unflatten
from crossdevice.values.quantities import counted, kind_text


def read_destinations(destinations: Any) -> tuple[Device, ...]:
    """The devices of a DistributedValues, in order; the one device of anything else that has one."""
    destinations = as_distributed(destinations)
    if isinstance(destinations, DistributedValues):
        if not destinations.devices:
            raise DestinationError("destinations is a distributed value without components")
        return destinations.devices
    if isinstance(destinations, Device):
        return (destinations,)
    if isinstance(destinations, str) and destinations:
        return (Device.parse(destinations),)
    is_array = hasattr(destinations, "dtype") and backend_of_type(type(destinations)) is not None
    sharding = getattr(destinations, "sharding", None) if is_array else None  # JAX's
    if sharding is not None and len(sharding.device_set) > 1:
        raise DestinationError(
            f"destinations is an array sharded over {len(sharding.device_set)} devices; expected one device"
        )
    if is_array or isinstance(destinations, (IndexedSlices, PlacedArray)):
        return (device_of(destinations) or host_device(0),)
    raise DestinationError(
        f"destinations is {_short_text(destinations)}; expected a DistributedValues, a variable, an array "
        "or a device string (the functions crossdevice.reduce and .broadcast also take lists of them)"
    )


def _short_text(thing: Any) -> str:
    text = repr(thing)
    return text if len(text) <= 80 else kind_text(thing)


class _Range(NamedTuple):
    """Addresses `start` to `end`, of an input or an output of a leaf."""

    start: int
    end: int
    is_written: bool
    leaf: int
    number: int

    def __str__(self) -> str:
        return f"out[{self.number}]" if self.is_written else f"replica {self.number}"


def check_overlaps(leaves: Sequence[Dense]) -> None:
    """Refuses outputs that overlap each other, or an input they are not exactly (in place is exact)."""
    ranges = sorted(_ranges(leaves))
    if all(left[1] <= right[0] for left, right in itertools.pairwise(ranges)):
        return
    active: list[_Range] = []
    for current in itertools.starmap(_Range, ranges):
        active = [other for other in active if other.end > current.start]
        for other in active:
            if current.is_written and other.is_written:
                raise OutError(f"{other} and {current} overlap in memory; expected one array per destination")
            if current.is_written != other.is_written and not _is_same_range(current, other):
                written, read = (current, other) if current.is_written else (other, current)
                raise OutError(
                    f"{written} overlaps {read} in memory without being it; "
                    "in place means exactly the same array"
                )
        if current.end > current.start:
            active.append(current)


def are_apart(leaves: Sequence[Dense]) -> bool:
    """True if no memory is both read and written, not even in place."""
    ends = {True: 0, False: 0}  # of what was written, and what was read, further to the front
    ranges = [
        (*leaf.spec.backend.address_range(array), is_written)
        for leaf in leaves
        for is_written, arrays in ((True, leaf.out or ()), (False, leaf.arrays))
        for array in arrays
    ]
    for start, end, is_written in sorted(ranges):
        if start < end and start < (max(ends.values()) if is_written else ends[True]):
            return False
        ends[is_written] = max(ends[is_written], end)
    return True


def _ranges(leaves: Sequence[Dense]) -> list[tuple[int, int, bool, int, int]]:
    """The fields of a `_Range` for each array, but for inputs that are one of their leaf's own outputs."""
    ranges: list[tuple[int, int, bool, int, int]] = []
    for leaf, (arrays, spec, out, *_) in enumerate(leaves):
        if spec.shares_memory:
            bounds, outs = spec.backend.address_range, out or ()
            replaced = set(map(id, outs))
            ranges += [(*bounds(array), True, leaf, number) for number, array in enumerate(outs)]
            ranges += [
                (*bounds(array), False, leaf, number)
                for number, array in enumerate(arrays)
                if id(array) not in replaced
            ]
    return ranges


def _is_same_range(one: _Range, other: _Range) -> bool:
    return (one.start, one.end, one.leaf) == (other.start, other.end, other.leaf)


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
            f"out has {counted(len(components), 'component')}; expected {len(destinations)}, one per "
            "destination"
        )
    return components


def in_given_trees(result: Any, value: Value, destinations: tuple[Device, ...], out: Any) -> Any:
    """The result of a structure in the trees of `out`, if there is one, whose arrays it was written to."""
    if out is None or value.structure is None:
        return result
    trees = tuple(out_components(out, destinations))
    return type(result).of(trees, destinations) if isinstance(result, DistributedValues) else trees[0]


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
        return f"is {kind_text(array)}; expected an array of {backend.name}"
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
