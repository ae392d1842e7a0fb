"""Gradients through the calls in which replicas meet: each replica runs its own backward pass."""

from __future__ import annotations

import pytest

import crossdevice as cd
from crossdevice.errors import ContextError, MismatchError, ReplicaError
from crossdevice.integrations.torch import DataParallel, MirroredModule
from crossdevice.process_groups.engines.thread_engine import run_ranks

torch = pytest.importorskip("torch")


def strategy_of(count):
    return cd.MirroredStrategy([f"cpu:{k}" for k in range(count)])


def number():
    return cd.get_replica_context().replica_id_in_sync_group


def input_of(replica):
    return torch.tensor([1.0 + replica, 2.0], dtype=torch.float64).requires_grad_()


def product_of_sums(strategy, x, y):
    """Not linear, so second derivatives go through what replicas brought."""
    total = strategy.extended.reduce_to("sum", x, x)
    mean = strategy.extended.batch_reduce_to("mean", [(y, y)])[0]
    return cd.PerReplica([left * right for left, right in zip(total.values, mean.values, strict=True)])


CALLS = {
    "all_reduce": (
        lambda context, x: context.all_reduce("sum", x),
        lambda xs: [sum(xs)] * len(xs),
    ),
    "all_reduce of a structure": (
        lambda context, x: sum(context.all_reduce("mean", {"a": x, "b": [x * x, torch.ones(2)]})["b"]),
        lambda xs: [sum(x * x for x in xs) / len(xs) + 1] * len(xs),
    ),
    "all_gather": (
        lambda context, x: context.all_gather(x[None] * (1.0 + number()), axis=0),
        lambda xs: [torch.stack([x * (1.0 + k) for k, x in enumerate(xs)])] * len(xs),
    ),
    "reduce_scatter": (
        lambda context, x: context.reduce_scatter("sum", torch.cat([x] * context.num_replicas_in_sync)),
        lambda xs: [sum(xs)] * len(xs),
    ),
    "all_to_all": (
        lambda context, x: context.all_to_all(torch.cat([x.sin()] * context.num_replicas_in_sync)),
        lambda xs: [torch.cat([x.sin() for x in xs])] * len(xs),
    ),
    "merge_call": (
        lambda context, x: context.merge_call(product_of_sums, (x, x.sin())),
        lambda xs: [sum(xs) * sum(x.sin() for x in xs) / len(xs)] * len(xs),
    ),
    "a call after another": (
        lambda context, x: context.all_reduce("mean", context.all_reduce("sum", x).sin() * x),
        lambda xs: [sum(sum(xs).sin() * x for x in xs) / len(xs)] * len(xs),
    ),
}


def loss_of(replica, result):
    return ((replica + 1) * result.pow(3)).sum()


def gradients_of(loss, tensors):
    first = torch.autograd.grad(loss, tensors, create_graph=True)
    return first, torch.autograd.grad(sum(gradient.square().sum() for gradient in first), tensors)


def expected_gradients(call, count):
    xs = [input_of(replica) for replica in range(count)]
    losses = [loss_of(replica, result) for replica, result in enumerate(CALLS[call][1](xs))]
    return gradients_of(sum(losses), xs)


def step(call):
    context, x = cd.get_replica_context(), input_of(number())
    (first,), (second,) = gradients_of(loss_of(number(), CALLS[call][0](context, x)), [x])
    return first.detach(), second


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("call", CALLS)
def test_each_replica_gets_its_gradient_of_the_sum_of_all_losses(call, count):
    first, second = strategy_of(count).run(step, (call,))
    expected_first, expected_second = expected_gradients(call, count)
    torch.testing.assert_close(first.values, tuple(expected_first))
    torch.testing.assert_close(second.values, expected_second)


@pytest.mark.parametrize("call", [call for call in CALLS if call != "all_to_all"])
def test_so_do_the_replicas_of_several_processes(call):
    def program(group):
        strategy = cd.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"], group=group)
        return [each.values for each in strategy.run(step, (call,))]

    for found, expected in zip(
        zip(*run_ranks(2, program), strict=True), expected_gradients(call, 4), strict=True
    ):
        torch.testing.assert_close(found[0] + found[1], tuple(expected))


def test_a_replica_that_brought_nothing_recorded_still_takes_part():
    def step():
        x = input_of(number())
        total = cd.get_replica_context().all_reduce("sum", x if number() else x.detach())
        total.sum().backward()
        return x.grad

    none, ones = strategy_of(2).run(step).values
    assert none is None
    assert ones.tolist() == [2.0, 2.0]


def test_without_grad_mode_nothing_is_recorded():
    def step():
        with torch.no_grad():
            return cd.get_replica_context().all_reduce("sum", input_of(number())).requires_grad

    assert strategy_of(2).run(step).values == (False, False)


def test_replicas_in_different_grad_modes_are_told_so():
    def step():
        with torch.set_grad_enabled(number() > 0):
            cd.get_replica_context().all_reduce("sum", input_of(number()))

    with pytest.raises(MismatchError, match=r"replica 0 .*all_reduce\(SUM, no_grad\)"):
        strategy_of(3).run(step)


def test_a_replica_that_leaves_out_the_backward_pass_is_named():
    def step():
        total = cd.get_replica_context().all_reduce("sum", input_of(number()))
        if number() == 0:
            total.sum().backward()

    with pytest.raises(ReplicaError, match=r"gradient of all_reduce\(SUM\): replica 0 .*returned: replica 1"):
        strategy_of(2).run(step)


def test_a_backward_pass_after_the_run_is_refused():
    results = strategy_of(2).run(lambda: cd.get_replica_context().all_reduce("sum", input_of(number())))
    with pytest.raises(ContextError, match="call backward\\(\\) there, in every replica"):
        sum(result.sum() for result in results.values).backward()


def test_an_error_in_one_backward_pass_ends_those_of_others():
    def step():
        total = cd.get_replica_context().all_reduce("sum", input_of(number()))
        if number():
            total.register_hook(lambda gradient: 1 / 0)
        total.sum().backward()

    with pytest.raises(ZeroDivisionError) as caught:
        strategy_of(2).run(step)
    assert "raised by replica 1" in "".join(caught.value.__notes__)


def test_a_merge_function_gets_parameters_themselves():
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    seen = []

    def merge(strategy, value):
        seen.extend(value.values)

    strategy_of(2).run(lambda: cd.get_replica_context().merge_call(merge, (parameters[number()],)))
    assert all(map(lambda left, right: left is right, seen, parameters))


def contrastive(embeddings, everything, first):
    count = len(everything)
    targets = (torch.arange(first, first + len(embeddings)) + 1) % count
    return torch.nn.functional.cross_entropy(embeddings @ everything.T, targets, reduction="sum") / count


class Contrastive(torch.nn.Module):
    """Compares its share with the shares of all replicas."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(5, 4).double()

    def forward(self, x):
        own, context = self.inner(x), cd.get_replica_context()
        everything = context.all_gather(own, axis=0)
        return contrastive(own, everything, context.replica_id_in_sync_group * len(own))[None]


@pytest.mark.parametrize("count", [2, 3])
def test_a_contrastive_loss_in_replicas_has_the_gradient_of_the_plain_one(count):
    torch.manual_seed(0)
    module, x = Contrastive(), torch.randn(2 * count, 5, dtype=torch.float64)
    plain = module.inner(x)
    expected = torch.autograd.grad(contrastive(plain, plain, 0), list(module.parameters()))

    model = MirroredModule(module, strategy_of(count))

    def step(share):
        model(share).sum().backward()
        model.reduce_gradients("sum")

    model.strategy.run(step, (cd.PerReplica(x.chunk(count)),))
    for replica in model.replicas:
        torch.testing.assert_close([p.grad for p in replica.parameters()], list(expected))

    module.zero_grad()
    DataParallel(module, devices=[f"cpu:{k}" for k in range(count)])(x).sum().backward()
    torch.testing.assert_close([p.grad for p in module.parameters()], list(expected))


def test_variables_keep_values_not_graphs():
    strategy = strategy_of(2)
    variable = strategy.create_variable(torch.zeros(2, dtype=torch.float64), aggregation="sum")
    strategy.run(lambda: variable.assign_add(input_of(number())))
    assert not any(copy.value().requires_grad for copy in variable.values)
