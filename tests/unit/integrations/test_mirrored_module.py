"""MirroredModule as a module among others, and the gradients that its replicas have in common."""

import copy
import pickle

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from crossdevice import MirroredStrategy, MultiWorkerMirroredStrategy, PerReplica, get_strategy
from crossdevice.errors import ConversionError, DeviceError, MismatchError, OptionError
from crossdevice.integrations.torch import DataParallel, MirroredModule
from crossdevice.process_groups.engines.thread_engine import run_ranks
from integrations.by_mirrored_module import by_mirrored_module


def mirrored(module, count=2):
    return MirroredModule(module, MirroredStrategy([f"cpu:{i}" for i in range(count)]))


def of_copies(model, read):
    return [read(replica) for replica in model.replicas]


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))


# ----------------------------------------------------------------------------- a module


METHODS = [
    name
    for name in dir(torch.nn.Module)
    if not name.startswith("_") and callable(getattr(torch.nn.Module, name))
]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_of_modules_has_a_rule_for_copies(name):
    assert name in vars(MirroredModule), f"what does {name} mean for several copies?"


def test_it_is_a_module_that_has_the_names_and_values_of_the_one_it_mirrors():
    module = network()
    model = mirrored(module)
    assert isinstance(model, torch.nn.Module)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in module.named_parameters()]
    assert next(model.parameters()) is module[0].weight
    assert model.state_dict().keys() == module.state_dict().keys()
    assert list(model.modules()) == list(module.modules())
    assert "running_mean" in dict(model.get_submodule("1").named_buffers())


def test_its_repr_names_the_module_and_the_devices():
    text = repr(mirrored(network()))
    assert text.startswith("MirroredModule(\n  devices: cpu:0, cpu:1\n  (module): Sequential(\n")
    assert "    (0): Linear(in_features=3" in text


def test_averaged_models_save_and_load_the_weights_of_all_copies():
    model = mirrored(network())
    averaged = AveragedModel(model)
    averaged.update_parameters(model)
    state = averaged.state_dict()
    torch.testing.assert_close(state["module.0.weight"], model.replicas[0][0].weight.detach())
    state["module.0.weight"] = torch.full((4, 3), 7.0)
    averaged.load_state_dict(state)
    averaged.module.check_in_step(buffers=True)
    assert of_copies(averaged.module, lambda copy: copy[0].weight[0, 0].item()) == [7, 7]
    averaged.double().eval()
    averaged.module.check_in_step()
    assert averaged.module.replicas[1][0].weight.dtype == torch.float64
    assert model.replicas[1][0].weight.dtype == torch.float32
    with pytest.raises(DeviceError, match="all copies on one device"):
        averaged.to("meta")


def test_deep_copies_are_mirrored_and_share_nothing_but_the_strategy():
    model = mirrored(network())
    twin = copy.deepcopy(model)
    assert twin.strategy is model.strategy
    twin.requires_grad_(False)
    twin.check_in_step()
    assert all(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(ConversionError, match=r"save its state_dict\(\)"):
        pickle.dumps(model)


@pytest.mark.parametrize(
    "add",
    [
        lambda model, part: model.add_module("extra", part),
        lambda model, part: model.register_module(name="extra", module=part),
        lambda model, part: setattr(model, "extra", part),
        lambda model, part: model.set_submodule("extra", part),
    ],
)
def test_modules_that_are_added_are_each_copys_own(add):
    model = mirrored(torch.nn.Sequential(torch.nn.Linear(2, 2)), count=3)
    part = torch.nn.Linear(2, 1)
    add(model, part)
    assert model.replicas[0].extra is part
    assert len(set(of_copies(model, lambda copy: copy.extra.weight.data_ptr()))) == 3
    model.check_in_step()
    del model.extra
    assert of_copies(model, lambda copy: hasattr(copy, "extra")) == [False] * 3


def test_parameters_and_buffers_that_are_added_are_each_copys_own():
    model = mirrored(torch.nn.Linear(2, 2))
    model.register_parameter("scale", torch.nn.Parameter(torch.rand(2)))
    model.register_buffer("count", torch.rand(1), persistent=False)
    model.register_buffer("nothing", None)
    for name in ("scale", "count"):
        assert len(set(of_copies(model, lambda copy, name=name: getattr(copy, name).data_ptr()))) == 2
    model.check_in_step(buffers=True)


def test_what_processes_add_is_the_first_ones():
    def rank(group):
        strategy = MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"], group=group)
        model = MirroredModule(torch.nn.Sequential(), strategy)
        model.add_module("extra", torch.nn.Linear(1, 1))
        model.scale = torch.nn.Parameter(torch.full((1,), float(group.rank)))
        return of_copies(model, lambda copy: (copy.extra.weight.item(), copy.scale.item()))

    first, second = run_ranks(2, rank)
    assert first == second
    assert first[0] == first[1]
    assert first[0][1] == 0


def test_hooks_reach_all_copies_and_are_removed_from_all():
    model = mirrored(torch.nn.Linear(2, 2))
    seen = []
    handle = model.register_forward_hook(lambda module, *_: seen.append(module))
    for replica in model.replicas:
        replica(torch.ones(1, 2))
    assert seen == list(model.replicas)
    model.check_in_step()
    handle.remove()
    with model.register_forward_pre_hook(lambda *_: seen.append("before")):
        model.replicas[1](torch.ones(1, 2))
    model.replicas[1](torch.ones(1, 2))
    assert seen == [*model.replicas, "before"]


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (
            lambda module: module.add_module("extra", torch.nn.ReLU()),
            r"nothing as module 'extra'.*a ReLU in training mode with 0 hooks",
        ),
        (lambda module: module[1].eval(), r"module '1'.*evaluation mode"),
        (lambda module: module[0].register_forward_hook(print), r"0 hooks as module '0'.*1 hook\b"),
        (lambda module: module[0].weight.register_hook(print), r"0 hooks as parameter '0\.weight'.*1 hook\b"),
        (lambda module: module[0].requires_grad_(False), r"parameter '0\.weight'.*a frozen torch\.float32"),
        (lambda module: module[2].double(), r"parameter '2\.weight'.*torch\.float64"),
        (
            lambda module: module[1].register_buffer("extra", torch.ones(2)),
            r"nothing as buffer '1\.extra'.*a torch\.float32 of shape \(2,\)",
        ),
    ],
)
def test_copies_that_differ_in_structure_are_noticed(change, difference):
    model = mirrored(network(), count=3)
    model.check_in_step()
    change(model.current())
    with pytest.raises(MismatchError, match=rf"replica 1 has {difference}|replica 1 has .*{difference}"):
        model.check_in_step()


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (torch.nn.Sequential(torch.nn.SyncBatchNorm(2)), r"module '0' is a SyncBatchNorm.*mean"),
        (torch.nn.Sequential(torch.nn.LazyLinear(2)), r"'0\.weight' has no values yet.*call the module once"),
    ],
)
def test_modules_whose_copies_would_compute_something_else_are_refused(module, reason):
    with pytest.raises(ConversionError, match=reason):
        mirrored(module)
    model = mirrored(torch.nn.Sequential())
    with pytest.raises(ConversionError, match=reason):
        model.add_module("extra", module)


def test_what_is_mirrored_is_a_plain_module_and_stays_one():
    model = mirrored(torch.nn.Linear(2, 2))
    for make in (MirroredModule, lambda module, _: DataParallel(module, ["cpu:0", "cpu:1"])):
        for given in (model, model.state_dict()):
            with pytest.raises(OptionError, match=r"plain torch\.nn\.Module, got (Mirrored|Ordered)"):
                make(given, model.strategy)
    with pytest.raises(OptionError, match="must be a MirroredStrategy, got the default strategy"):
        MirroredModule(torch.nn.Linear(2, 2), get_strategy())
    with pytest.raises(ConversionError, match="parametrize the module before it is mirrored"):
        torch.nn.utils.parametrizations.weight_norm(model)


# ----------------------------------------------------------------------------- gradients


class Choice(torch.nn.Module):
    """Experts of which one is used, and one that never is."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3))

    def forward(self, x, expert):
        return self.experts[expert](x)


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min", "prod"])
def test_parameters_that_only_some_replicas_used_count_as_zero(op):
    model = mirrored(Choice())

    def step(expert):
        model(torch.ones(1, 2), expert).sum().backward()
        model.reduce_gradients(op)

    model.strategy.run(step, args=(PerReplica([0, 1]),))
    expected = {"sum": 1, "mean": 0.5, "max": 1, "min": 0, "prod": 0}[op]
    for replica in model.replicas:
        for used in replica.experts[:2]:
            assert used.weight.grad.tolist() == [[expected] * 2] * 2
        assert replica.experts[2].weight.grad is None


def test_a_replica_without_any_gradient_counts_as_zeros():
    model = mirrored(network())

    def step(has_gradient):
        if has_gradient:
            model(torch.ones(2, 3)).sum().backward()
        model.reduce_gradients("sum")

    model.strategy.run(step, args=(PerReplica([False, True]),))
    assert of_copies(model, lambda copy: copy[2].bias.grad.tolist()) == [[2.0], [2.0]]


def test_unused_parameters_of_several_processes_count_as_zero():
    def rank(group):
        strategy = MultiWorkerMirroredStrategy(devices=["cpu:0"], group=group)
        model = MirroredModule(Choice(), strategy)

        def step():
            model(torch.ones(1, 2), group.rank).sum().backward()
            model.reduce_gradients("sum")

        strategy.run(step)
        return [
            None if e.weight.grad is None else e.weight.grad[0, 0].item() for e in model.current().experts
        ]

    assert run_ranks(2, rank) == [[1, 1, None]] * 2


def test_frozen_parameters_are_not_reduced():
    model = mirrored(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)))
    for replica in model.replicas:
        replica[0].requires_grad_(False)
    stale = torch.full((2, 2), 9.0)

    def step():
        model.current()[0].weight.grad = stale
        model(torch.ones(1, 2)).sum().backward()
        model.reduce_gradients("sum")

    model.strategy.run(step)
    assert of_copies(model, lambda copy: copy[0].weight.grad is stale) == [True, True]
    assert of_copies(model, lambda copy: copy[1].bias.grad.item()) == [2, 2]


def test_a_model_without_trainable_parameters_has_nothing_to_reduce():
    model = mirrored(torch.nn.ReLU())
    model.strategy.run(lambda: model.reduce_gradients())


def test_gradients_add_up_without_being_reduced_in_a_no_sync_block():
    model = mirrored(torch.nn.Linear(1, 1, bias=False))

    def step(x):
        with model.no_sync():
            model(x).sum().backward()
            model.reduce_gradients("sum")
            first = model.weight.grad.item()
        model(10 * x).sum().backward()
        model.reduce_gradients("sum")
        return first, model.weight.grad.item()

    x = PerReplica([torch.ones(1, 1), 2 * torch.ones(1, 1)])
    firsts, seconds = model.strategy.run(step, args=(x,))
    assert firsts.values == (1, 2)
    assert seconds.values == (33, 33)
    with model.no_sync():
        model.zero_grad()
        model.strategy.run(lambda x: (model(x).sum().backward(), model.reduce_gradients()), args=(x,))
    assert of_copies(model, lambda copy: copy.weight.grad.item()) == [1, 2]


# ----------------------------------------------------------------------------- buffers


def test_buffers_are_averaged_if_asked_for_and_counters_are_the_firsts():
    model = mirrored(torch.nn.BatchNorm1d(1, momentum=None))

    def step(x):
        for part in x:
            model(part)

    model.strategy.run(
        step, args=(PerReplica([[torch.ones(2, 1)], [3 * torch.ones(2, 1), 7 * torch.ones(2, 1)]]),)
    )
    model.synchronize_buffers("mean")
    model.check_in_step(buffers=True)
    assert model.running_mean.item() == 3
    assert model.num_batches_tracked.item() == 1
    with pytest.raises(OptionError, match="how must be 'first' or 'mean', got 'last'"):
        model.synchronize_buffers("last")


def test_buffers_of_several_processes_are_averaged_over_all_replicas():
    def rank(group):
        strategy = MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"], group=group)
        model = MirroredModule(torch.nn.BatchNorm1d(1), strategy)
        for number, replica in enumerate(model.replicas):
            replica.running_mean.fill_(2 * group.rank + number)
            replica.num_batches_tracked.fill_(5 + group.rank)
        model.synchronize_buffers("mean")
        return of_copies(model, lambda copy: (copy.running_mean.item(), copy.num_batches_tracked.item()))

    assert run_ranks(2, rank) == [[(1.5, 5)] * 2] * 2


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_checkpoint_goes_on_with_another_number_of_replicas(is_nested):
    """Each copy's moments are its own, though all optimizers load the same tensors."""

    def go_on(count, num_steps, saved=None):
        torch.manual_seed(3)
        model = mirrored(torch.nn.Linear(3, 1).double(), count)

        def make(own):
            optimizer = torch.optim.Adam(own, lr=0.1)
            return {"adam": optimizer} if is_nested else optimizer

        def adam(made):
            return made["adam"] if is_nested else made

        optimizers = model.optimizers(make)
        if saved is not None:
            model.load_state_dict(saved["model"])
            for made in optimizers.values:
                adam(made).load_state_dict(saved["optimizer"])

        def step(x, made):
            adam(made).zero_grad()
            (model(x).square().sum() / 6).backward()
            model.reduce_gradients("sum")
            adam(made).step()

        batches = torch.arange(18.0).double().reshape(6, 3).sin()
        for _ in range(num_steps):
            for x in model.strategy.experimental_distribute_dataset(batches, batch_size=6):
                model.strategy.run(step, (x, optimizers))
        model.check_in_step()
        return {"model": model.state_dict(), "optimizer": adam(optimizers.values[0]).state_dict()}

    whole, resumed = go_on(1, 6), go_on(3, 3, go_on(2, 3))
    torch.testing.assert_close(resumed, whole)


def test_averages_of_weights_can_be_mirrored_themselves():
    module = network()
    model = mirrored(module)
    averaged = MirroredModule(AveragedModel(copy.deepcopy(module)), model.strategy)

    def step(value):
        with torch.no_grad():
            model.current()[0].weight.fill_(value)
        averaged.update_parameters(model)
        return averaged(torch.ones(2, 3))

    for value in (1.0, 3.0):
        model.strategy.run(step, args=(value,))
    averaged.check_in_step()
    assert of_copies(averaged, lambda copy: copy.n_averaged.item()) == [2, 2]
    assert averaged.replicas[1].module[0].weight[0, 0].item() == 2


# ----------------------------------------------------------------------------- sparse gradients


def table(**kwargs):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(6, 2, sparse=True, **kwargs), torch.nn.Linear(2, 1))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # PyTorch's own, of its sparse gradients
@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adagrad], ids=["SGD", "Adagrad"])
def test_sparse_gradients_stay_sparse_and_are_those_of_one_device(op, make):
    alone, model = table(), mirrored(table())
    optimizers = model.optimizers(lambda parameters: make(parameters, lr=0.1))
    rows = [torch.tensor([0, 1, 1]), torch.tensor([1, 5])]

    def step(x, optimizer):
        optimizer.zero_grad()
        model(x).sum().backward()
        model.reduce_gradients(op)
        optimizer.step()
        return model.current()[0].weight.grad.is_sparse

    optimizer = make(alone.parameters(), lr=0.1)
    for _ in range(2):
        is_sparse = model.strategy.run(step, args=(PerReplica(rows), optimizers))
        assert is_sparse.values == (True, True)
        optimizer.zero_grad()
        (alone(torch.cat(rows)).sum() / (1 if op == "sum" else 2)).backward()
        optimizer.step()
    model.check_in_step()
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_a_replica_that_did_not_use_a_table_brings_no_rows():
    model = mirrored(table())

    def step(is_used):
        if is_used:
            model(torch.tensor([3])).sum().backward()
        model.reduce_gradients("sum")
        return model.current()[0].weight.grad

    for gradient in model.strategy.run(step, args=(PerReplica([False, True]),)).values:
        assert gradient.is_sparse
        assert gradient.coalesce().indices().tolist() == [[3]]


@pytest.mark.parametrize("count", [2, 3])
def test_gradients_keep_their_strides(count):
    module = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    strides = module.weight.stride()
    model = mirrored(module, count)

    def step():
        model(torch.ones(1, 3, 5, 5).to(memory_format=torch.channels_last)).sum().backward()
        before = model.weight.grad.stride()
        model.reduce_gradients("sum")
        return before == model.weight.grad.stride() == strides

    assert model.strategy.run(step).values == (True,) * count
    assert torch.equal(model.replicas[1].weight.grad, torch.full((4, 3, 3, 3), 9.0 * count))


def test_gradients_of_different_strides_each_keep_theirs():
    def rank(group):
        strategy = MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"], group=group)
        model = MirroredModule(torch.nn.Linear(3, 2, bias=False), strategy)

        def step(is_turned):
            gradient = torch.arange(6.0).reshape(2, 3)
            model.weight.grad = gradient.T.contiguous().T if is_turned else gradient
            before = model.weight.grad.stride()
            model.reduce_gradients("sum")
            return model.weight.grad.stride() == before

        kept = strategy.run(step, args=(PerReplica([True, False]),)).values
        return kept, of_copies(model, lambda copy: copy.weight.grad.tolist())

    assert run_ranks(2, rank) == [((True, True), [[[0, 4, 8], [12, 16, 20]]] * 2)] * 2


# ----------------------------------------------------------------------------- architectures


class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(16, 8)
        self.lstm = torch.nn.LSTM(8, 8, num_layers=2, batch_first=True, bidirectional=True)
        self.last = torch.nn.Linear(16, 3)

    def forward(self, x):
        return self.last(self.lstm(self.embedding(x))[0])


class Tied(torch.nn.Module):
    def __init__(self, *, sparse):
        super().__init__()
        self.embedding = torch.nn.Embedding(16, 8, sparse=sparse)
        self.layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = torch.nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.layer(self.embedding(x)))


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.EmbeddingBag(16, 8, sparse=True)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(8, 4) for _ in range(5))

    def forward(self, x):
        hidden, chosen = self.embedding(x), x[:, 0] % 4  # the last expert is never used
        result = torch.zeros(len(x), 4, dtype=hidden.dtype)
        for number in chosen.unique().tolist():
            result[chosen == number] = self.experts[number](hidden[chosen == number])
        return result


class Convolutions(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Conv2d(4, 2, 2)
        ).to(memory_format=torch.channels_last)

    def forward(self, x):
        return self.layers(x[:, None, :, None] * torch.ones(6, dtype=torch.float64))


ARCHITECTURES = {
    "LSTM": Recurrent,
    "tied weights": lambda: Tied(sparse=False),
    "tied weights of a sparse table": lambda: Tied(sparse=True),
    "experts": Experts,
    "channels_last": Convolutions,
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("size", [6, 5], ids=["even", "uneven"])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_loss_and_gradients_are_those_of_one_device(name, count, size):
    torch.manual_seed(0)
    module, x = ARCHITECTURES[name]().double().eval(), torch.randint(16, (size, 6))
    alone = copy.deepcopy(module)
    expected = alone(x).square().sum()
    expected.backward()
    devices = [f"cpu:{number}" for number in range(count)]
    loss, gradients = by_mirrored_module(module, devices, {"x": x}, lambda result: result.square().sum())
    torch.testing.assert_close(loss, expected.detach())
    for own, parameter in alone.named_parameters():
        if parameter.grad is None:
            assert gradients[own] is None
        else:
            assert gradients[own].is_sparse == parameter.grad.is_sparse
            torch.testing.assert_close(gradients[own].to_dense(), parameter.grad.to_dense())
