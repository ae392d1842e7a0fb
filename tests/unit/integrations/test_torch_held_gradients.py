"""Gradients of `no_sync` blocks reach `grad` once, whatever backward passes come in between."""

import copy
import dataclasses

import pytest
import torch

from crossdevice.integrations.torch import DataParallel
from unit.integrations.small_networks import THREE, batch, network


def held_and_plain(size=5):
    """A model that holds the gradients of a batch, and its plain twin, which has them."""
    plain = network()
    model = DataParallel(copy.deepcopy(plain), THREE)
    x, _ = batch(size)
    with model.no_sync():
        model(x).square().sum().backward()
    plain(x).square().sum().backward()
    return model, plain, x


def assert_same_after(model, plain, x):
    for each in (model, plain):
        each(x).square().sum().backward()
    found = {name: parameter.grad for name, parameter in model.module.named_parameters()}
    torch.testing.assert_close(found, {name: p.grad for name, p in plain.named_parameters()})


def test_gradients_that_are_asked_for_leave_those_held_alone():
    model, plain, x = held_and_plain()
    asked = [torch.autograd.grad(each(x).sum(), list(each.parameters())) for each in (model, plain)]
    torch.testing.assert_close(*asked)
    with model.no_sync():
        in_block = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    torch.testing.assert_close(in_block, asked[1])
    assert_same_after(model, plain, x)


def test_a_deep_copy_holds_what_the_original_holds_and_both_go_their_own_way():
    model, plain, x = held_and_plain()
    copied, plain_copy = copy.deepcopy(model), copy.deepcopy(plain)
    for own, parameter in zip(plain_copy.parameters(), plain.parameters(), strict=True):
        own.grad = parameter.grad.clone()  # which PyTorch leaves out of copies of parameters
    assert_same_after(model, plain, x)
    assert_same_after(copied, plain_copy, x)


def test_a_backward_pass_for_some_inputs_leaves_the_others_held():
    model, plain, x = held_and_plain()
    for each, module in ((model, model.module), (plain, plain)):
        each(x).square().sum().backward(inputs=[module[0].weight])
    assert_same_after(model, plain, x)


@pytest.mark.filterwarnings("error")
def test_tensors_that_were_computed_in_place_of_parameters_hold_nothing_back():
    model, plain, x = held_and_plain()
    with model.no_sync():
        twice = {name: 2 * parameter for name, parameter in model.named_parameters()}
        torch.func.functional_call(model, twice, (x,)).sum().backward()
    twice = {name: 2 * parameter for name, parameter in plain.named_parameters()}
    torch.func.functional_call(plain, twice, (x,)).sum().backward()
    assert_same_after(model, plain, x)


def test_what_is_held_is_delivered_also_if_a_dataclass_is_returned():
    @dataclasses.dataclass
    class Result:
        score: torch.Tensor

    class Switched(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = torch.nn.ModuleList([torch.nn.Linear(6, 1), torch.nn.Linear(6, 1)])

        def forward(self, x, part):
            return Result(self.parts[part](x))

    model = DataParallel(Switched(), THREE, bucket_bytes=1)
    with model.no_sync():
        model(torch.ones(5, 6), part=0).score.sum().backward()
    model(torch.ones(5, 6), part=1).score.sum().backward()
    assert [part.bias.grad.item() for part in model.module.parts] == [5, 5]
