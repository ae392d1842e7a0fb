"""Reduce-scatter: a reduction of which each replica gets one part, planned as a reduction of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from crossdevice.errors import ConversionError
from crossdevice.execution.reading.leaf_spec import LeafSpec
from crossdevice.execution.reading.outputs import out_components
from crossdevice.execution.reading.shards import check_sum, checked_axis, cut, part_lengths, read_sizes
from crossdevice.execution.reading.values import Leaf, Value, checked_spec, read_value
from crossdevice.values.device import Device
from crossdevice.values.distributed import PerReplica
from crossdevice.values.nesting import unflatten
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.weights import check_number


class ScatteredLeaf(NamedTuple):
    """A checked leaf, and the axis along which its reduction is cut."""

    leaf: Leaf
    spec: LeafSpec
    axis: int


class Scatter(NamedTuple):
    """A checked value whose reduction is cut into a part for each replica, into `out` unless that is None."""

    value: Value
    leaves: list[ScatteredLeaf]
    sizes: tuple[int, ...] | None
    out: Any

    @property
    def outs(self) -> Sequence[Any]:
        """Memory in `out` for each replica."""
        devices = self.value.devices
        return [None] * len(devices) if self.out is None else out_components(self.out, devices)

    def pairs(self) -> list[tuple[PerReplica, Device]]:
        """For each replica, what is reduced to its device: its own part of all replicas' arrays."""
        devices, structure = self.value.devices, self.value.structure
        of_leaves = []
        for leaf, spec, axis in self.leaves:
            lengths = part_lengths(spec.shape[axis], len(devices), self.sizes, leaf.at_path)
            pairs = zip(leaf.arrays, devices, strict=True)
            of_leaves.append([cut(array, axis, lengths, spec.backend, device) for array, device in pairs])

        def component(number: int, replica: int) -> Any:
            leaves = [parts[replica][number] for parts in of_leaves]
            return leaves[0] if structure is None else unflatten(structure, leaves)

        return [
            (
                PerReplica.of(tuple(component(number, replica) for replica in range(len(devices))), devices),
                device,
            )
            for number, device in enumerate(devices)
        ]


def read_scatter(
    value: Any, op: ReduceOp, axis: int, sizes: Any, out: Any, factors: tuple[float, ...] | None = None
) -> Scatter:
    """Reads and checks a value whose reduction is to be scattered; `factors` are its weights."""
    read, given = read_value(value), read_sizes(sizes)
    if factors is not None:
        check_number(factors, len(read.devices))
    leaves = []
    for leaf in read.leaves:
        if leaf.is_sparse:
            raise ConversionError(
                f"reduce_scatter takes arrays, and there are IndexedSlices{leaf.at_path}; "
                "reduce them, or convert them with to_dense"
            )
        spec = checked_spec(leaf, read.devices, read.devices, op)
        own_axis = checked_axis(axis, len(spec.shape), "reduce_scatter", leaf.at_path)
        check_sum(given, spec.shape[own_axis], leaf.at_path)
        leaves.append(ScatteredLeaf(leaf, spec, own_axis))
    return Scatter(read, leaves, given, out)


def per_replica(components: Sequence[Any], devices: tuple[Device, ...]) -> Any:
    """Wraps the parts as a PerReplica, or returns the bare component of a lone replica."""
    return components[0] if len(devices) == 1 else PerReplica.of(tuple(components), devices)
