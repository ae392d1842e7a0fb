"""Registry of algorithms by name; `make generated` writes the tables in other files from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from crossdevice.values.registry import Registry


class AlgorithmRow(NamedTuple):
    """An algorithm's class, and its costs in words for N replicas of an array of S bytes."""

    target: str
    rounds: str
    busiest: str
    """Most that a device sends or receives."""


OWN_ALGORITHMS: Mapping[str, AlgorithmRow] = {
    "one_device": AlgorithmRow(
        "crossdevice.algorithms.reduction_to_one_device:ReductionToOneDevice", "2", "(N - 1) S"
    ),
    "hierarchical_copy": AlgorithmRow(
        "crossdevice.algorithms.hierarchical_copy_all_reduce:HierarchicalCopyAllReduce", "4", "N / 2 S"
    ),
    "nccl": AlgorithmRow(
        "crossdevice.algorithms.nccl_all_reduce:NcclAllReduce", "1 engine call", "NCCL's choice"
    ),
    "ring": AlgorithmRow(
        "crossdevice.algorithms.ring_all_reduce:RingAllReduce", "2 (N - 1)", "2 (N - 1) / N S"
    ),
    "halving_doubling": AlgorithmRow(
        "crossdevice.algorithms.halving_doubling_all_reduce:HalvingDoublingAllReduce",
        "2 log2 N",
        "2 (N - 1) / N S",
    ),
    "tree": AlgorithmRow("crossdevice.algorithms.tree_all_reduce:TreeAllReduce", "2 log2 N", "2 S"),
    "direct": AlgorithmRow(
        "crossdevice.algorithms.direct_all_reduce:DirectAllReduce", "2", "2 (N - 1) / N S"
    ),
}
"""Algorithms of this package, one per file."""

ALGORITHMS = Registry(
    "an all-reduce algorithm",
    {name: row.target for name, row in OWN_ALGORITHMS.items()},
    entry_point_group="crossdevice.algorithms",
)
"""All algorithms, those of installed packages included."""
