"""Reductions, gathers and broadcasts of tensors that require a gradient are differentiated."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import crossdevice as cd
from crossdevice.errors import ConversionError, LibraryMismatchError, OutError, ShapeMismatchError
from crossdevice.process_groups.engines.thread_engine import run_ranks
from crossdevice.values.distributed import components_of

torch = pytest.importorskip("torch")

PLACES = ["cpu:0", "cpu:1", "cpu:2"]
"""More than the replicas of the cases below: the number of results is not that of values."""


class Numbered(cd.DirectAllReduce):
    """Overrides what sums are, so nobody knows its derivative."""

    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        return super().reduce_implementation(reduce_op, per_replica_value, destinations, options)


def tensors(count=2, shape=(2, 3), dtype=torch.float64):
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for _ in range(count)]


def placed(values, devices=None):
    return cd.PerReplica(values, devices)


def batch(*values):
    first, second = placed(values[:2]), placed(values[2:])
    one, other = cd.RingAllReduce().batch_reduce("mean", [(first, first), (second, "cpu:1")])
    return *one.values, other


def tree(*values):
    summed = cd.all_reduce([{"a": value, "b": [value * 2]} for value in values], "mean")
    return [leaf for own in summed for leaf in (own["a"], own["b"][0])]


def by_axis(*values):
    strategy = cd.MirroredStrategy(["cpu:0", "cpu:1"])
    return strategy.reduce("mean", placed(values), axis=0)


CALLS = {
    "all_reduce": lambda *values: cd.all_reduce(values),
    "all_reduce mean": lambda *values: cd.all_reduce(values, "mean"),
    "reduce": lambda *values: cd.reduce(values),
    "reduce mean": lambda *values: cd.reduce(values, "mean"),
    "reduce to others": lambda *values: cd.reduce(values, "mean", PLACES),
    "broadcast": lambda value, _: cd.broadcast(value, PLACES),
    "broadcast a sum": lambda *values: cd.broadcast(cd.reduce(values), PLACES),
    "gather": lambda *values: cd.gather(values),
    "gather along axis 1": lambda *values: cd.gather(values, PLACES, axis=1),
    "gather along the last axis": lambda *values: cd.gather(values, PLACES, axis=-1),
    "all_gather": lambda *values: cd.all_gather(values, axis=1),
    "reduce_scatter": lambda *values: cd.reduce_scatter(values, axis=1),
    "reduce_scatter mean": lambda *values: cd.reduce_scatter(values, "mean", sizes=[0, 2]),
    "all_to_all": lambda *values: cd.all_to_all(values, axis=1),
    "all_to_all of uneven parts": lambda *values: cd.all_to_all(values, sizes=[[2, 0], [1, 1]]),
    "batch_reduce": lambda *values: batch(*values, values[0] * 2, values[1].sin()),
    "structures": tree,
    "strategy.reduce": lambda *v: cd.MirroredStrategy(["cpu:0", "cpu:1"]).reduce("sum", placed(v), axis=None),
    "strategy.reduce along an axis": by_axis,
    "step by step": lambda *values: cd.all_reduce(
        values, algorithm="ring", options=cd.CommunicationOptions(lowering="off")
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_gradients_are_those_of_finite_differences(call):
    def squared(*values):  # so that second derivatives are not zero
        results = CALLS[call](*values)
        return [result * result for result in (results if isinstance(results, (list, tuple)) else [results])]

    values = tensors()
    assert torch.autograd.gradcheck(squared, values)
    assert torch.autograd.gradgradcheck(squared, values)


def test_arrays_of_different_lengths_are_gathered_with_their_own_gradients():
    values = [torch.ones(length, 2, dtype=torch.float64, requires_grad=True) for length in (1, 0, 3)]
    assert torch.autograd.gradcheck(lambda *parts: cd.gather(parts, PLACES), values)


def test_mistakes_are_found_as_without_a_gradient():
    for axis in (2, -3):
        with pytest.raises(ConversionError, match=rf"axis {axis} is out of range for 2 dimensions"):
            cd.gather(tensors(), axis=axis)
    with pytest.raises(ShapeMismatchError, match=r"replica 1 \(cpu:1\) has shape \(3,\)"):
        cd.reduce([tensors(1, (2,))[0], tensors(1, (3,))[0]])
    with pytest.raises(LibraryMismatchError, match="has an array of numpy"):
        cd.reduce([tensors(1)[0], np.ones((2, 3))])


def test_complex_numbers_have_gradients():
    values = tensors(dtype=torch.complex128)
    assert torch.autograd.gradcheck(lambda *parts: cd.all_reduce(parts, "mean"), values)


def test_results_are_the_same_bits_with_and_without_a_gradient():
    values = tensors(3, dtype=torch.float32)
    for call in CALLS.values():
        with torch.no_grad():
            plain = call(*values[:2])
        recorded = call(*values[:2])
        as_list = isinstance(plain, (list, tuple))
        for left, right in zip(*([plain, recorded] if as_list else [[plain], [recorded]]), strict=True):
            assert right.requires_grad
            assert torch.equal(left, right.detach())


def test_the_gradient_of_a_sum_is_the_sum_of_the_gradients():
    values = tensors(3)
    results = cd.all_reduce(values)
    weights = [1.0, 10.0, 100.0]
    sum((weight * result).sum() for weight, result in zip(weights, results, strict=True)).backward()
    for value in values:
        assert torch.equal(value.grad, torch.full((2, 3), 111.0, dtype=torch.float64))


def test_a_replica_without_a_gradient_is_only_added():
    value, constant = tensors(1)[0], torch.ones(2, 3, dtype=torch.float64)
    total, _ = cd.all_reduce([value, constant])
    total.sum().backward()
    assert torch.equal(value.grad, torch.ones_like(value))


def test_what_is_not_recorded_in_a_structure_is_passed_on():
    value = tensors(1)[0]
    trees = [{"x": value, "n": torch.tensor([1, 2]), "y": torch.ones(2)} for _ in range(2)]
    result = cd.reduce(trees)
    assert (result["n"].tolist(), result["y"].tolist()) == ([2, 4], [2.0, 2.0])
    assert (result["x"].requires_grad, result["y"].requires_grad) == (True, False)


def contrastive(embeddings, everything, first):
    """Each embedding is to be most similar to the next one of the whole batch."""
    count = len(everything)
    targets = (torch.arange(first, first + len(embeddings)) + 1) % count
    return torch.nn.functional.cross_entropy(embeddings @ everything.T, targets, reduction="sum") / count


@pytest.mark.parametrize("count", [2, 3])
def test_a_contrastive_loss_over_gathered_embeddings_has_the_gradient_of_the_plain_one(count):
    torch.manual_seed(0)
    module, x = torch.nn.Linear(5, 4).double(), torch.randn(2 * count, 5, dtype=torch.float64)
    expected = torch.autograd.grad(contrastive(module(x), module(x), 0), list(module.parameters()))
    parts = [module(part) for part in x.chunk(count)]
    copies = cd.broadcast(cd.gather(parts), [f"cpu:{k}" for k in range(count)])
    losses = [contrastive(*pair, 2 * k) for k, pair in enumerate(zip(parts, copies, strict=True))]
    found = torch.autograd.grad(cd.reduce(losses), list(module.parameters()))
    torch.testing.assert_close(found, expected)


def test_calls_that_are_not_differentiated_say_so():
    value = placed([weight * 2 for weight in tensors()])
    slices = [cd.IndexedSlices(v, torch.tensor([0, 1]), (2, 3)) for v in value.values]
    for call in (
        lambda: cd.reduce(value, "max"),
        lambda: cd.reduce(value, weights=[1, 2]),
        lambda: Numbered().reduce("sum", value, "cpu:0"),
        lambda: cd.ReductionToOneDevice(accumulation_fn=sum).reduce("sum", value, "cpu:0"),
        lambda: cd.bind(value),
        lambda: cd.reduce(slices),
        lambda: cd.reduce([v.to_sparse(1) for v in value.values]),
        lambda: cd.MirroredStrategy(["cpu:0", "cpu:1"]).reduce(
            "sum", placed([v.to(torch.bfloat16) for v in value.values]), axis=0
        ),
    ):
        with pytest.warns(UserWarning, match="requires a gradient was handed to a call"):
            call()
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("error")
            call()


def test_memory_to_write_to_is_refused():
    values, plain = tensors(), [torch.ones(2, 3, dtype=torch.float64) for _ in range(2)]
    for op in ("sum", "max"):
        with pytest.raises(OutError, match="out was given for a value that requires a gradient"):
            cd.all_reduce(values, op, out=values)
    with pytest.raises(OutError, match=r"a value at value\['w'\] that requires a gradient"):
        cd.reduce([{"w": value} for value in values], out={"w": plain[0]})
    with pytest.raises(OutError, match="out was given for a value that requires a gradient"):
        cd.DirectAllReduce().broadcast(values[0], "cpu:0", out=plain[0])
    for _ in range(2):
        with pytest.raises(OutError, match=r"out\[0\] \(cpu:0\) requires a gradient"):
            cd.all_reduce(plain, out=values)
    with torch.no_grad():
        cd.all_reduce(plain, out=values)


def test_gradients_that_are_sparse_or_expanded_are_reduced():
    table, index = tensors(2, (4, 2)), torch.tensor([1, 1, 3])
    copies = cd.all_reduce(table)
    torch.nn.functional.embedding(index, copies[0], sparse=True).sum().backward()
    for own in table:
        assert own.grad.tolist() == [[0, 0], [2, 2], [0, 0], [1, 1]]


def inputs_of(rank):
    """The replicas of one rank, one more than the rank before has: what to add, what to gather."""
    numbers = range(rank + 1)
    return (
        [torch.tensor([1.0 + rank, k], dtype=torch.float64).requires_grad_() for k in numbers],
        [torch.full((k + 1, 2), 2.0 + rank, dtype=torch.float64).requires_grad_() for k in numbers],
    )


def loss_of(rank, total, means, gathered, copies):
    cubes = [tensor.pow(3).sum() for tensor in (total, *means, gathered)]
    return (rank + 1) * sum(cubes) + sum(copy.sin().sum() for copy in copies)


def gradients_of(loss, tensors):
    """First ones, and those of the sum of their squares."""
    first = torch.autograd.grad(loss, tensors, create_graph=True)
    second = torch.autograd.grad(sum(gradient.square().sum() for gradient in first), tensors)
    return [gradient.tolist() for gradient in (*first, *second)]


def program_of_rank(group):
    added, joined = inputs_of(group.rank)
    ops, value = cd.CollectiveAllReduce(group=group), cd.PerReplica(added)
    means = ops.reduce("mean", value, value)
    shards = ops.reduce_scatter("mean", value, sizes=[0, 1, 1])
    loss = loss_of(
        group.rank,
        ops.reduce("sum", value, "cpu:0"),
        components_of(means),
        ops.gather(cd.PerReplica(joined), "cpu:0"),
        ops.broadcast(added[0], cd.PerReplica([0, 0])).values,
    )
    loss = loss + sum((shard**4).sum() for shard in components_of(shards))
    return gradients_of(loss, [*added, *joined])


def test_between_processes_gradients_are_those_of_the_sum_of_all_losses():
    inputs = [inputs_of(rank) for rank in range(2)]
    everything = [tensor for own in inputs for tensor in own[0]]
    mean = sum(everything) / len(everything)
    gathered = torch.cat([tensor for own in inputs for tensor in own[1]])
    losses = [
        loss_of(rank, sum(everything), [mean] * len(added), gathered, [added[0]] * 2)
        for rank, (added, _) in enumerate(inputs)
    ]
    losses.append((mean**4).sum())
    flat = [tensor for own in inputs for tensors in own for tensor in tensors]
    first_and_second = gradients_of(sum(losses), flat)
    found = run_ranks(2, program_of_rank)
    halves = [(len(own) // 2, own) for own in found]
    for part in (0, 1):
        expected = first_and_second[part * len(flat) : (part + 1) * len(flat)]
        own = [gradient for half, both in halves for gradient in both[part * half : (part + 1) * half]]
        for left, right in zip(own, expected, strict=True):
            torch.testing.assert_close(torch.tensor(left), torch.tensor(right))


def test_between_processes_the_backward_pass_of_an_all_gather_sums_the_own_slice_only():
    def program(group):
        ops = cd.CollectiveAllReduce(group=group)
        own = [torch.full((k + group.rank, 2), 3.0, dtype=torch.float64).requires_grad_() for k in range(2)]
        whole = ops.all_gather(cd.PerReplica(own))

        def refused(*_, **__):
            raise AssertionError("slices of others are summed here")

        ops.batch_reduce = refused
        loss = (group.rank + 1) * sum(copy.square().sum() for copy in whole.values)
        (first, second) = torch.autograd.grad(loss, own, create_graph=True)
        again = torch.autograd.grad(first.square().sum() + second.square().sum(), own)
        return [gradient.unique().tolist() for gradient in (first, second, *again)]

    # Six copies are squared: two with each of the weights 1, 2 and 3.
    slope = 2 * (1 + 2 + 3) * 2 * 3.0
    empty, full = [], [slope]
    found = run_ranks(3, program)
    assert [each[:2] for each in found] == [[empty, full], [full, full], [full, full]]
    assert [len(each[2]) for each in found] == [0, 1, 1]
