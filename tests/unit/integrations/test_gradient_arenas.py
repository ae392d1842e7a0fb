"""Gradients in flat memory, reduced in buckets during the backward pass: the same bits, less to do."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref

import pytest
import torch

import crossdevice as cd
from crossdevice.errors import ContextError, ConversionError, OptionError
from crossdevice.integrations.torch import MirroredModule
from crossdevice.process_groups.engines.thread_engine import run_ranks


class Network(torch.nn.Module):
    """Two dtypes, a parameter in channels_last, an expert that only some replicas use, one that none uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = torch.nn.Conv2d(2, 3, 3, padding=1).to(memory_format=torch.channels_last)
        self.wide = torch.nn.Linear(12, 4).double()
        self.expert = torch.nn.Linear(4, 4).double()
        self.unused = torch.nn.Linear(4, 4)

    def forward(self, x, uses_expert):
        hidden = self.wide(self.conv(x).flatten(1).double())
        return (self.expert(hidden) if uses_expert else hidden).square().sum()


NETWORK = Network()


def batches(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return cd.PerReplica([torch.randn(2, 2, 2, 2, generator=generator) for _ in range(count)])


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01, foreach=True)


def trained(set_to_none=False, accumulated=1, steps=3, count=2, strategy=None, make=adam, **settings):
    """The parameters after some steps, and the model."""
    strategy = strategy or cd.MirroredStrategy([f"cpu:{k}" for k in range(count)])
    model = MirroredModule(copy.deepcopy(NETWORK), strategy, **settings)
    optimizers = model.optimizers(make)

    def step(parts, optimizer):
        replica = cd.get_replica_context().replica_id_in_sync_group
        for number, part in enumerate(parts):
            with model.no_sync() if number < accumulated - 1 else contextlib.nullcontext():
                model(part, uses_expert=replica > 0).backward()
                model.reduce_gradients("mean")
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)

    for number in range(steps):
        parts = [batches(count, accumulated * number + k) for k in range(accumulated)]
        strategy.run(step, (parts, optimizers))
    model.check_in_step()
    return [parameter.detach().clone() for parameter in model.replicas[0].parameters()], model


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_bits_depend_neither_on_arenas_nor_on_buckets(set_to_none, accumulated):
    expected, _ = trained(set_to_none, accumulated)
    for settings in (
        {"arenas": True},
        {"overlap": "mean"},
        {"overlap": "mean", "bucket_bytes": 1},
        {"overlap": "mean", "bucket_bytes": 200},
    ):
        found, _ = trained(set_to_none, accumulated, **settings)
        assert all(map(torch.equal, found, expected)), settings


def test_optimizers_that_are_fused_work_on_views():
    settings = {"make": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True)}
    expected, _ = trained(**settings)
    found, _ = trained(arenas=True, **settings)
    assert all(map(torch.equal, found, expected))


def test_gradients_are_views_of_one_tensor_per_dtype_and_stay_so():
    _, model = trained(arenas=True)
    for replica, arena in zip(model.replicas, model._arenas.arenas, strict=True):
        assert set(arena.flats) == {torch.float32, torch.float64}
        for name, parameter in replica.named_parameters():
            if not name.startswith("unused"):
                assert parameter.grad.untyped_storage().data_ptr() == (
                    arena.flats[parameter.dtype].untyped_storage().data_ptr()
                ), name
        assert replica.conv.weight.grad.stride() == replica.conv.weight.stride()


def test_gradients_that_were_set_to_none_are_copied_back_and_unused_ones_stay_none():
    def step(part):
        model.current().zero_grad(set_to_none=True)
        model(part, uses_expert=False).backward()
        model.reduce_gradients("mean")

    _, model = trained(arenas=True)
    model.strategy.run(step, (batches(2, 9),))
    for replica, arena in zip(model.replicas, model._arenas.arenas, strict=True):
        assert replica.expert.weight.grad is None
        assert replica.wide.weight.grad is arena.views["wide.weight"]


def test_a_second_backward_pass_without_no_sync_is_refused():
    def step(part):
        for _ in range(2):
            model(part, uses_expert=True).backward()

    _, model = trained(overlap="mean")
    with pytest.raises(ContextError, match=r"second gradient of .* before reduce_gradients.*no_sync\(\)"):
        model.strategy.run(step, (batches(2, 0),))
    model.zero_grad()

    def right(part):
        model(part, uses_expert=True).backward()
        model.reduce_gradients("mean")

    model.strategy.run(right, (batches(2, 0),))


def test_what_comes_too_late_is_refused():
    _, model = trained(overlap="mean")
    for args, message in (
        (("sum",), r"reduce_gradients\(SUM\) of a MirroredModule with overlap='MEAN'"),
        (("mean", cd.CommunicationOptions(precision="exact")), "was given options, and with overlap='MEAN'"),
    ):
        with pytest.raises(OptionError, match=message):
            model.strategy.run(lambda args=args: model.reduce_gradients(*args))
    with pytest.raises(OptionError, match="bucket_bytes must be 1 or more, got 0"):
        trained(overlap="mean", bucket_bytes=0)


def test_options_are_passed_on_to_arenas():
    _, model = trained(arenas=True)

    def step(value):
        model.current().wide.bias.grad = torch.full((4,), value, dtype=torch.float64)
        model.reduce_gradients("sum", cd.CommunicationOptions(precision="exact"))
        return model.current().wide.bias.grad[0].item()

    assert model.strategy.run(step, (cd.PerReplica([1e16, 1.0]),)).values == (1e16, 1e16)


@pytest.mark.parametrize("settings", [{"arenas": True}, {"overlap": "mean", "bucket_bytes": 100}], ids=str)
def test_parameters_may_change_between_steps(settings):
    results = []
    for own in ({}, settings):
        _, model = trained(**own)
        for replica in model.replicas:
            replica.wide.requires_grad_(False)
        model.head = torch.nn.Linear(2, 1)
        with torch.no_grad():
            for parameter in model.head.parameters():
                parameter.fill_(1)
        model.load_state_dict(model.state_dict())

        def step(part, model=model):
            model.current().zero_grad()
            (model(part, uses_expert=True) + model.head(part).sum()).backward()
            model.reduce_gradients("mean")

        model.strategy.run(step, (batches(2, 5),))
        results.append({name: p.grad for name, p in model.replicas[1].named_parameters()})
    assert results[0].keys() == results[1].keys()
    for name, gradient in results[0].items():
        if gradient is None or name.startswith("wide"):
            continue
        assert torch.equal(gradient, results[1][name]), name


def test_gradients_with_a_graph_are_refused_by_name():
    _, model = trained(arenas=True)

    def step(part):
        model.current().zero_grad()
        model(part, uses_expert=True).backward(create_graph=True)
        model.reduce_gradients("mean")

    with (
        pytest.warns(UserWarning, match="create_graph=True"),
        pytest.raises(ConversionError, match=r"the gradient of .* is part of a graph"),
    ):
        model.strategy.run(step, (batches(2, 5),))


def test_several_processes_have_arenas_too():
    def program(group, **settings):
        strategy = cd.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"], group=group)
        return [parameter.tolist() for parameter in trained(strategy=strategy, **settings)[0]]

    expected = run_ranks(2, program)
    for settings in ({"arenas": True}, {"overlap": "mean", "bucket_bytes": 100}):
        assert run_ranks(2, lambda group, own=settings: program(group, **own)) == expected


def test_gradients_that_a_function_made_sparse_are_dense_in_the_arena():
    class Table(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(torch.ones(3, 2))

        def forward(self, ids):
            return torch.nn.functional.embedding(ids, self.table, sparse=True)

    strategy = cd.MirroredStrategy(["cpu:0", "cpu:1"])
    for options in ({"arenas": True}, {"overlap": "sum"}):
        model = MirroredModule(Table(), strategy, **options)

        def step(ids, model=model):
            model(ids).sum().backward()
            model.reduce_gradients("sum")

        strategy.run(step, args=(cd.PerReplica([torch.tensor([0, 0]), torch.tensor([2])]),))
        assert model.table.grad.tolist() == [[2, 2], [0, 0], [1, 1]]


@pytest.mark.parametrize("options", [{}, {"arenas": True}, {"overlap": "sum"}], ids=str)
def test_a_module_that_is_not_used_any_more_is_freed(options):
    strategy = cd.MirroredStrategy(["cpu:0", "cpu:1"])
    model = MirroredModule(torch.nn.Linear(2, 1), strategy, **options)

    def step(model=model):
        model(torch.ones(1, 2)).sum().backward()
        model.reduce_gradients("sum")

    strategy.run(step)
    copies = [weakref.ref(replica) for replica in model.replicas]
    del model, step
    gc.collect()
    assert [copy() for copy in copies] == [None, None]
