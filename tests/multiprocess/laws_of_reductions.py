"""What reductions between processes owe on every engine, whatever the number of processes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import crossdevice as cd

DTYPES = [
    np.dtype(name)
    for name in ("float16", ml_dtypes.bfloat16, "float32", "float64", "complex64", "int8", "uint16", "int64")
]
OPS = ("SUM", "MEAN", "MIN", "MAX", "PROD")
NUM_REPLICAS = 8


def replicas(dtype, size, seed=0, number=NUM_REPLICAS):
    """The same replicas on every rank, of magnitudes that make orders of summation differ."""
    source = np.random.default_rng(seed)
    values = source.standard_normal((number, size)) * 10.0 ** source.integers(-3, 4, (number, size))
    if dtype.kind == "c":
        values = values + 1j * values[:, ::-1]
    if dtype.kind in "iu":
        values = np.abs(values)
    return [array.astype(dtype) for array in values]


def share_of(group, values):
    """The values of this rank: neighbours, as evenly as may be."""
    edges = [len(values) * rank // group.size for rank in range(group.size + 1)]
    return cd.PerReplica(values[edges[group.rank] : edges[group.rank + 1]])


def components(result):
    """The arrays on all devices of this rank."""
    return result.values if isinstance(result, cd.DistributedValues) else (result,)


def cases():
    for dtype in DTYPES:
        for op in OPS:
            if dtype.kind != "c" or op not in ("MIN", "MAX"):
                yield dtype, op


def everywhere(group, text):
    """What every rank has to say."""
    with group.call("compare notes", b"notes") as call:
        return [record.decode() for record in call.all_gather_uneven(text.encode())]


def refusal(group, expected, calls):
    """The error that all ranks raise, which is the same on all."""
    with pytest.raises(cd.errors.CrossDeviceError) as caught:
        calls()
    assert type(caught.value) is expected, caught.value
    assert len(set(everywhere(group, str(caught.value)))) == 1
    assert not group.is_broken
    return str(caught.value)


def exact_results_have_the_bits_of_one_process(group, form_another):
    ops, options = cd.CollectiveAllReduce(group=group), cd.CommunicationOptions(precision="exact")
    for dtype, op in cases():
        for size in (0, 1, 1000, 30_000) if op == "MEAN" else (1, 300):
            values = replicas(dtype, size)
            expected = cd.ReductionToOneDevice().reduce(op, cd.PerReplica(values), "cpu:0", options)
            own = share_of(group, values)
            for array in components(ops.reduce(op, own, own, options)):
                assert array.dtype == expected.dtype
                assert array.tobytes() == expected.tobytes(), (dtype, op, size)


def exact_results_do_not_depend_on_the_order_of_ranks(group, form_another):
    ops, options = cd.CollectiveAllReduce(group=group), cd.CommunicationOptions(precision="exact")
    for dtype, op in cases():
        values = replicas(dtype, 500)
        results = [
            components(ops.reduce(op, own, own, options))[0].tobytes()
            for own in (share_of(group, values), share_of(group, values[::-1]))
        ]
        assert results[0] == results[1], (dtype, op)


def accurate_results_of_one_replica_each_have_the_bits_of_one_process(group, form_another):
    ops = cd.CollectiveAllReduce(group=group)
    for dtype, op in cases():
        for size in (1, 1000, 30_000):
            values = replicas(dtype, size, number=group.size)
            expected = cd.ReductionToOneDevice().reduce(op, cd.PerReplica(values), "cpu:0")
            assert ops.reduce(op, values[group.rank], "cpu:0").tobytes() == expected.tobytes(), (dtype, op)


def weighted_results_have_the_bits_of_one_process(group, form_another):
    ops = cd.CollectiveAllReduce(group=group)
    weights = [0.1, 3, 0, 1e-3, 20, 7, 1, 0.5]
    own_weights = list(share_of(group, weights).values)
    for precision in ("fast", "accurate", "exact"):
        options = cd.CommunicationOptions(precision=precision)
        for dtype in DTYPES:
            for op, size in (("MEAN", 3000 if dtype.kind != "i" else 100), ("SUM", 100)):
                values = replicas(dtype, size)
                expected = cd.reduce(values, op, options=options, weights=weights)
                own = share_of(group, values)
                for array in components(ops.reduce(op, own, own, options, weights=own_weights)):
                    assert array.dtype == expected.dtype
                    assert array.tobytes() == expected.tobytes(), (dtype, op, precision)
    rows = share_of(group, [cd.IndexedSlices(np.float32([k]), np.array([0]), (2,)) for k in range(8)])
    dense = cd.to_dense(components(ops.reduce("mean", rows, rows, weights=own_weights))[0])
    np.testing.assert_allclose(dense, [np.average(range(8), weights=weights), 0], rtol=1e-6)


def weights_are_those_of_all_ranks(group, form_another):
    ops = cd.CollectiveAllReduce(group=group)
    text = refusal(
        group, cd.errors.MismatchError, lambda: ops.reduce("mean", np.float32(1), "cpu:0", weights=[0])
    )
    assert "weights of a mean are all 0" in text
    weights = [group.rank]  # those of the first rank alone would be refused
    if group.size > 1:
        assert float(ops.reduce("mean", np.float32(1), "cpu:0", weights=weights)) == 1.0
        given = {} if group.rank else {"weights": [1]}
        text = refusal(
            group, cd.errors.MismatchError, lambda: ops.reduce("mean", np.ones(77), "cpu:0", **given)
        )
        assert "with weights" in text


def medians_are_those_of_one_process(group, form_another):
    ops = cd.CollectiveAllReduce(group=group)
    for dtype in (DTYPES[1], np.dtype("float32"), np.dtype("int64")):
        for op, size in (("median", 100), (cd.trimmed_mean(2), 3000)):
            values = replicas(dtype, size)
            expected = cd.reduce(values, op)
            own = share_of(group, values)
            for array in components(ops.reduce(op, own, own)):
                assert array.tobytes() == expected.tobytes(), (dtype, op)
    own = share_of(group, replicas(np.dtype("float32"), 5))
    text = refusal(group, cd.errors.MismatchError, lambda: ops.reduce("trimmed_mean(4)", own, own))
    assert "there are 8 replicas" in text


def results_may_have_another_dtype_and_integers_a_policy(group, form_another):
    ops, options = cd.CollectiveAllReduce(group=group), cd.CommunicationOptions(integers="max")
    for dtype, into, size in ((DTYPES[1], "float32", 4000), (np.dtype("float32"), "float16", 50)):
        values = replicas(dtype, size)
        expected, out = np.empty(size, into), np.empty(size, into)
        cd.reduce(values, "mean", out=expected)
        ops.reduce("mean", share_of(group, values), "cpu:0", out=out)
        np.testing.assert_allclose(out, expected, rtol=1e-7 if into == "float32" else 1e-3)
    models = [{"w": np.float32([number]), "steps": np.array(number)} for number in range(NUM_REPLICAS)]
    mean = ops.reduce("mean", share_of(group, models), "cpu:0", options)
    assert (mean["w"].tolist(), int(mean["steps"]), mean["steps"].dtype) == ([3.5], 7, np.int64)
    if group.size > 1:
        text = refusal(
            group,
            cd.errors.MismatchError,
            lambda: ops.reduce("mean", np.array([3, 3, 4]), "cpu:0", None if group.rank else options),
        )
        assert "integers by max" in text


def accurate_sums_are_wide_and_rounded_once(group, form_another):
    ops = cd.CollectiveAllReduce(group=group)
    for dtype, first, total in (
        (DTYPES[0], 2048, 2056),
        (DTYPES[1], 256, 264),
        (np.dtype("f4"), 2**24, 2**24 + 8),
    ):
        values = [np.full(7, first if number == 0 else 1, dtype) for number in range(NUM_REPLICAS)]
        own = share_of(group, values)
        for array in components(ops.reduce("sum", own, own)):
            assert array.tolist() == [float(dtype.type(total))] * 7


def every_precision_gives_all_ranks_the_same_bits(group, form_another):
    ops = cd.CollectiveAllReduce(group=group)
    for precision in ("fast", "accurate", "exact"):
        for dtype, op in cases():
            own = share_of(group, replicas(dtype, 700))
            options = cd.CommunicationOptions(precision=precision)
            found = {array.tobytes().hex() for array in components(ops.reduce(op, own, own, options))}
            assert len(found.union(everywhere(group, min(found)))) == 1, (precision, dtype, op)


def fast_sums_are_sums(group, form_another):
    ops, options = cd.CollectiveAllReduce(group=group), cd.CommunicationOptions(precision="fast")
    values = replicas(np.dtype("float32"), 50_000)
    own = share_of(group, values)
    for array in components(ops.reduce("mean", own, own, options)):
        np.testing.assert_allclose(array, np.mean(values, axis=0, dtype=np.float64), rtol=1e-3, atol=1e-3)


def batches_of_structures_come_back_in_place(group, form_another):
    ops = cd.CollectiveAllReduce(group=group)
    for bytes_per_pack in (0, 64, 1 << 20):
        options = cd.CommunicationOptions(bytes_per_pack=bytes_per_pack)
        trees = [
            {"w": np.full((3, 5), number, np.float32), "b": [np.int64(number), np.zeros((0, 2))]}
            for number in range(NUM_REPLICAS)
        ]
        own = share_of(group, trees)
        lone = share_of(group, [np.full(300, number, np.float16) for number in range(NUM_REPLICAS)])
        tree, flat = ops.batch_reduce("sum", [(own, own), (lone, "cpu:0")], options)
        for component in components(tree):
            assert component["w"].tolist() == [[28.0] * 5] * 3
            assert int(component["b"][0]) == 28
            assert component["b"][1].shape == (0, 2)
        assert flat.tolist() == [28.0] * 300
        into = share_of(group, replicas(np.dtype("f4"), 900))
        again = ops.reduce("max", into, into, options, out=into)
        assert all(a is b for a, b in zip(components(again), into.values, strict=True))
        assert into.values[0].tolist() == np.max(replicas(np.dtype("f4"), 900), axis=0).tolist()


def ranks_may_have_different_numbers_of_replicas(group, form_another):
    ops = cd.CollectiveAllReduce(group=group)
    own = [np.full(11, group.rank + 1, np.float32)] * (group.rank + 1)
    total = sum((rank + 1) ** 2 for rank in range(group.size))
    number = sum(rank + 1 for rank in range(group.size))
    assert ops.reduce("sum", cd.PerReplica(own), "cpu:0").tolist() == [total] * 11
    mean = ops.reduce("mean", cd.PerReplica(own), "cpu:0")
    assert mean.tolist() == [np.float32(np.float64(total) / number)] * 11
    lone = [np.ones(11, np.float32)] * (1 if group.rank else 3)
    assert ops.reduce("sum", cd.PerReplica(lone), "cpu:0").tolist() == [group.size + 2] * 11


def sparse_rows_come_in_the_order_of_replicas(group, form_another):
    ops = cd.CollectiveAllReduce(group=group)
    slices = [
        cd.IndexedSlices(np.full((number, 2), number, np.float32), np.arange(number), (9, 2))
        for number in range(NUM_REPLICAS)
    ]
    for op, divisor in (("sum", 1), ("mean", NUM_REPLICAS)):
        result = components(ops.reduce(op, share_of(group, slices), share_of(group, slices)))[0]
        expected = [number for number in range(NUM_REPLICAS) for _ in range(number)]
        assert np.asarray(result.values)[:, 0].tolist() == [number / divisor for number in expected]
        assert np.asarray(result.indices).tolist() == [row for n in range(NUM_REPLICAS) for row in range(n)]
        assert result.dense_shape == (9, 2)


def gathers_may_be_uneven(group, form_another):
    ops = cd.CollectiveAllReduce(group=group)
    pieces = [np.full((2, number, 3), number, np.int16) for number in range(NUM_REPLICAS)]
    own = share_of(group, pieces)
    for array in components(ops.gather(own, own, axis=1)):
        assert array.tolist() == np.concatenate(pieces, axis=1).tolist()


def broadcasts_may_come_from_any_rank(group, form_another):
    ops = cd.CollectiveAllReduce(group=group)
    for rank in range(group.size):
        mine = {"a": np.full((2, 3), group.rank, ml_dtypes.bfloat16), "b": np.bool_(group.rank == rank)}
        for component in ops.broadcast(mine, cd.PerReplica([0.0, 0.0]), from_rank=rank).values:
            assert component["a"].tolist() == [[float(rank)] * 3] * 2
            assert bool(component["b"])


def tensors_of_pytorch_come_back_as_such(group, form_another):
    if group.engine_name != "gloo":  # elsewhere importing it would take longer than all the rest
        return
    import torch

    ops = cd.CollectiveAllReduce(group=group)
    own = share_of(
        group, [torch.full((40, 3), number, dtype=torch.bfloat16) for number in range(NUM_REPLICAS)]
    )
    for tensor in components(ops.reduce("mean", own, own)):
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, torch.full((40, 3), 3.5, dtype=torch.bfloat16))
    made = group.empty_like({"w": torch.zeros(2, 3, dtype=torch.bfloat16), "n": torch.zeros(0)})
    made["w"][:] = group.rank
    assert (made["w"].dtype, made["w"].shape, made["n"].shape) == (torch.bfloat16, (2, 3), (0,))
    total = sum(range(group.size))
    assert ops.bind("sum", made, "cpu:0")()["w"].tolist() == [[float(total)] * 3] * 2


def bound_reductions_may_be_anywhere_in_memory(group, form_another):
    ops, size = cd.CollectiveAllReduce(group=group), 600_000
    values = replicas(np.dtype("float32"), size, number=group.size)
    expected = cd.ReductionToOneDevice().reduce("mean", cd.PerReplica(values), "cpu:0").tobytes()
    for owners in (range(group.size), range(1), ()):  # of arrays in memory of the group
        tree = {"lone": group.empty(size) if group.rank in owners else np.empty(size, np.float32)}
        bound = ops.bind("mean", tree, "cpu:0")
        for _ in range(2):
            tree["lone"][:] = values[group.rank]
            assert bound()["lone"].tobytes() == expected
        assert bound()["lone"] is bound()["lone"]
        in_place = ops.bind("mean", tree, "cpu:0", out=tree)
        assert in_place()["lone"] is tree["lone"]
        assert tree["lone"].tobytes() == expected


def backward_passes_are_calls_of_all_ranks(group, form_another):
    """The loss is the sum of those of all ranks: (k + 1) (s^2 + |g|^2) on rank k; rank 0 has two replicas."""
    if group.engine_name != "gloo":
        return
    import torch

    own = [torch.tensor([1.0 + group.rank]).requires_grad_() for _ in range(1 + (group.rank == 0))]
    ops, value = cd.CollectiveAllReduce(group=group), cd.PerReplica(own)
    total, gathered = ops.reduce("sum", value, "cpu:0"), ops.gather(value, "cpu:0")
    loss = (group.rank + 1) * (total.square().sum() + gathered.square().sum())
    first = torch.autograd.grad(loss, own, create_graph=True)
    numbers = range(1, group.size + 1)
    weights, everything = sum(numbers), 1.0 + sum(numbers)
    for gradient in first:
        assert gradient.tolist() == [2 * weights * (everything + group.rank + 1)]
    # Of sum(first), over all ranks, with respect to each: 2 weights (replicas + 1).
    for gradient in torch.autograd.grad(sum(first).sum(), own):
        assert gradient.tolist() == [2 * weights * (group.size + 1 + 1)]


def mismatches_are_named_on_every_rank(group, form_another):
    if group.size == 1:
        return
    ops, last = cd.CollectiveAllReduce(group=group), group.size - 1
    is_odd = group.rank == last
    shape = refusal(
        group,
        cd.errors.ShapeMismatchError,
        lambda: ops.reduce("sum", {"w": np.zeros(3 if is_odd else 4, np.float32)}, "cpu:0"),
    )
    assert f"rank {last} (" in shape
    assert "has shape (3,) at value['w']; " in shape
    dtype = refusal(
        group,
        cd.errors.DtypeMismatchError,
        lambda: ops.reduce("sum", np.zeros(4, np.int32 if is_odd else np.float32), "cpu:0"),
    )
    assert "has dtype int32; " in dtype
    refusal(
        group,
        cd.errors.StructureMismatchError,
        lambda: ops.reduce("sum", {"b" if is_odd else "w": np.zeros(4)}, "cpu:0"),
    )
    order = refusal(
        group,
        cd.errors.MismatchError,
        lambda: ops.gather(np.zeros(4), "cpu:0") if is_odd else ops.reduce("max", np.zeros(4), "cpu:0"),
    )
    assert "calls gather along axis 0; " in order
    assert ops.reduce("sum", np.ones(4), "cpu:0").tolist() == [group.size] * 4


def checks_can_be_always_on_or_off(group, form_another):
    for checks in ("always", "off"):
        group.checks = checks
        ops = cd.CollectiveAllReduce(group=group)
        for _ in range(3):
            assert ops.reduce("sum", np.ones(4), "cpu:0").tolist() == [group.size] * 4
    group.checks = "new"


REDUCTION_LAWS = {
    law.__name__: law
    for law in (
        exact_results_have_the_bits_of_one_process,
        exact_results_do_not_depend_on_the_order_of_ranks,
        accurate_results_of_one_replica_each_have_the_bits_of_one_process,
        accurate_sums_are_wide_and_rounded_once,
        weighted_results_have_the_bits_of_one_process,
        weights_are_those_of_all_ranks,
        medians_are_those_of_one_process,
        results_may_have_another_dtype_and_integers_a_policy,
        every_precision_gives_all_ranks_the_same_bits,
        fast_sums_are_sums,
        batches_of_structures_come_back_in_place,
        ranks_may_have_different_numbers_of_replicas,
        sparse_rows_come_in_the_order_of_replicas,
        gathers_may_be_uneven,
        broadcasts_may_come_from_any_rank,
        tensors_of_pytorch_come_back_as_such,
        backward_passes_are_calls_of_all_ranks,
        bound_reductions_may_be_anywhere_in_memory,
        mismatches_are_named_on_every_rank,
        checks_can_be_always_on_or_off,
    )
}
