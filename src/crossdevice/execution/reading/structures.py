"""Structures around distributed values: spread into pairs of one value each, and built again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from crossdevice.errors import ConversionError, OutError
from crossdevice.values.distributed import DistributedValues
from crossdevice.values.nesting import flatten, is_number_list, spelled_structure, unflatten
from crossdevice.values.quantities import counted, kind_text


def checked_pairs(pairs: Any) -> list[tuple[Any, Any]]:
    """A list of the pairs, each of them a tuple of two."""
    expected = "expected an iterable of (value, destinations) tuples"
    if not isinstance(pairs, Iterable):
        raise ConversionError(f"value_destination_pairs is {kind_text(pairs)}; {expected}")
    listed = list(pairs)
    if set(map(type, listed)) <= {tuple} and set(map(len, listed)) <= {2}:
        return listed
    for number, pair in enumerate(listed):
        if not isinstance(pair, tuple) or len(pair) != 2:
            length = f" of {len(pair)}" if isinstance(pair, tuple) else ""
            raise ConversionError(f"pair {number} is {kind_text(pair)}{length}; {expected}")
    return listed


def checked_outs(outs: Any, num_pairs: int) -> list[Any]:
    """A list of the `out` of each pair; None for those that have none."""
    if outs is None:
        return [None] * num_pairs
    if not isinstance(outs, Sequence) or len(outs) != num_pairs:
        found = (
            counted(len(outs), "entry", "entries")
            if isinstance(outs, Sequence)
            else f"type {type(outs).__name__}"
        )
        raise OutError(f"out has {found}; expected a list of one for each of {counted(num_pairs, 'pair')}")
    return list(outs)


def is_placed(value: Any) -> bool:
    """True for one array and for distributed values, also in parts; False for a structure of arrays."""
    return isinstance(value, DistributedValues) or hasattr(value, "dtype") or _is_distributed_structure(value)


def _is_distributed_structure(value: Any) -> bool:
    """True for a structure that contains distributed values."""
    if isinstance(value, DistributedValues) or hasattr(value, "dtype"):
        return False
    return any(isinstance(leaf, DistributedValues) for leaf in flatten(value, _is_value)[0])


def _is_value(node: Any) -> bool:
    return isinstance(node, DistributedValues) or is_number_list(node)


def spread_pairs(
    pairs: Sequence[tuple[Any, Any]], outs: Sequence[Any]
) -> tuple[list[tuple[Any, Any]], list[Any], Callable[[list[Any]], list[Any]]]:
    """Pairs of one distributed value each, the `out` of each, and the function that rebuilds structures."""
    if not any(_is_distributed_structure(value) for value, _ in pairs):
        return list(pairs), list(outs), lambda results: results
    spread: list[tuple[Any, Any]] = []
    spread_outs: list[Any] = []
    shapes: list[tuple[int, Any]] = []
    for (value, destinations), out in zip(pairs, outs, strict=True):
        if not _is_distributed_structure(value):
            spread.append((value, destinations))
            spread_outs.append(out)
            shapes.append((1, None))
            continue
        parts, structure = flatten(value, _is_value)
        targets, target_structure = flatten(destinations, _is_value)
        same = target_structure == structure
        spread += [(part, targets[i] if same else destinations) for i, part in enumerate(parts)]
        found, out_structure = ([None] * len(parts), structure) if out is None else flatten(out, _is_value)
        if out_structure != structure:
            raise OutError(f"out has another structure than the value: {spelled_structure(out_structure)}")
        spread_outs += found
        shapes.append((len(parts), structure))

    def rebuilt(results: list[Any]) -> list[Any]:
        left = iter(results)
        return [
            next(left) if structure is None else unflatten(structure, [next(left) for _ in range(count)])
            for count, structure in shapes
        ]

    return spread, spread_outs, rebuilt
