"""Replicas inherit what PyTorch keeps per thread, and PyTorch is never imported for it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import crossdevice as cd


@pytest.fixture
def strategy():
    return cd.MirroredStrategy(["cpu:0", "cpu:1"])


def modes():
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        str(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else None,
    )


@pytest.mark.parametrize(
    "enter",
    [
        torch.enable_grad,
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    ],
    ids=["grad", "no_grad", "inference", "autocast"],
)
def test_the_modes_of_the_caller_are_those_of_the_replicas_for_one_run(strategy, enter):
    plain = modes()
    with enter():
        here = modes()
        there = strategy.experimental_local_results(strategy.run(modes))
    assert [tuple(replica) for replica in there] == [here, here]
    after = strategy.experimental_local_results(strategy.run(modes))
    assert [tuple(replica) for replica in after] == [plain, plain]


def test_gradients_are_recorded_in_replicas(strategy):
    def step():
        weight = torch.ones(2, requires_grad=True)
        (weight * 3).sum().backward()
        return cd.get_replica_context().all_reduce("mean", weight.grad)

    assert [gradient.tolist() for gradient in strategy.run(step).values] == [[3, 3], [3, 3]]


def test_a_program_without_pytorch_does_not_get_it():
    code = (
        "import sys, crossdevice as cd\n"
        "strategy = cd.MirroredStrategy(['cpu:0', 'cpu:1'])\n"
        "cd.MirroredStrategy()\n"
        "strategy.run(lambda: cd.get_replica_context().merge_call(lambda s: None))\n"
        "strategy.create_variable(1.0).assign_add(1.0)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs here")
def test_gpus_that_do_not_exist_are_named_when_pytorch_can_tell():
    with pytest.raises(ValueError, match="cuda:9 does not exist here"):
        cd.MirroredStrategy(["cuda:9"])
