"""The part of a batch that crosses memories: packed, run step by step, unpacked."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from crossdevice.backends.protocol import Array, Backend
from crossdevice.execution.local.executor import execute
from crossdevice.execution.local.passes import Results
from crossdevice.execution.reading.leaf_spec import Columns, LeafSpec, Out, Outs
from crossdevice.execution.reading.outputs import delivered
from crossdevice.execution.tracing import Work, flight_recorder, now
from crossdevice.plans.packing import Pack
from crossdevice.plans.plan import Plan
from crossdevice.values.device import Device
from crossdevice.values.quantities import counted
from crossdevice.values.recipe import Recipe
from crossdevice.values.weights import Weights


class SteppedPacks:
    """Packs whose plans are executed faithfully, copy by copy."""

    def __init__(self, specs: Mapping[int, LeafSpec], dtypes: Mapping[int, str]) -> None:
        self._specs = specs
        self._dtypes = dtypes
        self._packs: list[tuple[Pack, Plan, Recipe]] = []

    def add_pack(self, pack: Pack, plan: Plan, recipe: Recipe) -> None:
        """A pack of leaves that have everything but their elements in common."""
        self._packs.append((pack, plan, recipe))

    def run(self, columns: Columns, outs: Outs, weights: Weights | None = None) -> Results:
        """The results of each leaf, in new memory or in `outs`."""
        parts: dict[int, list[tuple[int, list[Array]]]] = {}
        for pack, plan, recipe in self._packs:
            spec, dtype = self._specs[pack[0].item], self._dtypes[pack[0].item]
            started = now()
            inputs = _packed(pack, columns, spec)
            packing = Work("pack", f"pack of {counted(len(pack), 'value')}", spec.devices)
            flight_recorder.events.append((packing, started, now(), 1))
            results = execute(plan, inputs, spec.backend, recipe.with_weights(weights), dtype)
            offset = 0
            for item, start, stop in pack:
                end = offset + stop - start
                pieces = [
                    array
                    if len(pack) == 1
                    else spec.backend.copy(spec.backend.part_of(array, offset, end), device)
                    for array, device in zip(results, spec.destinations, strict=True)
                ]
                parts.setdefault(item, []).append((start, pieces))
                offset = end
        started = now()
        assembled = {item: self._assembled(item, pieces, outs[item]) for item, pieces in parts.items()}
        devices = dict.fromkeys(device for item in parts for device in self._specs[item].destinations)
        unpacking = Work("unpack", f"unpack {counted(len(parts), 'value')}", tuple(devices))
        flight_recorder.events.append((unpacking, started, now(), 1))
        return assembled

    def bound(self, columns: Columns, outs: Columns, weights: Weights | None = None) -> Callable[[], Any]:
        """A function that reduces these arrays into those of `outs` whenever it is called."""
        return functools.partial(self.run, columns, outs, weights)

    def _assembled(self, item: int, parts: list[tuple[int, list[Array]]], out: Out) -> tuple[Array, ...]:
        """A leaf's results from the packs it was spread over."""
        spec = self._specs[item]
        in_order = [pieces for _, pieces in sorted(parts, key=operator.itemgetter(0))]
        whole = [
            spec.backend.reshape(_joined(spec.backend, pieces, device), spec.shape)
            for pieces, device in zip(zip(*in_order, strict=True), spec.destinations, strict=True)
        ]
        return delivered(whole, out, spec.backend)


def _packed(pack: Pack, columns: Columns, spec: LeafSpec) -> list[Array]:
    """For each replica the elements of the pack, end to end."""
    backend = spec.backend
    flat = {item: [backend.flat(array) for array in columns[item]] for item, _, _ in pack}
    return [
        _joined(
            backend, [backend.part_of(flat[item][replica], start, stop) for item, start, stop in pack], device
        )
        for replica, device in enumerate(spec.devices)
    ]


def _joined(backend: Backend, arrays: Sequence[Array], device: Device) -> Array:
    return arrays[0] if len(arrays) == 1 else backend.concat(arrays, 0, device)
