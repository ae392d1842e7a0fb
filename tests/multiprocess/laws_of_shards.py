"""What reduce-scatter, all-gather and all-to-all between processes owe on every engine."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import crossdevice as cd
from multiprocess.laws_of_reductions import (
    NUM_REPLICAS,
    cases,
    components,
    refusal,
    replicas,
    share_of,
)


def own_parts(group, parts):
    """Those of this rank's replicas."""
    return components(share_of(group, parts))


def same_bits(results, rights):
    results = components(results)
    assert [(array.dtype, array.shape) for array in results] == [(each.dtype, each.shape) for each in rights]
    assert [array.tobytes() for array in results] == [np.ascontiguousarray(each).tobytes() for each in rights]


def parts_have_the_bits_of_reduce(group, form_another):
    ops = cd.CollectiveAllReduce(group=group)
    precisions = itertools.cycle(("fast", "accurate", "exact"))
    for number, ((dtype, op), precision) in enumerate(zip(cases(), precisions, strict=False)):
        options = cd.CommunicationOptions(precision=precision)
        own = share_of(group, replicas(dtype, (3, 1001, 9000, 100)[number % 4]))
        whole = components(ops.reduce(op, own, own, options))[0]
        parts = ops.reduce_scatter(op, own, 0, options)
        same_bits(parts, own_parts(group, np.array_split(whole, NUM_REPLICAS)))
        same_bits(ops.all_gather(parts, 0, options), [whole] * len(own.values))


def exact_parts_have_the_bits_of_one_process(group, form_another):
    ops, options = cd.CollectiveAllReduce(group=group), cd.CommunicationOptions(precision="exact")
    medians = ((np.dtype("f4"), "MEDIAN"), (np.dtype("f2"), cd.trimmed_mean(2)))
    for dtype, op in (*list(cases())[::3], *medians):
        values = replicas(dtype, 700)
        rights = cd.reduce_scatter(values, op, options=options)
        same_bits(ops.reduce_scatter(op, share_of(group, values), 0, options), own_parts(group, rights))
    values, weights = replicas(np.dtype("f4"), 700), [0.5 + number for number in range(NUM_REPLICAS)]
    for op, precision in itertools.product(("sum", "mean"), ("fast", "accurate", "exact")):
        options = cd.CommunicationOptions(precision=precision)
        rights = cd.reduce_scatter(values, op, options=options, weights=weights)
        own = share_of(group, weights).values
        found = ops.reduce_scatter(op, share_of(group, values), 0, options, weights=own)
        same_bits(found, own_parts(group, rights))
    same_bits(
        ops.reduce_scatter("median", share_of(group, values), 0, cd.CommunicationOptions(precision="fast")),
        own_parts(group, cd.reduce_scatter(values, "median")),
    )


def accurate_parts_of_one_replica_each_have_the_bits_of_one_process(group, form_another):
    ops = cd.CollectiveAllReduce(group=group)
    for dtype, op in list(cases())[1::3]:
        values = replicas(dtype, 701, number=group.size)
        rights = cd.reduce_scatter(values, op)
        same_bits(ops.reduce_scatter(op, values[group.rank]), [rights[group.rank]])


def any_axis_any_sizes_and_structures_are_scattered(group, form_another):
    ops = cd.CollectiveAllReduce(group=group)
    trees = [
        {"w": np.float32(array.reshape(6, 10, 3)), "b": [array[:60].reshape(2, 10, 3).astype(np.complex64)]}
        for array in replicas(np.dtype("f4"), 180)
    ]
    sizes = [0, 1, 2, 0, 3, 1, 1, 2]
    for bytes_per_pack, own_sizes in ((0, None), (64, sizes), (1 << 20, sizes)):
        options = cd.CommunicationOptions(precision="exact", bytes_per_pack=bytes_per_pack)
        rights = cd.reduce_scatter(trees, "mean", axis=1, sizes=own_sizes, options=options)
        found = components(ops.reduce_scatter("mean", share_of(group, trees), 1, options, sizes=own_sizes))
        for part, right in zip(found, own_parts(group, rights), strict=True):
            same_bits(part["w"], [right["w"]])
            same_bits(part["b"][0], [right["b"][0]])


def everyone_gets_its_parts_of_everyone(group, form_another):
    ops = cd.CollectiveAllReduce(group=group)
    for dtype in (np.dtype("f4"), np.dtype("bool"), np.dtype("c8")):
        for axis, sizes in ((0, None), (1, None), (0, [0, 3, 1, 0, 2, 0, 1, 1])):
            shapes = [(8, 5 + number) if axis else (8 + number * (sizes is None), 5) for number in range(8)]
            values = [
                {"x": (np.arange(np.prod(shape)).reshape(shape) % 97 + number).astype(dtype)}
                for number, shape in enumerate(shapes)
            ]
            rights = cd.all_to_all(values, axis=axis, sizes=sizes)
            found = components(ops.all_to_all(share_of(group, values), axis, sizes=sizes))
            for part, right in zip(found, own_parts(group, rights), strict=True):
                same_bits(part["x"], [right["x"]])


def parts_come_back_from_where_they_went(group, form_another):
    ops, size = cd.CollectiveAllReduce(group=group), group.size
    lengths = [[(rank + 2 * peer) % 4 for peer in range(size)] for rank in range(size)]
    mine = np.arange(sum(lengths[group.rank]), dtype=np.int64) + 100 * group.rank
    moved = ops.all_to_all(mine, sizes=lengths[group.rank])
    assert moved.size == sum(row[group.rank] for row in lengths)
    back = ops.all_to_all(moved, sizes=[row[group.rank] for row in lengths])
    assert back.tolist() == mine.tolist()


def ranks_with_different_numbers_of_replicas_get_their_parts(group, form_another):
    ops = cd.CollectiveAllReduce(group=group)
    counts = [rank + 1 for rank in range(group.size)]
    values = replicas(np.dtype("f4"), 37, number=sum(counts))
    first = sum(counts[: group.rank])
    own = cd.PerReplica(values[first : first + counts[group.rank]])
    options = cd.CommunicationOptions(precision="exact")
    place = slice(first, first + counts[group.rank])
    same_bits(
        ops.reduce_scatter("sum", own, 0, options), cd.reduce_scatter(values, "sum", options=options)[place]
    )
    same_bits(ops.all_to_all(own), cd.all_to_all(values)[place])


def parts_are_written_to_out(group, form_another):
    ops = cd.CollectiveAllReduce(group=group)
    values = replicas(np.dtype("f8"), 300, number=group.size)
    mine = values[group.rank]
    for call, right in (
        (lambda out: ops.reduce_scatter("max", mine, out=out), cd.reduce_scatter(values, "max")),
        (lambda out: ops.all_gather(mine, out=out), cd.all_gather(values)),
        (lambda out: ops.all_to_all(mine, out=out), cd.all_to_all(values)),
    ):
        out = np.zeros_like(right[group.rank])
        assert call(out) is out
        assert out.tobytes() == right[group.rank].tobytes()
        if group.rank == 0:
            with pytest.raises(cd.errors.OutError, match="has shape"):
                call(np.zeros(7))
        else:
            call(None)  # other ranks have what they asked for
        assert not group.is_broken


def differences_are_named_on_every_rank(group, form_another):
    if group.size == 1:
        return
    ops, is_odd = cd.CollectiveAllReduce(group=group), group.rank == group.size - 1
    array = np.zeros((4, 4), np.float32)
    for expected, call, text in (
        (
            cd.errors.MismatchError,
            lambda: ops.reduce_scatter("sum", array, 1 if is_odd else 0),
            "along axis 1",
        ),
        (cd.errors.MismatchError, lambda: ops.reduce_scatter("max" if is_odd else "sum", array), "MAX"),
        (
            cd.errors.ShapeMismatchError,
            lambda: ops.reduce_scatter("sum", array[:3] if is_odd else array),
            "has shape (3, 4)",
        ),
        (
            cd.errors.DtypeMismatchError,
            lambda: ops.all_to_all(array.astype("i4") if is_odd else array),
            "has dtype int32",
        ),
        (
            cd.errors.MismatchError,
            lambda: ops.all_gather(array) if is_odd else ops.all_to_all(array),
            "calls gather along axis 0",
        ),
        (
            cd.errors.MismatchError,
            lambda: ops.reduce_scatter("sum", array, sizes=[4, *[0] * (group.size - 1)] if is_odd else None),
            "sizes [4, ",
        ),
    ):
        message = refusal(group, expected, call)
        assert text in message
        assert f"rank {group.size - 1} (" in message
    for call in (
        lambda: ops.reduce_scatter("sum", array, sizes=[4]),
        lambda: ops.all_to_all(array, sizes=[4]),
    ):
        message = refusal(group, cd.errors.MismatchError, call)
        assert f"sizes has 1 length; expected {group.size}, one for each replica" in message
    few = refusal(group, cd.errors.MismatchError, lambda: ops.reduce_scatter(cd.trimmed_mean(9), array))
    assert f"there are {group.size} replicas; expected at least 19" in few
    assert ops.reduce_scatter("sum", np.ones(group.size)).tolist() == [group.size]


def nothing_can_be_scattered_and_moved(group, form_another):
    ops = cd.CollectiveAllReduce(group=group)
    for value in ({}, {"a": np.zeros((0, 3), np.float32)}):
        for result in (ops.reduce_scatter("sum", value), ops.all_to_all(value)):
            assert {name: array.shape for name, array in result.items()} == dict.fromkeys(value, (0, 3))


def ranks_without_a_part_take_part_again_and_again(group, form_another):
    ops, options = cd.CollectiveAllReduce(group=group), cd.CommunicationOptions(timeout_seconds=20)
    last = [0] * (group.size - 1) + [1]
    for _ in range(3):  # later calls are known, and nothing is compared
        first = ops.reduce_scatter("sum", np.ones((1, 2)), 0, options)
        assert first.tolist() == [[group.size] * 2] * (group.rank == 0)
        part = ops.reduce_scatter("sum", np.ones((1, 20000)), 0, options, sizes=last)
        assert part.tolist() == [[group.size] * 20000] * (group.rank == group.size - 1)


SHARD_LAWS = {
    law.__name__: law
    for law in (
        parts_have_the_bits_of_reduce,
        exact_parts_have_the_bits_of_one_process,
        accurate_parts_of_one_replica_each_have_the_bits_of_one_process,
        any_axis_any_sizes_and_structures_are_scattered,
        everyone_gets_its_parts_of_everyone,
        parts_come_back_from_where_they_went,
        ranks_with_different_numbers_of_replicas_get_their_parts,
        parts_are_written_to_out,
        differences_are_named_on_every_rank,
        nothing_can_be_scattered_and_moved,
        ranks_without_a_part_take_part_again_and_again,
    )
}
