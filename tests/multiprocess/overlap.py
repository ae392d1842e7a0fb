"""Traces of two ways to train between processes, in which a reduction lies inside the backward pass."""

import json
import time

import torch

import crossdevice as cd
from crossdevice.execution.tracing import flight_recorder
from crossdevice.integrations.torch import MirroredModule, ReproducibleMean, reproducible_hook
from crossdevice.integrations.torch.spans import watch_backward
from crossdevice.values.device import Device

WAIT_SECONDS = 200.0


class UntilAReduction(torch.autograd.Function):
    """Its backward pass, which comes before that of the first layer, waits until a reduction has ended."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        end = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < end:
            if any(getattr(work, "phase", "") == "reduce" for work, *_ in list(flight_recorder.kept)):
                return gradient
            time.sleep(0.001)
        raise AssertionError("no reduction has ended while the backward pass goes on")


def network():
    torch.manual_seed(5)
    layers = [torch.nn.Linear(300, 300) for _ in range(4)]
    layers[0].register_forward_hook(lambda module, args, output: UntilAReduction.apply(output))
    return torch.nn.Sequential(*layers)


def reductions_inside(path, step):
    """Makes two steps, and says how many reductions of the second lie inside its backward pass."""
    step()
    flight_recorder.kept.clear()
    with cd.trace(path):
        step()
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    ((begin, end),) = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["cat"] == "backward"]
    return sum(e["cat"] == "reduce" and begin <= e["ts"] and e["ts"] + e["dur"] <= end for e in events)


def with_our_hook(group, path):
    model = torch.nn.parallel.DistributedDataParallel(network(), bucket_cap_mb=0.3)
    model.register_comm_hook(ReproducibleMean(group), reproducible_hook)

    def step():
        output = model(torch.ones(2, 300))
        watch_backward(output, (Device.parse("cpu:0"),))
        output.sum().backward()

    return reductions_inside(path, step)


def with_a_mirrored_module(group, path):
    strategy = cd.MultiWorkerMirroredStrategy(devices=["cpu:0"], group=group)
    model = MirroredModule(network(), strategy, overlap="mean", bucket_bytes=300 << 10)

    def replica():
        model(torch.ones(2, 300)).sum().backward()
        model.reduce_gradients("mean")
        return model.replicas[0][0].weight.grad.sum()

    return reductions_inside(path, lambda: strategy.run(replica))
