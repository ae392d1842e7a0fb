"""Clipping by a norm that is the true one, rounded once, however gradients are laid out and held."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from crossdevice.errors import DtypeError, OptionError
from crossdevice.integrations.torch import clip_grad_norm_
from crossdevice.testing import run_ranks

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]


def gradients(dtype, exponents):
    random = np.random.default_rng(2)
    made = []
    for shape in [(3000,), (7, 11), ()]:
        spread = 2.0 ** random.integers(*exponents, shape)
        values = torch.from_numpy(np.asarray(random.standard_normal(shape) * spread))
        made.append((torch.complex(values, -2 * values) if dtype.is_complex else values).to(dtype))
    return made


def with_gradients(values):
    parameters = [torch.nn.Parameter(torch.zeros_like(value)) for value in values]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = value.clone()
    return parameters


def true_square(values):
    real = [torch.view_as_real(each) if each.is_complex() else each for each in values]
    return sum(Fraction(element) ** 2 for each in real for element in each.double().reshape(-1).tolist())


def is_nearest(norm, square):
    """No float64 beside it is nearer to the square root."""
    below, above = (Fraction(math.nextafter(norm, to)) for to in (0, math.inf))
    return ((below + Fraction(norm)) / 2) ** 2 <= square <= ((above + Fraction(norm)) / 2) ** 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_norm_is_the_true_one_rounded_once(dtype):
    values = gradients(dtype, (-10, 10))
    norm = clip_grad_norm_(with_gradients(values), 1e9)
    assert is_nearest(float(norm), true_square(values))


@pytest.mark.parametrize("exponents", [(-1070, -900), (-600, -400), (400, 500), (-1000, 500)])
def test_squares_neither_overflow_nor_lose_their_last_bits(exponents):
    values = gradients(torch.float64, exponents)
    norm = clip_grad_norm_(with_gradients(values), 1e300)
    assert is_nearest(float(norm), true_square(values))


def test_gradients_are_scaled_as_pytorch_scales_them_and_short_ones_are_left_alone():
    values = gradients(torch.float32, (-3, 3))
    ours, theirs = with_gradients(values), with_gradients(values)
    norm = clip_grad_norm_(ours, 0.5)
    torch.testing.assert_close(norm.float(), torch.nn.utils.clip_grad_norm_(theirs, 0.5))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    clip_grad_norm_(with_gradients(values)[0], 1e9)
    left = with_gradients(values)
    clip_grad_norm_(left, 1e9)
    assert all(torch.equal(one.grad, value) for one, value in zip(left, values, strict=True))


def test_the_norm_does_not_depend_on_who_holds_what_nor_in_which_order():
    values = [each.reshape(-1) for each in gradients(torch.float32, (-30, 30))]
    whole = torch.cat(values)
    expected = float(clip_grad_norm_(with_gradients(values), 1.0))
    assert float(clip_grad_norm_(with_gradients([whole.flip(0)]), 1.0)) == expected

    def run(group):
        mine = with_gradients([whole[group.rank :: group.size]])
        return float(clip_grad_norm_(mine, 1.0, group=group))

    assert run_ranks(3, run) == [expected] * 3


def test_sparse_gradients_count_repeated_rows_once_added_up():
    table = torch.nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1, 1, 3])).sum().backward()
    assert float(clip_grad_norm_(table.parameters(), 1e9)) == math.sqrt(2 * 4 + 2)
    assert table.weight.grad.to_dense()[1].tolist() == [2.0, 2.0]
    assert float(clip_grad_norm_(table.parameters(), math.sqrt(10) / 2)) == math.sqrt(10)
    assert table.weight.grad.to_dense()[1].tolist() == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize(("value", "left"), [(math.inf, [0.0, math.nan]), (math.nan, [math.nan, math.nan])])
def test_norms_that_are_not_finite_scale_as_pytorchs(value, left):
    (weight,) = with_gradients([torch.tensor([1.0, value])])
    norm = clip_grad_norm_(weight, 1.0)
    assert float(norm) == pytest.approx(value, nan_ok=True)
    np.testing.assert_equal(weight.grad.tolist(), left)


def test_no_gradients_have_norm_zero():
    assert float(clip_grad_norm_([torch.nn.Parameter(torch.ones(1))], 1.0)) == 0.0


def test_what_has_no_norm_is_refused():
    weight = torch.nn.Parameter(torch.ones(1))
    for limit in (0, -1.0, math.nan):
        with pytest.raises(OptionError, match="max_norm must be a positive number"):
            clip_grad_norm_(weight, limit)
    with pytest.raises(OptionError, match="group must be a group of crossdevice"):
        clip_grad_norm_(weight, 1.0, group=torch.distributed.HashStore())
    counts = torch.zeros(1, dtype=torch.int64)
    counts.grad = torch.ones(1, dtype=torch.int64)
    with pytest.raises(DtypeError, match=r"torch\.int64"):
        clip_grad_norm_(counts, 1.0)


def test_shards_without_a_group_are_refused():
    fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    torch.distributed.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        for placement in (Shard(0), Replicate()):
            weight = torch.nn.Parameter(
                DTensor.from_local(torch.zeros(2), mesh, [placement], run_check=False)
            )
            weight.grad = DTensor.from_local(torch.tensor([3.0, 4.0]), mesh, [placement], run_check=False)
            if placement.is_shard():
                with pytest.raises(OptionError, match="gradients are sharded over several processes"):
                    clip_grad_norm_(weight, 1.0)
            else:
                assert float(clip_grad_norm_(weight, 1.0)) == 5.0
    finally:
        torch.distributed.destroy_process_group()
