"""A small network, its batches and gradients, on one device and on several."""

import copy

import torch

from crossdevice.integrations.torch import DataParallel

TWO = ["cpu:0", "cpu:1"]
THREE = ["cpu:0", "cpu:1", "cpu:2"]


def network(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))


def batch(size, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 6, generator=generator), torch.randint(0, 3, (size,), generator=generator)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def gradients(model, *inputs, loss=lambda result: result.square().sum()):
    model.zero_grad()
    loss(model(*inputs)).backward()
    return {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}


def assert_same_gradients(module, *inputs, devices=TWO):
    expected = gradients(copy.deepcopy(module), *inputs)
    found = gradients(DataParallel(module, devices), *inputs)
    torch.testing.assert_close(found, expected)
