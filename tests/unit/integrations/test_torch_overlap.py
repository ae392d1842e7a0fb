"""Gradients are summed in buckets during the backward pass, batches are accumulated, and traces show it."""

from __future__ import annotations

import json
import time

import pytest
import torch

import crossdevice as cd
from crossdevice.errors import OptionError
from crossdevice.integrations.torch import DataParallel, MirroredModule

DEVICES = ["cpu:0", "cpu:1"]


def network(width=8):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(width, width) for _ in range(4)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, 1))


def batch(size, seed=1, width=8):
    return torch.randn(size, width, generator=torch.Generator().manual_seed(seed))


def gradients_of(model):
    return [parameter.grad for parameter in model.parameters()]


def test_bits_do_not_depend_on_the_size_of_buckets():
    results = []
    for bucket_bytes in (1, 100, 500, 25 << 20):
        model = DataParallel(network(), devices=DEVICES, bucket_bytes=bucket_bytes)
        model(batch(5)).square().sum().backward()
        results.append(gradients_of(model))
    for found in results[1:]:
        assert all(map(torch.equal, found, results[0]))
    with pytest.raises(OptionError, match="bucket_bytes must be 1 or more, got -1"):
        DataParallel(network(), devices=DEVICES, bucket_bytes=-1)


@pytest.mark.parametrize("last", [5, 1], ids=["two replicas at last", "one replica at last"])
def test_batches_are_accumulated_before_they_are_summed(last, monkeypatch):
    plain = network()
    sizes = (4, 3, last)
    for seed, size in enumerate(sizes):
        plain(batch(size, seed)).square().sum().backward()
    expected = gradients_of(plain)
    model = DataParallel(network(), devices=DEVICES)
    ops, reduced = model.strategy.extended.cross_device_ops, []
    batch_reduce = type(ops).batch_reduce
    monkeypatch.setattr(
        type(ops), "batch_reduce", lambda *args, **kwargs: reduced.append(1) or batch_reduce(*args, **kwargs)
    )
    for seed, size in enumerate(sizes[:-1]):
        with model.no_sync():
            model(batch(size, seed)).square().sum().backward()
        assert gradients_of(model) == [None] * len(expected)
    assert not reduced
    model(batch(last, len(sizes) - 1)).square().sum().backward()
    torch.testing.assert_close(gradients_of(model), expected)
    model.zero_grad()
    model(batch(4, 0)).square().sum().backward()
    plain.zero_grad()
    plain(batch(4, 0)).square().sum().backward()
    torch.testing.assert_close(gradients_of(model), gradients_of(plain))


def test_a_parameter_that_the_last_batch_does_not_use_gets_what_was_accumulated():
    class Halves(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = torch.nn.Linear(8, 1), torch.nn.Linear(8, 1)

        def forward(self, x, *, is_left):
            return (self.left if is_left else self.right)(x)

    model = DataParallel(Halves(), devices=DEVICES, bucket_bytes=1)
    with model.no_sync():
        model(batch(4), is_left=True).sum().backward()
    model(batch(4), is_left=False).sum().backward()
    for own in (model.module.left, model.module.right):
        torch.testing.assert_close(own.weight.grad[0], batch(4).sum(0))


def test_what_was_accumulated_is_dropped_by_zero_grad():
    model = DataParallel(network(), devices=DEVICES)
    with model.no_sync():
        model(batch(4)).sum().backward()
    model.zero_grad()
    model(batch(4)).sum().backward()
    expected = network()
    expected(batch(4)).sum().backward()
    torch.testing.assert_close(gradients_of(model), gradients_of(expected))


def events_of(path):
    """The slices of a trace: category, name, start and end."""
    events = json.loads(path.read_text())["traceEvents"]
    return [(e["cat"], e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"]


def of_phase(events, phase):
    return [(start, end) for category, _, start, end in events if category == phase]


def is_inside(inner, outers):
    return any(outer[0] <= inner[0] and inner[1] <= outer[1] for outer in outers)


def test_a_trace_shows_sums_of_buckets_inside_the_backward_pass(tmp_path):
    model = DataParallel(network(), devices=DEVICES, bucket_bytes=1)
    with cd.trace(tmp_path / "run.json"):
        model(batch(6)).square().sum().backward()
    events = events_of(tmp_path / "run.json")
    forward, backward = of_phase(events, "forward"), of_phase(events, "backward")
    assert len(forward) == len(backward) == 2, "a row for each device"
    assert max(end for _, end in forward) <= min(start for start, _ in backward)
    sums = [(start, end) for _, name, start, end in events if name == "sum gradients"]
    assert len(sums) == 2 * len(list(model.parameters())), "a bucket for each parameter, on both devices"
    assert all(is_inside(each, backward) for each in sums)


def test_a_trace_shows_a_reduction_while_replicas_go_on_with_their_backward_passes(tmp_path):
    strategy = cd.MirroredStrategy(DEVICES)
    model = MirroredModule(network(), strategy, overlap="mean", bucket_bytes=1)
    has_reduced = []

    def wait_for_a_reduction():
        latest = time.monotonic() + 30
        while not model._arenas._pending and time.monotonic() < latest:
            time.sleep(0.001)  # the other replica is not that far yet
        model._arenas._pending[0].wait(timeout=30)
        has_reduced.append(True)

    class Slow(torch.autograd.Function):
        """The backward pass of the first layer waits for a reduction of a later one."""

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            wait_for_a_reduction()
            return gradient

    model.replicas[0][0].register_forward_hook(lambda module, args, output: Slow.apply(output))

    def step(x):
        model(x).square().sum().backward()
        model.reduce_gradients("mean")

    x = cd.PerReplica([batch(3, 1), batch(3, 2)])
    with cd.trace(tmp_path / "run.json"):
        strategy.run(step, (x,))
    assert has_reduced == [True]
    events = events_of(tmp_path / "run.json")
    backward = of_phase(events, "backward")
    first_bucket = [(start, end) for _, name, start, end in events if name == "bucket 0"]
    assert (len(backward), len(first_bucket)) == (2, 2), "a row for each device"
    assert is_inside(first_bucket[0], backward)


def test_ranges_have_names_in_torchs_profiler():
    model = DataParallel(network(), devices=DEVICES)
    config = torch.profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=config
    ) as profile:
        model(batch(6)).square().sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert {"crossdevice.forward", "crossdevice.backward", "crossdevice.sum gradients"} <= names
