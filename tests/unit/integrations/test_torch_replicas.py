"""What replicas of DataParallel hold: parameters, gradients, random numbers and buffers."""

import copy
import functools
import hashlib

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import crossdevice as cd
from crossdevice.errors import OptionError
from crossdevice.integrations.torch import DataParallel, mirroring
from unit.integrations.small_networks import THREE, TWO, assert_same_gradients, batch, gradients, network, sgd

# -------------------------------------------------------------------- parameters in replicas


class Penalized(torch.nn.Module):
    """Its result depends on all of its parameters, found in three ways."""

    def __init__(self):
        super().__init__()
        self.net = network()
        self.scales = torch.nn.ParameterList([torch.ones(3), torch.ones(3)])
        self.kept = [self.net[0].weight, (self.net, {"scale": self.scales[0]})]

    def forward(self, x):
        penalty = sum(p.square().sum() for p in self.parameters())
        assert len(dict(self.named_parameters())) == 6
        weight, (net, named) = self.kept
        assert next(self.parameters()).dtype == x.dtype
        return net(x) * named["scale"] * self.scales[1] + penalty / 100 + weight.sum()


@pytest.mark.parametrize("devices", [TWO, THREE])
def test_replicas_have_parameters_whose_gradients_count(devices):
    torch.manual_seed(0)
    assert_same_gradients(Penalized(), batch(5)[0], devices=devices)


def test_gradients_of_gradients_are_those_of_one_device():
    def second(model):
        x = batch(5)[0].double()
        first = torch.autograd.grad(model(x).square().sum(), list(model.parameters()), create_graph=True)
        model.zero_grad()
        sum(gradient.square().sum() for gradient in first).backward()
        return [p.grad for p in model.parameters()]

    plain = network().double()
    for ops in (None, cd.ReductionToOneDevice(accumulation_fn=sum)):
        ours = DataParallel(copy.deepcopy(plain), THREE, ops)
        plain.zero_grad()
        torch.testing.assert_close(second(ours), second(plain))


class Adapted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.base = torch.nn.Linear(6, 64).requires_grad_(False)
        self.adapter = torch.nn.Linear(64, 2)
        self.seen = []

    def forward(self, x):
        self.seen.append([p.requires_grad for p in self.parameters()])
        return self.adapter(self.base(x).relu())


def test_frozen_parameters_are_neither_differentiated_nor_reduced(monkeypatch):
    module = Adapted()
    model = DataParallel(module, TWO)
    reduced = []
    ops = model.strategy.extended.cross_device_ops
    plain = type(ops).batch_reduce

    def counting(self, op, pairs, *args, **kwargs):
        reduced.extend(value.values[0].shape for value, _ in pairs)
        return plain(self, op, pairs, *args, **kwargs)

    monkeypatch.setattr(type(ops), "batch_reduce", counting)
    model(batch(4)[0]).sum().backward()
    assert module.seen == [[False, False, True, True]] * 2
    assert sorted(map(tuple, reduced)) == [(2,), (2, 64)]
    assert module.base.weight.grad is None


class Addresses(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
        self.seen = []

    def forward(self, x):
        self.seen.append((self.weight.data_ptr(), self.frozen.data_ptr()))
        return x * self.weight * self.frozen


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_replicas_of_one_memory_use_the_same_parameters(mode):
    module = Addresses()
    with mode():
        DataParallel(module, THREE)(torch.ones(3, 3))
    assert module.seen == [(module.weight.data_ptr(), module.frozen.data_ptr())] * 3


def test_each_replica_has_gradients_of_its_own_that_are_added_in_replica_order():
    """In any other order, or one after another in single precision, the sum would be 0 or 2**-30."""
    model = DataParallel(torch.nn.Linear(1, 1, bias=False), THREE)
    model(torch.tensor([[2.0**30], [2.0**-20], [-(2.0**30)]])).sum().backward()
    assert model.module.weight.grad.item() == 2.0**-20


def test_copies_are_made_again_only_of_what_changed():
    kept, tensor = mirroring.KeptCopies(), torch.nn.Parameter(torch.ones(3))
    device = torch.device("cpu")
    assert kept.on(tensor, device) is tensor
    with torch.inference_mode():
        first = kept.copy_for(1, tensor, device)
    assert not first.is_inference()
    assert kept.copy_for(1, tensor, device) is first
    assert kept.copy_for(2, tensor, device) is not first
    with torch.no_grad():
        tensor.add_(1)
    assert kept.copy_for(1, tensor, device).tolist() == [2, 2, 2]
    kept.copy_for(1, tensor, device).zero_()
    assert kept.copy_for(1, tensor, device).tolist() == [2, 2, 2]
    tensor.data = torch.full((3,), 7.0)
    assert kept.copy_for(1, tensor, device).tolist() == [7, 7, 7]
    second = kept.copy_for(1, tensor, device)
    kept.forget([tensor])
    assert kept.copy_for(1, tensor, device) is not second


@pytest.mark.parametrize("is_trained", [True, False])
def test_what_is_written_through_data_before_evaluation_is_seen_by_all_replicas(monkeypatch, is_trained):
    monkeypatch.setattr(
        mirroring.KeptCopies, "on", lambda self, tensor, device: self.copy_for(0, tensor, device)
    )
    model = DataParallel(torch.nn.Linear(1, 1, bias=False), TWO)
    model.requires_grad_(is_trained)
    x = torch.ones(2, 1)
    for value in (3.0, 4.0):
        model.train()
        model(x)
        model.module.weight.data.fill_(value)
        model.eval()
        with torch.no_grad():
            assert model(x).tolist() == [[value], [value]]


@pytest.mark.parametrize("ids", [[[0, 3], [3, 1]], [[0, 0], [0, 0]]])
def test_sparse_gradients_are_summed_as_sparse_ones(ids):
    def embedding():
        torch.manual_seed(0)
        return torch.nn.Embedding(5, 3, sparse=True)

    expected = gradients(embedding(), torch.tensor(ids))["weight"]
    found = gradients(DataParallel(embedding(), TWO), torch.tensor(ids))["weight"]
    assert found.is_sparse
    torch.testing.assert_close(found.to_dense(), expected.to_dense())


class Tables(torch.nn.Module):
    """A table that only some replicas use, and one that they use both sparsely and densely."""

    def __init__(self):
        super().__init__()
        self.some = torch.nn.Embedding(5, 3, sparse=True)
        self.both = torch.nn.Embedding(5, 3, sparse=True)

    def forward(self, ids):
        result = self.both(ids) + (self.both.weight.sum() if ids[0, 0] == 0 else 0)
        return result + self.some(ids) if ids[0, 0] == 0 else result


def test_sparse_gradients_of_some_replicas_are_completed():
    torch.manual_seed(0)
    expected = Tables()
    ours = DataParallel(copy.deepcopy(expected), TWO)
    ids = torch.tensor([[0, 1], [2, 3]])
    gradients(ours, ids)
    (expected(ids[:1]).square().sum() + expected(ids[1:]).square().sum()).backward()
    for name in ("some", "both"):
        found, right = (getattr(module, name).weight.grad for module in (ours.module, expected))
        torch.testing.assert_close(found.to_dense(), right.to_dense())
    assert ours.module.some.weight.grad.is_sparse


def test_flat_weights_of_an_lstm_are_each_replicas_own():
    class Last(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = torch.nn.LSTM(6, 4, num_layers=2, batch_first=True)

        def forward(self, x):
            return self.lstm(x)[0]

    torch.manual_seed(0)
    assert_same_gradients(Last(), torch.randn(5, 3, 6), devices=THREE)


class Patched(torch.nn.Module):
    """Its layer has a `forward` of its own, as libraries set it that add hooks."""

    def __init__(self):
        super().__init__()
        self.layer = network()[0]
        self.layer.old_forward = self.layer.forward
        self.layer.forward = functools.partial(Patched.new_forward, self.layer)

    @staticmethod
    def new_forward(layer, x):
        assert layer._is_replica
        assert layer.old_forward.__self__ is layer
        return layer.old_forward(x) * layer.weight.sum()

    def forward(self, x):
        return self.layer(x)


def test_methods_that_were_set_on_modules_are_the_replicas():
    model = DataParallel(Patched(), TWO)
    assert model(batch(4)[0]).shape == (4, 16)


# -------------------------------------------------------------------- random numbers


class Noisy(torch.nn.Module):
    def __init__(self, recompute=False):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Sequential(torch.nn.Linear(6, 512), torch.nn.ReLU(), torch.nn.Dropout(0.5))
        self.last = torch.nn.Linear(512, 3)
        self.recompute = recompute

    def forward(self, x):
        hidden = checkpoint(self.first, x, use_reentrant=False) if self.recompute else self.first(x)
        return self.last(hidden)


def digest_of_training(recompute):
    model = DataParallel(Noisy(recompute), THREE)
    optimizer = sgd(model.parameters())
    torch.manual_seed(7)
    for seed in range(4):
        x, y = batch(10, seed)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def test_training_with_dropout_gives_the_same_digest_every_time_with_recomputation_too():
    digests = {digest_of_training(recompute) for recompute in (False, False, False, True, True, True)}
    assert len(digests) == 1


def test_masks_of_replicas_and_of_calls_differ_and_follow_the_seed():
    model = DataParallel(torch.nn.Dropout(0.5), TWO)
    x = torch.ones(2, 200)
    torch.manual_seed(3)
    first, second = model(x), model(x)
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(model(x), first)
    torch.manual_seed(4)
    assert not torch.equal(model(x), first)


def test_the_callers_random_numbers_are_left_alone_by_models_that_draw_none():
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    DataParallel(network().eval(), TWO)
    torch.manual_seed(3)
    DataParallel(torch.nn.ReLU(), TWO)(torch.ones(4, 2))
    assert torch.equal(torch.rand(3), expected)


# -------------------------------------------------------------------- buffers


def test_buffers_are_averaged_if_asked():
    x, _ = batch(8)
    model = DataParallel(torch.nn.BatchNorm1d(6), TWO, buffers="mean")
    model(x)
    shares = [torch.nn.BatchNorm1d(6) for _ in range(2)]
    for share, part in zip(shares, x.chunk(2), strict=True):
        share(part)
    torch.testing.assert_close(
        model.module.running_mean, (shares[0].running_mean + shares[1].running_mean) / 2
    )
    assert model.module.num_batches_tracked.item() == 1
    with pytest.raises(OptionError, match="'first' or 'mean', got 'sum'"):
        DataParallel(torch.nn.BatchNorm1d(6), TWO, buffers="sum")


def test_complex_buffers_are_averaged_too():
    class Spectrum(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(1, dtype=torch.complex64))

        def forward(self, x):
            self.seen += x.sum() * (1 + 2j)
            return x

    model = DataParallel(Spectrum(), TWO, buffers="mean")
    model(torch.tensor([1.0, 3.0]))
    assert model.module.seen.tolist() == [2 + 4j]


@pytest.mark.parametrize("switched", ["wrapper", "module"])
def test_statistics_of_training_reach_all_replicas_in_evaluation(switched):
    model, alone = DataParallel(torch.nn.BatchNorm1d(6), TWO), torch.nn.BatchNorm1d(6)
    switch = model if switched == "wrapper" else model.module
    for seed in range(3):
        x, _ = batch(8, seed)
        switch.train()
        model(x)
        alone.train()(x[:4])
        switch.eval()
        with torch.no_grad():
            torch.testing.assert_close(model(x), alone.eval()(x))


def test_buffers_that_forward_assigns_anew_are_kept():
    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count = self.count + 1
            return x

    model = DataParallel(Counting(), TWO)
    model(torch.ones(2))
    model(torch.ones(2))
    assert model.module.count.item() == 2


@pytest.mark.parametrize("size", [8, 7])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_sync_batch_norm_has_the_statistics_and_gradients_of_the_whole_batch(size, momentum):
    def net(norm):
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(6, 4), norm(4, momentum=momentum), torch.nn.Linear(4, 1))

    plain, ours = net(torch.nn.BatchNorm1d), DataParallel(net(torch.nn.SyncBatchNorm), THREE)
    for seed in range(2):
        x, _ = batch(size, seed)
        torch.testing.assert_close(gradients(ours, x), gradients(plain, x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.module.state_dict(), plain.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(x), plain.eval()(x))


def test_hooks_that_a_forward_pass_registers_stay_in_its_replica():
    """As transformers does it to collect hidden states: once, and remembers that in an attribute."""

    class Collecting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)
            self.is_installed = False

        def forward(self, x):
            seen = []
            if not self.is_installed:
                self.layer.register_forward_hook(lambda *_: self.collected.append(1))
                self.is_installed = True
            self.collected = seen
            self.layer(x)
            return x, torch.tensor(len(seen))

    module = Collecting()
    model = DataParallel(module, devices=["cpu:0", "cpu:1", "cpu:2"])
    for _ in range(2):
        assert model(torch.ones(3, 2))[1].tolist() == [1, 1, 1]
    assert not module.layer._forward_hooks
