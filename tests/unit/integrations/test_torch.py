"""PyTorch modules over logical devices: the same numbers as one device, the same bits on all."""

import copy
import pickle

import pytest
import torch

from crossdevice import (
    CommunicationOptions,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    PerReplica,
    RingAllReduce,
)
from crossdevice.errors import ContextError, DeviceError, MismatchError, OptionError
from crossdevice.integrations.torch import (
    MirroredModule,
    ReproducibleMean,
    reproducible_hook,
)
from crossdevice.process_groups.engines.thread_engine import run_ranks
from unit.integrations.small_networks import batch, network, sgd


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_mirrored_module_trains_as_one_device_does_and_stays_in_step(count):
    alone = network()
    strategy = MirroredStrategy([f"cpu:{i}" for i in range(count)], RingAllReduce())
    model = MirroredModule(copy.deepcopy(alone), strategy)
    optimizers, optimizer = model.optimizers(sgd), sgd(alone.parameters())

    def step(x, y, optimizer):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y, reduction="sum") / 10
        loss.backward()
        model.reduce_gradients("sum")
        optimizer.step()
        return loss.detach()

    dataset = strategy.experimental_distribute_dataset([batch(10, seed) for seed in range(4)])
    for number, (x, y) in enumerate(dataset):
        losses = strategy.run(step, args=(x, y, optimizers))
        optimizer.zero_grad()
        expected = torch.nn.functional.cross_entropy(alone(batch(10, number)[0]), batch(10, number)[1])
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(strategy.reduce("sum", losses, axis=None), expected.detach())
        model.check_in_step()
    for left, right in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(left, right)


def test_a_replica_that_drifts_is_named():
    model = MirroredModule(network(), MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]))
    model.check_in_step()
    with torch.no_grad():
        model.replicas[2][0].bias[1] += 1e-7
    with pytest.raises(MismatchError, match=r"replica 2 differs from replica 0 in '0\.bias'"):
        model.check_in_step()


def test_buffers_are_brought_into_step():
    strategy = MirroredStrategy(["cpu:0", "cpu:1"])
    model = MirroredModule(torch.nn.BatchNorm1d(6), strategy)
    strategy.run(lambda x: model(x), args=(PerReplica([batch(4, 1)[0], batch(4, 2)[0]]),))
    model.check_in_step()
    with pytest.raises(MismatchError, match="running_mean"):
        model.check_in_step(buffers=True)
    model.synchronize_buffers()
    model.check_in_step(buffers=True)


def test_gradients_are_reduced_by_replicas_and_options_are_passed_on():
    strategy = MirroredStrategy(["cpu:0", "cpu:1"])
    model = MirroredModule(torch.nn.Linear(1, 1, bias=False).bfloat16(), strategy)
    with pytest.raises(ContextError, match=r"inside of strategy\.run"):
        model.reduce_gradients()

    def gradient(value):
        model.weight.grad = torch.full((1, 1), value, dtype=torch.bfloat16)
        model.reduce_gradients("sum", CommunicationOptions(precision="exact"))
        return model.weight.grad

    results = strategy.run(gradient, args=(PerReplica([256.0, 3.0]),))
    assert [part.item() for part in results.values] == [260.0, 260.0]


def test_modes_and_states_reach_all_copies():
    model = MirroredModule(torch.nn.Linear(2, 2), MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]))
    model.eval()
    assert [replica.training for replica in model.replicas] == [False] * 3
    model.train()
    model.load_state_dict({"weight": torch.ones(2, 2), "bias": torch.ones(2)})
    model.requires_grad_(False)
    model.check_in_step()
    assert [replica.weight.requires_grad for replica in model.replicas] == [False] * 3


def mirrored(module, count=3):
    return MirroredModule(module, MirroredStrategy([f"cpu:{i}" for i in range(count)]))


def of_copies(model, read):
    return [read(replica) for replica in model.replicas]


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.double(),
        lambda model: model.type(torch.float64),
        lambda model: model.to(torch.float64),
        lambda model: model.to("cpu", torch.float64),
        lambda model: model.to(dtype=torch.float64),
    ],
)
def test_casts_reach_all_copies(change):
    model = mirrored(network())
    assert change(model) is model
    assert of_copies(model, lambda copy: copy[0].weight.dtype) == [torch.float64] * 3
    model.check_in_step()


def test_gradients_of_all_copies_are_cleared():
    model = mirrored(network())
    for replica in model.replicas:
        replica(batch(2)[0]).sum().backward()
    assert model.zero_grad() is None
    assert of_copies(model, lambda copy: copy[0].weight.grad) == [None] * 3


def test_initial_values_may_be_random_and_are_the_first_copys_everywhere():
    model = mirrored(network())
    calls = []

    def initialize(module):
        calls.append(module)
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight)
            module.scale = 2

    before = model.current()[0].weight.clone()
    assert model.apply(initialize) is model
    assert not torch.equal(model.current()[0].weight, before)
    assert of_copies(model, lambda copy: copy[0].scale) == [2, 2, 2]
    assert len(calls) == 3 * len(list(model.current().modules()))
    model.check_in_step()


def test_initial_values_of_several_processes_are_the_first_ones():
    modules = [torch.nn.Linear(2, 2) for _ in range(2)]

    def rank(group):
        model = MirroredModule(
            modules[group.rank], MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"], group=group)
        )
        model.apply(lambda module: torch.nn.init.constant_(module.weight, group.rank + 5))
        return of_copies(model, lambda copy: copy.weight[0, 0].item())

    assert run_ranks(2, rank) == [[5, 5], [5, 5]]


def test_attributes_are_set_on_all_copies_and_tensors_are_not_shared_by_them():
    model = mirrored(torch.nn.Linear(2, 2))
    model.training = False
    model.scale = 3
    assert of_copies(model, lambda copy: (copy.training, copy.scale)) == [(False, 3)] * 3
    model.weight = torch.nn.Parameter(torch.zeros(2, 2))
    assert len(set(of_copies(model, lambda copy: copy.weight.data_ptr()))) == 3
    model.check_in_step()


def test_in_a_replica_its_own_copy_is_changed():
    model = mirrored(torch.nn.Linear(2, 2), count=2)

    def change(is_first):
        if is_first:
            model.eval().double().apply(lambda module: torch.nn.init.ones_(module.weight))
            model.scale = 3
            model.to(torch.device("cpu"))
            model.load_state_dict({"weight": torch.zeros(2, 2), "bias": torch.ones(2)})

    model.strategy.run(change, args=(PerReplica([True, False]),))
    first, second = model.replicas
    assert (first.training, first.weight.dtype, first.scale, first.bias[0].item()) == (
        False,
        torch.float64,
        3,
        1,
    )
    assert (second.training, second.weight.dtype, hasattr(second, "scale")) == (True, torch.float32, False)


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.to("cuda:0"),
        lambda model: model.to(device="meta"),
        lambda model: model.cuda(),
        lambda model: model.to_empty(device="meta"),
    ],
)
def test_copies_are_not_moved_together(move):
    model = mirrored(torch.nn.Linear(2, 2), count=2)
    with pytest.raises(DeviceError, match=r"all copies on one device.*cpu:0, cpu:1"):
        move(model)
    assert of_copies(model, lambda copy: copy.weight.device.type) == ["cpu", "cpu"]


def test_loading_says_what_was_missing_and_assigned_tensors_are_each_copys_own():
    model = mirrored(torch.nn.Linear(2, 2))
    state = {"weight": torch.ones(2, 2, dtype=torch.float64)}
    assert model.load_state_dict(state, strict=False, assign=True).missing_keys == ["bias"]
    assert of_copies(model, lambda copy: copy.weight.dtype) == [torch.float64] * 3
    assert len(set(of_copies(model, lambda copy: copy.weight.data_ptr()))) == 3
    model.check_in_step()


def test_one_optimizer_for_all_is_noticed_and_the_right_way_named():
    strategy = MirroredStrategy(["cpu:0", "cpu:1"])
    model = MirroredModule(network(), strategy)
    optimizer = sgd(model.parameters())

    def step(x):
        model(x).sum().backward()
        model.reduce_gradients()

    strategy.run(step, args=(batch(4)[0],))
    optimizer.step()
    with pytest.raises(MismatchError, match=r"optimizer of its own \(\.optimizers\)"):
        model.check_in_step()


# -------------------------------------------------------------------- several processes


def normalized_network(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1))


def trained(strategy, module):
    """All that the first local copy holds after three steps."""
    model = MirroredModule(module, strategy)
    optimizers = model.optimizers(sgd)

    def step(x, optimizer):
        optimizer.zero_grad()
        (model(x).square().sum() / 24).backward()
        model.reduce_gradients("sum")
        optimizer.step()

    x = torch.arange(72.0).reshape(24, 3).sin()
    for shares in strategy.experimental_distribute_dataset([x, x.cos(), x.square()]):
        strategy.run(step, args=(shares, optimizers))
    model.synchronize_buffers()
    model.check_in_step(buffers=True)
    return [tensor.numpy().tobytes() for tensor in model.replicas[0].state_dict().values()]


def test_modules_of_several_processes_start_as_the_first_and_learn_what_those_of_one_do():
    expected = trained(MirroredStrategy([f"cpu:{index}" for index in range(4)]), normalized_network(0))
    modules = [normalized_network(seed) for seed in (0, 1)]

    def rank(group):
        strategy = MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"], group=group)
        return trained(strategy, modules[group.rank])

    assert run_ranks(2, rank) == [expected, expected]


@pytest.fixture
def one_process():
    """A process group of torch.distributed."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_the_hook_wants_its_own_state():
    with pytest.raises(OptionError, match=r"register_comm_hook\(ReproducibleMean\(\), reproducible_hook\)"):
        reproducible_hook(None, None)


def test_the_hooks_state_may_be_made_before_there_are_groups_and_refuses_what_is_none():
    assert ReproducibleMean().group is None
    with pytest.raises(OptionError, match=r"that this process is in, got -100"):
        ReproducibleMean(-100)  # what torch.distributed.new_group gives to processes outside of a group


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_models_with_the_hook_can_be_copied_and_saved_after_a_step(copied):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    model.register_comm_hook(ReproducibleMean(precision="exact"), reproducible_hook)
    model(torch.ones(1, 2)).sum().backward()
    twin = copied(model)
    ((_, state),) = twin._comm_hooks
    assert state.group is None
    twin.register_comm_hook(state, reproducible_hook)  # which PyTorch leaves to us
    twin(torch.ones(1, 2)).sum().backward()
    assert state.group.size == 1


def test_a_bucket_of_an_unknown_model_is_refused():
    class Bucket:
        def parameters(self):
            return [torch.nn.Parameter(torch.ones(1))]

    with pytest.raises(OptionError, match=r"give them: ReproducibleMean\(model\.process_group\)"):
        reproducible_hook(ReproducibleMean(), Bucket())
