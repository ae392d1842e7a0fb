"""Gradients of micro-batches: the same bits whoever ran them, in whatever order, however cut."""

from __future__ import annotations

import copy
from datetime import timedelta
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.distributed as dist

from conformance.oracle import rounded
from crossdevice.errors import ContextError, ConversionError, DtypeError, MismatchError, OptionError
from crossdevice.integrations.torch import ExactGradients, micro_batch_seed, seeded_micro_batch
from crossdevice.integrations.torch.communication_hook import formed_group
from crossdevice.testing import run_ranks

NUM_MICRO_BATCHES = 7

ASSIGNMENTS = {
    1: [[3, 1, 0, 6, 5, 4, 2]],
    2: [[0, 2, 4, 6], [5, 3, 1]],
    3: [[], [6, 5, 4, 3], [0, 1, 2]],
    4: [[0], [1], [2, 6], [5, 4, 3]],
    6: [[0], [1], [2], [3], [6, 4], [5]],
}


class Network(torch.nn.Module):
    """Every kind of parameter: dense, transposed, complex, 16 bits, frozen, unused, embeddings, dropout."""

    def __init__(self):
        super().__init__()
        self.rows = torch.nn.Embedding(20, 3, sparse=True)
        self.dense_rows = torch.nn.Embedding(9, 3)
        self.convolution = torch.nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last)
        self.linear = torch.nn.Linear(3, 2)
        self.narrow = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
        self.wide = torch.nn.Linear(3, 2, dtype=torch.float64)
        self.phase = torch.nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
        self.unused = torch.nn.Parameter(torch.ones(3))
        self.rare = torch.nn.Parameter(torch.ones(3))

    def forward(self, number):
        words = torch.tensor([number, number, 2 * number, 19])
        x = self.rows(words) + self.dense_rows(words % 9) * self.frozen
        x = torch.nn.functional.dropout(x, 0.4)
        image = torch.arange(36.0).reshape(1, 1, 6, 6) * (number + 1)
        total = self.linear(x).square().sum() + self.convolution(image).sigmoid().sum() * 1e-20
        total = total + self.narrow(x.bfloat16()).float().sum() + self.wide(x.double()).sum().float()
        total = total + (x * self.phase).abs().sum()
        return total + (self.rare * x).sum() if number == 3 else total


def network():
    torch.manual_seed(0)
    return Network()


def gradients_of(model):
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            assert gradient.is_coalesced()
            found[f"{name} rows"] = gradient.indices().numpy().tobytes()
            gradient = gradient.values()
        found[name] = None if gradient is None else gradient.contiguous().view(torch.uint8).numpy().tobytes()
    return found


def run_micro_batch(model, number):
    with seeded_micro_batch(1, 0, number):
        model(number).backward()


@pytest.fixture(scope="module")
def expected():
    """Of one process that runs all micro-batches, one after the other."""
    model = network()
    exact = ExactGradients(model.named_parameters())
    for number in range(NUM_MICRO_BATCHES):
        run_micro_batch(model, number)
        exact.add(weight=number + 1)
    step = exact.finish()
    assert (step.weight, step.micro_batches, step.bytes_sent) == (28, 7, 0)
    return gradients_of(model)


@pytest.mark.parametrize("bucket_bytes", [64, 1 << 24])
@pytest.mark.parametrize("size", list(ASSIGNMENTS))
def test_gradients_have_the_same_bits_on_any_number_of_workers(size, bucket_bytes, expected):
    assert run_workers(size, bucket_bytes) == [expected] * size


def run_workers(size, bucket_bytes):
    """Workers as threads whose gradients were made before: threads share the generators of dropout."""
    model = network()
    of_micro_batch = []
    for number in range(NUM_MICRO_BATCHES):
        run_micro_batch(model, number)
        of_micro_batch.append([each.grad for each in model.parameters()])
        model.zero_grad()

    def run(group):
        mine = copy.deepcopy(model)
        exact = ExactGradients(mine.named_parameters(), group, bucket_bytes=bucket_bytes)
        for _ in range(2):
            mine.zero_grad()
            for number in ASSIGNMENTS[size][group.rank]:
                for parameter, gradient in zip(mine.parameters(), of_micro_batch[number], strict=True):
                    parameter.grad = None if gradient is None else gradient.clone()
                exact.add(weight=number + 1)
            exact.finish()
        return gradients_of(mine)

    return run_ranks(size, run)


def test_gradients_are_the_true_mean_rounded_once():
    random = np.random.default_rng(4)
    values = (random.standard_normal((5, 50)) * 2.0 ** random.integers(-100, 60, (5, 50))).astype(np.float32)
    weight = torch.nn.Parameter(torch.zeros(50))
    exact = ExactGradients([weight])
    for number, row in enumerate(values):
        weight.grad = torch.from_numpy(row.copy())
        exact.add(weight=number + 2)
    exact.finish()
    for element in range(50):
        total = sum(Fraction(float(row[element])) * (n + 2) for n, row in enumerate(values))
        assert float(weight.grad[element]) == rounded(total / 20, "float32")


def test_unused_and_frozen_parameters_have_no_gradient_and_rare_ones_have_one_everywhere(expected):
    assert expected["unused"] is None
    assert expected["frozen"] is None
    assert expected["rare"] is not None


def test_a_sum_is_not_divided():
    weight = torch.nn.Parameter(torch.zeros(2))
    exact = ExactGradients([weight])
    for _ in range(3):
        (weight * torch.tensor([1.0, 0.1])).sum().backward()
        exact.add()
    assert exact.weight == exact.micro_batches == 3
    exact.finish("sum")
    assert weight.grad.tolist() == [3.0, float(np.float32(3 * float(np.float32(0.1))))]


def test_overflow_is_found_on_all_workers_alike_by_a_gradient_scaler():
    def run(group):
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
        exact = ExactGradients([weight], group)
        for step in range(3):
            optimizer.zero_grad()
            factor = torch.inf if (step, group.rank) == (1, 1) else 1.0
            scaler.scale((weight * factor).sum()).backward()
            exact.add(weight=2)
            exact.finish()
            scaler.step(optimizer)
            scaler.update()
        return weight.tolist(), scaler.get_scale()

    assert run_ranks(3, run) == [([0.0] * 3, 2.0**11)] * 3


def test_elements_that_float64_cannot_hold_travel_and_are_reported():
    def run(group):
        weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
        exact = ExactGradients([weight], group)
        for exponent in (300, 0, -100, -300) if group.rank == 0 else (300,):
            weight.grad = torch.tensor([2.0**exponent, 1.0], dtype=torch.float64) * (-1) ** group.rank
            exact.add()
        step = exact.finish("sum")
        return step.apart, weight.grad.tolist()

    total = float(rounded(Fraction(1) + Fraction(2) ** -100 + Fraction(2) ** -300, "float64"))
    assert run_ranks(2, run) == [(1, [total, 3.0]), (0, [total, 3.0])]


@pytest.mark.parametrize("weight", [-1, 1.5, True, "3", 2**53 + 1, None])
def test_weights_that_are_not_whole_numbers_are_refused(weight):
    exact = ExactGradients([torch.nn.Parameter(torch.zeros(1))])
    with pytest.raises(OptionError, match="whole number"):
        exact.add(weight)


def test_arguments_outside_of_their_range_are_refused(monkeypatch):
    weight = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(OptionError, match="no parameters"):
        ExactGradients([])
    with pytest.raises(OptionError, match="group must be"):
        ExactGradients([weight], "gloo")
    with pytest.raises(OptionError, match="bucket_bytes"):
        ExactGradients([weight], bucket_bytes=0)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(OptionError, match="one of 4, and no group says so"):
        ExactGradients([weight])


def test_gradients_that_would_be_counted_twice_or_not_at_all_are_refused():
    weight = torch.nn.Parameter(torch.ones(1))
    exact = ExactGradients([("w", weight)])
    with pytest.raises(ContextError, match="no worker has added"):
        exact.finish()
    weight.sum().backward()
    with pytest.raises(MismatchError, match="this worker has a gradient of w that was not added"):
        exact.finish()
    exact.add()
    exact.finish()
    weight.sum().backward()  # no zero_grad before
    with pytest.raises(ContextError, match="the gradient of w still holds the result of the last step"):
        exact.add()
    weight.grad = None
    weight.sum().backward()
    exact.add(0)
    with pytest.raises(OptionError, match="add up to 0"):
        exact.finish()
    exact.clear()
    assert exact.micro_batches == 0


def test_gradients_that_cannot_be_added_are_refused_before_any_is():
    first, second = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2, 2))
    exact = ExactGradients([("first", first), ("second", second)])
    first.grad = torch.ones(2)
    second.grad = torch.ones(2, 2).to_sparse(2)
    with pytest.raises(ConversionError, match=r"the gradient of second is a torch.sparse_coo tensor"):
        exact.add()
    second.grad = torch.ones(2, 2)
    exact.add()
    second.grad = torch.ones(2, 2).to_sparse(1)
    with pytest.raises(DtypeError, match="rows of float32; those added before are dense of float32"):
        exact.add()
    second.grad = None
    exact.finish()
    assert first.grad.tolist() == [1.0, 1.0]


def test_workers_that_differ_are_told_alike_and_may_go_on():
    def run(group):
        size = 3 if group.rank == 2 else 2
        weight, odd = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(size))
        exact = ExactGradients([weight, odd], group)
        odd.sum().backward()
        exact.add()
        with pytest.raises(
            MismatchError, match=r"rank 2 .*other parameters than rank 0 .*: number 1 is .* \[3\]"
        ):
            exact.finish()
        exact = ExactGradients([weight], group)
        with pytest.raises(MismatchError, match=r"rank 1 .*another op"):
            exact.finish("sum" if group.rank == 1 else "mean")
        weight.sum().backward()
        exact.add()
        return exact.finish().micro_batches

    assert run_ranks(3, run) == [3] * 3


def _refusal_of(exact):
    """What `add`, where there are gradients, and `finish` say."""
    try:
        if any(each.grad is not None for each in exact._parameters):
            exact.add()
        exact.finish()
    except MismatchError as error:
        return str(error)
    return ""


def test_parameters_that_a_worker_lacks_or_has_in_another_order_are_named():
    def errors(own_names, **options):
        def run(group):
            parameters = {name: torch.nn.Parameter(torch.ones(2)) for name in own_names[group.rank]}
            exact = ExactGradients(parameters.items(), group, **options)
            sum(each.sum() for each in parameters.values()).backward()
            return _refusal_of(exact)

        return run_ranks(2, run)

    for options in ({}, {"is_sharded": True}):
        for error in errors([["a", "b", "c"], ["a"]], **options):
            assert error.startswith("rank 1 ")
            assert error.endswith("it has 1, not 3; it lacks b, c")
        for error in errors([["a", "b"], ["b", "a"]], **options):
            assert error.endswith("number 0 is b of torch.float32 [2], not a of torch.float32 [2]")


def test_a_worker_that_adds_less_often_to_sharded_sums_is_told_how_often():
    def run(group):
        weight = torch.nn.Parameter(torch.ones(2))
        exact = ExactGradients([weight], group, is_sharded=True)
        weight.sum().backward()
        exact.add()
        if group.rank == 0:
            weight.sum().backward()
        return _refusal_of(exact)

    for error in run_ranks(2, run):
        assert "equally often on all; add(0) without a micro-batch" in error


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_additions_of_nothing_are_not_counted_on_any_number_of_workers(size, is_sharded):
    def run(group):
        weight = torch.nn.Parameter(torch.ones(2))
        exact = ExactGradients([weight], group, is_sharded=is_sharded)
        if group.rank == 0:
            weight.sum().backward()
            exact.add(3)
            exact.add(0)
        else:
            exact.add(0)
            exact.add(0)
        return exact.finish().micro_batches

    assert run_ranks(size, run) == [1] * size


@pytest.mark.parametrize("backend", ["gloo", "crossdevice"])
def test_groups_made_from_one_of_pytorch_have_its_timeout(backend):
    dist.init_process_group(
        backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=17)
    )
    try:
        assert formed_group(None, "a test").timeout_seconds == 17
        assert formed_group(dist.group.WORLD, "another test").timeout_seconds == 17
    finally:
        dist.destroy_process_group()


def test_a_compiled_module_and_a_fused_optimizer_train_alike():
    def run(numbers):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter.copy_(
                    torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape) * (number + 1)
                )
        called = torch.compile(model, backend="aot_eager")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        exact = ExactGradients(called.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            for number in numbers:
                called(torch.linspace(0, number + 1, 4 * (number + 1)).reshape(-1, 4)).mean().backward()
                exact.add(weight=number + 1)
            exact.finish()
            optimizer.step()
        return [parameter.tolist() for parameter in model.parameters()]

    assert run([0, 1, 2, 3]) == run([3, 1, 0, 2])


@pytest.mark.parametrize("bucket_bytes", [64, 1 << 24])
@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_sharded_sums_have_the_same_bits_and_a_share_of_the_memory(size, bucket_bytes):
    shapes = {"float32": (40, 5), "bfloat16": (33,), "float64": (7, 3), "complex64": (6,)}
    random = np.random.default_rng(7)
    wide = random.standard_normal((NUM_MICRO_BATCHES, 200)) * 2.0 ** random.integers(
        -70, 60, (NUM_MICRO_BATCHES, 200)
    )

    def run(group, assignment, *, is_sharded):
        parameters = [
            torch.nn.Parameter(torch.zeros(shape, dtype=getattr(torch, dtype)))
            for dtype, shape in shapes.items()
        ]
        rare, unused = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
        parameters += [rare, unused]
        exact = ExactGradients(parameters, group, bucket_bytes=bucket_bytes, is_sharded=is_sharded)
        found = []
        for _ in range(2):
            for turn in range(max(map(len, assignment))) if is_sharded else range(len(assignment[0])):
                mine = assignment[group.rank if group else 0]
                number = mine[turn] if turn < len(mine) else None
                for parameter in parameters[:4] if number is not None else ():
                    flat = torch.from_numpy(wide[number, : parameter.numel()].copy())
                    parameter.grad = flat.reshape(parameter.shape).to(parameter.dtype)
                if number == 3:
                    rare.grad = torch.tensor([torch.inf, -0.0, 1.0])
                exact.add(number + 1 if number is not None else 0)
            held = exact._shards.num_elements if exact._shards else 0
            step = exact.finish()
            assert (step.weight, step.micro_batches) == (28, 7)
            assert unused.grad is None
            found += [parameter.grad.reshape(-1).view(torch.uint8).tolist() for parameter in parameters[:5]]
            for parameter in parameters:
                parameter.grad = None
        return found, held

    expected, _ = run(None, ASSIGNMENTS[1], is_sharded=False)
    results = run_ranks(size, lambda group: run(group, ASSIGNMENTS[size], is_sharded=True))
    assert [found for found, _ in results] == [expected] * size
    if size > 1:
        assert sum(held for _, held in results) == 200 + 33 + 21 + 12 + 3
        assert max(held for _, held in results) < 269 // size + 34


def test_what_one_worker_cannot_add_to_shards_is_told_to_all():
    def run(group):
        weight = torch.nn.Parameter(torch.ones(2, 2))
        exact = ExactGradients([("w", weight)], group, is_sharded=True)
        weight.grad = torch.ones(2, 2).to_sparse(1) if group.rank == 1 else torch.ones(2, 2)
        kind = ConversionError if group.rank == 1 else MismatchError
        with pytest.raises(
            kind, match=r"the gradient of w is a torch.sparse_coo tensor of torch.float32; sums"
        ):
            exact.add()
        weight.grad = torch.full((2, 2), float(group.rank))
        exact.add(weight=3)
        step = exact.finish()
        return step.weight, weight.grad.tolist()

    assert run_ranks(2, run) == [(6, [[0.5, 0.5]] * 2)] * 2


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (lambda model: model, "got a Linear"),
        (lambda model: model.weight, "got a Parameter"),
        (lambda model: dict(model.named_parameters()), "got a dict"),
        (lambda model: torch.optim.SGD(model.parameters()).param_groups, "parameter 0 is a dict"),
        (lambda model: [np.ones(2)], "parameter 0 is an ndarray"),
    ],
)
def test_what_are_no_parameters_is_refused_at_once(given, named):
    with pytest.raises(OptionError, match=named):
        ExactGradients(given(torch.nn.Linear(3, 2)))


@pytest.mark.parametrize("is_sharded", [False, True])
def test_workers_with_other_bucket_sizes_agree_on_one(is_sharded):
    def program(group):
        weight = torch.nn.Parameter(torch.zeros(100))
        exact = ExactGradients([weight], group, bucket_bytes=64 << group.rank, is_sharded=is_sharded)
        weight.grad = torch.arange(100.0) * group.rank
        exact.add()
        exact.finish("sum")
        return weight.grad.tolist()

    assert run_ranks(3, program) == [(torch.arange(100.0) * 3).tolist()] * 3


def test_the_number_of_a_micro_batch_is_a_whole_one_of_any_type():
    expected = micro_batch_seed(1, 2, 3)
    assert micro_batch_seed(np.int64(1), np.uint8(2), torch.tensor(3)) == expected
    for arguments in ((1.0, 2, 3), (1, "2", 3), (1, 2, torch.tensor([3.0]))):
        with pytest.raises(OptionError, match="must be a whole number"):
            micro_batch_seed(*arguments)
