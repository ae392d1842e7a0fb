"""Collectives of torch.distributed on crossdevice are in a record, by parameters where these are known."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

import crossdevice as cd  # noqa: E402
from crossdevice.integrations.torch import ReproducibleMean, reproducible_hook  # noqa: E402
from crossdevice.recording.bits_file import read_bits  # noqa: E402
from crossdevice.recording.comparison import compare, read_run  # noqa: E402


@pytest.fixture
def group(request):
    dist.init_process_group(request.param, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def train(path, *, bucket_cap_mb=25, bias=0.0):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(9, 8, sparse=True), torch.nn.Linear(8, 500))
    state = ReproducibleMean()
    parallel = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb)
    parallel.register_comm_hook(state, reproducible_hook)
    with cd.record_bits(path):
        for step in range(3):
            loss = parallel(torch.arange(5)).square().mean()
            (loss + bias * (step == 2) * model[1].bias.sum()).backward()
            model.zero_grad()
    state.group.close()
    return str(path)


@pytest.mark.parametrize("group", ["gloo"], indirect=True)
def test_the_hook_records_each_parameter_by_name_whatever_the_buckets(group, tmp_path):
    first = train(tmp_path / "a.bits")
    second = train(tmp_path / "b.bits", bucket_cap_mb=0.001)
    events = read_bits(first).events
    names = [event.kind.name for event in events]
    assert sorted(names[:3]) == [f"mean of gradient {name}" for name in ("0.weight", "1.bias", "1.weight")]
    assert len(names) == 9
    embedding = next(event.kind for event in events if event.kind.name.endswith("0.weight"))
    assert embedding.inputs == (("value['0.weight'].values", 1), ("value['0.weight'].indices", 1))
    assert compare(read_run(first), read_run(second)).parting is None
    found = compare(read_run(first), read_run(train(tmp_path / "c.bits", bias=1.0))).parting
    assert found[:3] == ("mean of gradient 1.bias", 3, True)
    assert (found.cause, found.leaves) == ("inputs", ["value['1.bias']"])


@pytest.mark.parametrize("group", ["crossdevice"], indirect=True)
def test_collectives_of_the_backend_are_recorded_once_each_also_those_that_are_started(group, tmp_path):
    with cd.record_bits(tmp_path / "a.bits"):
        dist.all_reduce(torch.ones(3))
        work = dist.all_reduce(torch.ones(100_000), async_op=True)
        dist.broadcast(torch.ones(3), 0)
        work.wait()
        dist.reduce_scatter(torch.empty(3), [torch.ones(3)])
        dist.all_gather([torch.empty(3)], torch.ones(3))
    events = read_bits(tmp_path / "a.bits").events
    names = ["all_reduce", "all_reduce", "broadcast", "reduce_scatter", "all_gather"]
    assert [event.kind.name for event in events] == names
    assert all(event.kind.inputs and event.kind.results for event in events)
