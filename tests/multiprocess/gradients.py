"""A small network whose gradients, of numbers far apart, differ with the order of additions."""

import hashlib
import itertools

import torch


def network(widths, dtype):
    torch.manual_seed(3)
    first, *others = [torch.nn.Linear(*pair) for pair in itertools.pairwise(widths)]
    return torch.nn.Sequential(first, torch.nn.Tanh(), *others).to(dtype)


def batch(number, width, dtype):
    """One rank's share."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(16, width, generator=generator)
    return (x * 10.0 ** torch.randint(-3, 3, (16, 1), generator=generator)).to(dtype)


def gradients(model, x):
    model.zero_grad()
    model(x).float().square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def digest(tensors):
    return hashlib.sha256(
        b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)
    ).hexdigest()
