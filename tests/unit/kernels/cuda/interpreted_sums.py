"""Running sums of a GPU by Triton's interpreter: the parts of the host, and all that parts cannot hold.

Collected only by test_triton_kernels.py, in a process in which TRITON_INTERPRET is set.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from crossdevice.integrations.torch import ExactGradients, gradient_sums
from crossdevice.kernels.cuda import gpu_sums
from crossdevice.kernels.cuda.gpu_sums import BLOCK, GpuSums
from crossdevice.kernels.host.running_sum import RunningSum
from unit.kernels.host.adversarial import adversarial, bits_of, dtype_named, spread_out

# The interpreter computes in NumPy, which has something to say about infinities.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

HOST = torch.device("cpu")
SIZES = (0, 3, BLOCK + 5)
WEIGHTS = (1, 7, (1 << 29) + 1, 4096)  # with the third, products of float32 have a rest
DTYPES = ("float16", "bfloat16", "float32", "float64")


def tensor_of(array):
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def added(of_calls, dtype):
    """Sums of the GPU, and of the host, of the same arrays."""
    of_gpu = GpuSums(SIZES, dtype_named(dtype), HOST)
    on_host = [RunningSum(size, dtype_named(dtype), "exact") for size in SIZES]
    for arrays, weight in of_calls:
        of_gpu.add({number: tensor_of(array) for number, array in arrays.items()}, weight)
        for number, array in arrays.items():
            on_host[number].add([array], [float(weight)])
    return of_gpu, on_host


def written(running, divisor=1):
    out = np.empty(running.size, running.dtype)
    running.write(out, Fraction(divisor))
    return bits_of(out).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_are_those_of_the_host(dtype):
    random, kind = np.random.default_rng(1), dtype_named(dtype)
    calls = [
        ({n: spread_out(random, kind, size, bits=8, exponents=20) for n, size in enumerate(SIZES)}, weight)
        for weight in WEIGHTS
    ]
    of_gpu, on_host = added(calls, dtype)
    assert (of_gpu.num_apart, of_gpu.is_full) == (0, False)
    for found, expected in zip(of_gpu.on_host(), on_host, strict=True):
        assert [part.view(np.int64).tolist() for part in found.parts] == [
            part.view(np.int64).tolist() for part in expected.parts
        ]


@pytest.mark.parametrize("capacity", [0, 1 << 12])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_parts_cannot_hold_and_infinities_end_in_the_result(dtype, capacity, monkeypatch):
    monkeypatch.setattr(gpu_sums, "MIN_CAPACITY", capacity)
    random, kind = np.random.default_rng(2), dtype_named(dtype)
    calls = [({n: adversarial(random, kind, size) for n, size in enumerate(SIZES)}, 1) for _ in range(3)]
    if dtype == "float32":
        for number, (arrays, _) in enumerate(calls):
            arrays[1][:] = np.float32([2.0**100, 2.0**-20, 2.0**-140])[number]
    of_gpu, on_host = (
        GpuSums(SIZES, dtype_named(dtype), HOST),
        [RunningSum(size, kind, "exact") for size in SIZES],
    )
    moved = None
    for arrays, weight in calls:
        for number, array in arrays.items():
            on_host[number].add([array], [float(weight)])
        if moved is None:
            of_gpu.add({number: tensor_of(array) for number, array in arrays.items()}, weight)
            moved = of_gpu.on_host() if of_gpu.is_full else None
        else:
            for number, array in arrays.items():
                moved[number].add([array], [float(weight)])
    if dtype in ("float32", "float64"):
        assert of_gpu.num_apart > 0
        assert of_gpu.is_full == (capacity == 0)
    for found, expected in zip(moved or of_gpu.on_host(), on_host, strict=True):
        assert written(found) == written(expected)
        assert written(found, 3) == written(expected, 3)


def test_arrays_may_be_absent_and_sums_begin_anew():
    of_gpu = GpuSums(SIZES, np.dtype("float32"), HOST)
    for value in (3.0, 5.0):
        of_gpu.clear()
        of_gpu.add({1: torch.full((3,), value)}, 2)
        of_gpu.add({2: torch.full((BLOCK + 5,), -0.0)}, 1)
        _, few, many = of_gpu.on_host()
        out = np.empty(BLOCK + 5, np.float32)
        many.write(out)
        assert np.signbit(out).all()
        few.write(out[:3], Fraction(2))
        assert out[:3].tolist() == [value] * 3


@pytest.mark.parametrize("capacity", [0, 1 << 12])
def test_gradients_on_a_gpu_are_those_of_the_host(capacity, monkeypatch):
    monkeypatch.setattr(gpu_sums, "MIN_CAPACITY", capacity)
    generator = torch.Generator().manual_seed(3)
    shapes = ((5, 7), (3,), (BLOCK + 1,))
    spread = 2.0 ** torch.randint(-60, 60, (4, 4, 2 * BLOCK), generator=generator)
    values = torch.randn(4, 4, 2 * BLOCK, generator=generator) * spread

    def finished():
        parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
        parameters.append(torch.nn.Parameter(torch.zeros(9, dtype=torch.complex64)))
        exact = ExactGradients(parameters)
        found = []
        for step in values:
            for number, row in enumerate(step):
                for parameter in parameters if number else parameters[1:]:
                    flat = row[: parameter.numel()].reshape(parameter.shape)
                    parameter.grad = (flat * (1 + 2j) if parameter.is_complex() else flat).clone()
                exact.add(weight=number + 1)
            exact.finish()
            found.append([torch.view_as_real(p.grad) if p.is_complex() else p.grad for p in parameters])
            for parameter in parameters:
                parameter.grad = None
        return [gradient.contiguous().view(torch.int32).tolist() for step in found for gradient in step]

    expected = finished()
    monkeypatch.setattr(gradient_sums, "is_added_on_gpu", lambda gradient: True)
    assert finished() == expected
