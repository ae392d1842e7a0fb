"""The totals of the accumulators of all ranks of a group: compared, added up and rounded once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crossdevice.backends.registry import backend_named
from crossdevice.combining.between_ranks import RoundedSum, gathered_json, write_totals
from crossdevice.combining.leaf_total import Integers, Leaf, LeafTotal, check_like, divisor_of
from crossdevice.combining.saving import described, undescribed
from crossdevice.combining.trees import check_same, united
from crossdevice.errors import ContextError, MismatchError
from crossdevice.kernels.host.resources.pool import result_pool
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.values.device import Device


def results_of_ranks(
    group: ProcessGroup,
    skeleton: Any,
    totals: Mapping[str, LeafTotal],
    *,
    is_partial: bool,
    integers: Integers,
    is_mean: bool,
) -> tuple[Any, dict[str, Any]]:
    """Returns the structure of all trees, and arrays by path: sums, or means by the weights of all ranks.

    `totals` are none on a rank that has added nothing.
    """
    own = {
        "settings": f"partial={is_partial}, integers={integers!r}, mean={is_mean}",
        "tree": described(skeleton) if totals else None,
        "leaves": {path: _facts_of(total) for path, total in totals.items()},
    }
    # Two calls: what is wrong is found by all ranks alike between them, and the group stays usable.
    with group.call("compare accumulators", b"compare accumulators") as call:
        of_ranks = gathered_json(call, own)
    skeleton, leaves = _united(group.members, of_ranks, is_partial=is_partial)
    if not leaves:
        raise ContextError("no rank has added anything yet, so there is no result")
    mine = {path: totals.get(path) or LeafTotal(leaf, "exact", integers) for path, leaf in leaves.items()}
    weights = {
        path: sum(
            (Fraction(facts["leaves"][path][-1]) for facts in of_ranks if path in facts["leaves"]), Fraction()
        )
        for path in leaves
    }
    sizes = [(total.size, total.dtype) for total in mine.values()]
    flats = dict(zip(mine, result_pool.empty_batch(sizes), strict=True))
    sums = [
        RoundedSum(
            total.running,
            flats[path].view(total.running.dtype),
            divisor_of(weights[path], path) if is_mean else Fraction(1),
        )
        for path, total in mine.items()
        if total.running is not None
    ]
    digest = hashlib.blake2b(json.dumps(of_ranks).encode(), digest_size=16).digest()
    with group.call(f"combine accumulators of {len(leaves)} arrays", digest) as call:
        write_totals(call, sums)
        for path, total in mine.items():
            if total.running is None:
                flats[path][:] = _kept_of_ranks(call, total, integers)
    return skeleton, {
        path: total.leaf.backend.from_host(flats[path], total.leaf.shape, total.leaf.device)
        for path, total in mine.items()
    }


def _facts_of(total: LeafTotal) -> list[Any]:
    leaf = total.leaf
    return [leaf.backend.name, leaf.dtype, list(leaf.shape), str(leaf.device), str(total.weight)]


def _united(
    members: Sequence[str], of_ranks: Sequence[Mapping[str, Any]], *, is_partial: bool
) -> tuple[Any, dict[str, Leaf]]:
    """Returns the structure and leaves of all ranks; refuses ranks that differ from those before."""
    skeleton: Any = None
    leaves: dict[str, Leaf] = {}
    try:
        for name, facts in zip(members, of_ranks, strict=True):
            if facts["settings"] != of_ranks[0]["settings"]:
                raise MismatchError(
                    f"{name} combines accumulators with {facts['settings']}; {members[0]} with "
                    f"{of_ranks[0]['settings']}"
                )
            if facts["tree"] is None:
                continue
            found = undescribed(facts["tree"])
            for path, (library, dtype, shape, device, _) in facts["leaves"].items():
                leaf = Leaf(backend_named(library), dtype, tuple(shape), Device.parse(device))
                check_like(leaf, leaves.setdefault(path, leaf), name, path)
            if skeleton is None:
                skeleton = found
            elif is_partial:
                skeleton = united(skeleton, found, name)
            else:
                check_same(skeleton, found, name)
    except MismatchError as error:
        error.is_on_all_ranks = True
        raise
    return skeleton, leaves


def _kept_of_ranks(call: GroupCall, total: LeafTotal, integers: Integers) -> NDArray[Any]:
    """Returns integers that are not summed: those of the lowest rank that has some, or the largest."""
    kept = LeafTotal(total.leaf, "exact", integers)
    for found in call.all_gather_uneven(b"" if total.kept is None else total.kept.tobytes()):
        if found:
            kept.enter([np.frombuffer(found, total.dtype)], [])
    assert kept.kept is not None
    return kept.kept
