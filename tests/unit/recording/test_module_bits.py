"""Marks of PyTorch modules: the submodule that is not reproducible is named, not those that follow."""

from __future__ import annotations

import functools

import pytest

torch = pytest.importorskip("torch")

import crossdevice as cd  # noqa: E402
from crossdevice.errors import ConversionError  # noqa: E402
from crossdevice.integrations.torch import ExactGradients, ModuleBits, module_bits  # noqa: E402
from crossdevice.recording.bits_file import read_bits  # noqa: E402
from crossdevice.recording.comparison import compare, read_run  # noqa: E402
from crossdevice.testing import run_ranks  # noqa: E402


class Noisy(torch.nn.Module):
    def __init__(self, noise, gradient_noise):
        super().__init__()
        self.noise, self.gradient_noise = noise, gradient_noise

    def forward(self, value):
        value.register_hook(lambda gradient: gradient + self.gradient_noise)
        return value + self.noise


@pytest.fixture
def mesh():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def run(path, noise=0.0, gradient_noise=0.0, shift=0.0):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(3, 4), torch.nn.ReLU(inplace=True), Noisy(noise, gradient_noise)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(4, 2))
    with cd.record_bits(path), ModuleBits(model) as marks:
        model(torch.full((5, 3), 1.0 + shift)).sum().backward()
    assert marks._handles == []
    model(torch.ones(5, 3)).sum().backward()  # nobody listens any more
    return str(path)


@pytest.mark.parametrize(
    ("changes", "name", "cause"),
    [
        ({"noise": 1e-3}, "model.2 forward", "result"),
        ({"shift": 1e-3}, "model.0 forward", "inputs"),
        ({"gradient_noise": 1e-3}, "model.0 gradient of output", "value"),
    ],
)
def test_the_first_module_that_differs_is_named(tmp_path, changes, name, cause):
    found = compare(read_run(run(tmp_path / "a")), read_run(run(tmp_path / "b", **changes))).parting
    assert (found.name, found.cause) == (name, cause)


def test_runs_that_are_the_same_have_marks_of_everything(tmp_path):
    first, second = run(tmp_path / "a"), run(tmp_path / "b")
    assert compare(read_run(first), read_run(second)).parting is None
    names = [event.kind.name for event in read_bits(first).events]
    assert names[:5] == [f"model.{layer} forward" for layer in range(4)] + ["model forward"]
    assert {"model.0.weight.grad", "model.0.bias.grad", "model.3.weight.grad", "model.3.bias.grad"} <= {
        *names
    }
    assert read_bits(first).events[0].kind.inputs == (
        ("value['inputs'][0]", 1),
        ("value['own']['weight']", 1),
        ("value['own']['bias']", 1),
    )


@pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch was built without distributed")
def test_a_module_in_ddp_has_the_marks_that_it_has_outside_of_it(tmp_path, mesh):
    def run_in(path, wrap):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        wrapped = wrap(model)
        with cd.record_bits(path), ModuleBits(wrapped):
            wrapped(torch.ones(5, 3)).sum().backward()
        return read_run(str(path))

    parallel = run_in(tmp_path / "a", torch.nn.parallel.DistributedDataParallel)
    found = compare(parallel, run_in(tmp_path / "b", lambda model: model))
    assert found.parting is None
    assert found.left_out == ([], [])
    assert found.num_same == 12


@pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch was built without distributed")
def test_of_a_model_in_fsdp_each_rank_marks_its_own_part(tmp_path, mesh, caplog):
    from torch.distributed.fsdp import fully_shard

    def run_sharded(path, scale):
        torch.manual_seed(0)
        model = fully_shard(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)), mesh=mesh)
        with torch.no_grad():
            model[1].weight.mul_(scale)
        with cd.record_bits(path), ModuleBits(model):
            model(torch.ones(5, 3)).sum().backward()
        return read_run(str(path))

    first = run_sharded(tmp_path / "a", 1.0)
    assert not caplog.records  # every value was recorded
    own = ("value['own']['weight']", 1), ("value['own']['bias']", 1)
    forward = next(event.kind for event in first.files[0].events if event.kind.name == "model.0 forward")
    assert forward.inputs == (("value['inputs'][0]", 1), *own)
    assert compare(first, run_sharded(tmp_path / "b", 1.0)).parting is None
    found = compare(first, run_sharded(tmp_path / "c", 2.0)).parting
    assert (found.name, found.leaves, found.cause) == (
        "model.1 forward",
        ["value['own']['weight']"],
        "inputs",
    )


@pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch was built without distributed")
def test_tensors_without_memory_are_refused_before_anything_reads_them(mesh):
    from torch.distributed.tensor import Shard, distribute_tensor

    sharded = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    freed = torch.arange(100_000.0)
    freed.untyped_storage().resize_(0)
    for tensor in (sharded, freed):
        with pytest.raises(ConversionError, match="without memory of its own"):
            cd.fingerprint(tensor)
        with pytest.raises(ConversionError, match="without memory of its own"):
            cd.all_reduce([tensor, tensor])


def test_a_module_that_raised_leaves_nothing_behind(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(3, 4))
    with cd.record_bits(tmp_path / "a"), ModuleBits(model):
        with pytest.raises(RuntimeError):
            model(torch.ones(5, 3))
        model[0](torch.ones(5, 3))
        model[1](torch.ones(5, 3))
    assert [event.kind.inputs[0] for event in read_bits(tmp_path / "a").events] == [
        ("value['inputs'][0]", 1)
    ] * 3


def test_nothing_is_kept_of_passes_that_raised_before_the_last_one(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(3, 4))
    kept = []
    with cd.record_bits(tmp_path / "a"), ModuleBits(model) as marks:
        inputs = [torch.ones(5, 3) for _ in range(3)]
        for value in inputs:
            with pytest.raises(RuntimeError):
                model(value)
            kept.append((len(marks._forward.digests), len(marks._forward.known)))
    # The model and the module that raised; the input, the first result and four parameters.
    assert kept == [(2, 6)] * 3


def exact_run(path, group, shift=0.0):
    """Two steps of four micro-batches; `shift` changes one of the second step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    exact = ExactGradients(model.named_parameters(), group)
    numbers = range(4) if group is None else range(group.rank, 4, group.size)
    with cd.record_bits(path):
        for step in range(2):
            for number in numbers:
                moved = shift if (step, number) == (1, 2) else 0.0
                model(torch.full((1, 3), number + 1.0 + moved)).sum().backward()
                exact.add()
            exact.finish()
            model.zero_grad()
    return str(path)


def test_steps_of_exact_gradients_are_recorded_and_the_micro_batch_that_differs_is_named(tmp_path):
    runs = [read_run(exact_run(tmp_path / str(shift), None, shift)) for shift in (0.0, 1e-3)]
    names = [event.kind.name for event in read_bits(str(tmp_path / "0.0")).events]
    assert names == [*["gradients of a micro-batch"] * 4, "exact MEAN of gradients"] * 2
    again = read_run(exact_run(tmp_path / "again", None))
    assert compare(runs[0], again).parting is None
    found = compare(*runs).parting
    assert (found.name, found.occurrence) == ("gradients of a micro-batch", 7)


def exact_worker(group, folder):
    exact_run(folder / f"of{group.rank}", group)


def test_every_worker_records_the_mean_that_one_alone_records(tmp_path):
    alone = exact_run(tmp_path / "alone", None)
    run_ranks(2, functools.partial(exact_worker, folder=tmp_path), processes=True)
    runs = [alone, *map(str, sorted(tmp_path.glob("of*")))]
    means = [[event.digests for event in read_bits(run).events if event.kind.is_call] for run in runs]
    assert len(means) == 3
    assert means[0] == means[1] == means[2]


def test_a_tensor_that_several_modules_get_is_read_once_unless_it_was_changed(tmp_path, monkeypatch):
    read = []
    right = module_bits.digests_by_path

    def counted(tensors):
        read.extend(tensors)
        return right(tensors)

    monkeypatch.setattr(module_bits, "digests_by_path", counted)
    shared = torch.nn.Linear(4, 4)
    model = torch.nn.Sequential(shared, shared, torch.nn.ReLU(inplace=True))
    with cd.record_bits(tmp_path / "run.bits"), ModuleBits(model):
        result = model(torch.ones(2, 4))
    # The model's input, two parameters, two results, and the second again, which ReLU has changed.
    assert len(read) == 6
    *_, relu, whole = read_bits(tmp_path / "run.bits").events
    assert relu.digests[0] != relu.digests[1] == whole.digests[-1]
    assert relu.digests[1].hex() == cd.fingerprint(result.detach()).digest[:16]
