"""Calls as values: what is called, with which values, and where results go."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from crossdevice.errors import ConversionError
from crossdevice.execution.reading.structures import is_placed
from crossdevice.values.distributed import PerReplica, as_distributed
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.reduce_op import ReduceOp


class Collective(NamedTuple):
    """A call without its values, destinations and `out`: the key of known calls."""

    name: str
    """The method of CrossDeviceOps."""
    op: ReduceOp | str | None = None
    options: CommunicationOptions | None = None
    axis: int = 0
    sizes: Any = None
    num_weights: int | None = None

    @property
    def is_copy(self) -> bool:
        """True for calls without an operation."""
        return self.name in ("gather", "broadcast", "all_to_all")


class Call(NamedTuple):
    """The arguments of a call, in the form that all collectives share."""

    collective: Collective
    pairs: Sequence[tuple[Any, Any]]
    """Values with their destinations: for a call that has none, the value itself."""
    outs: Sequence[Any]
    weights: Any = None
    is_of_rank: bool = False
    """Whether its value is that of one rank; nothing of such a call is prepared between processes."""


def one_value(tensor: Any) -> Any:
    """The value of a broadcast."""
    tensor = as_distributed(tensor)
    if isinstance(tensor, PerReplica):
        raise ConversionError("broadcast takes one value; a PerReplica has a different one for each replica")
    return tensor


def value_of_replicas(value: Any) -> Any:
    """The value of an all-gather; a structure of bare arrays is what one replica has."""
    value = as_distributed(value)
    return value if is_placed(value) else PerReplica([value])


def hashable_sizes(sizes: Any) -> Any:
    """Lengths as tuples of integers, so that known calls can be found by them; anything else as it is."""
    try:
        return tuple(
            [
                tuple(map(operator.index, each)) if hasattr(each, "__len__") else operator.index(each)
                for each in sizes
            ]
        )
    except TypeError:
        return sizes
