"""Micro-batches have the same examples whoever runs them, in every epoch, after every restart."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import crossdevice as cd
from crossdevice.errors import OptionError

SETTINGS = [
    {"num_examples": 24, "size": 2, "per_step": 3},
    {"num_examples": 25, "size": 2, "per_step": 3},
    {"num_examples": 25, "size": 2, "per_step": 3, "drop_last": True},
    {"num_examples": 7, "size": 10, "per_step": 4},
    {"num_examples": 11, "size": 3, "per_step": 2, "seed": None},
]


def of_all_workers(num_workers, step=0, **settings):
    """The examples of each micro-batch of the rest of an epoch, by step and number."""
    found = {}
    for rank in range(num_workers):
        batches = cd.MicroBatches(**settings, rank=rank, num_workers=num_workers)
        batches.resume(step)
        numbers = [
            (at, number)
            for at in range(step, step - step % batches.num_steps + batches.num_steps)
            for number in batches.of_step(at)
        ]
        assert len(batches) == len(numbers)
        mine = dict(zip(numbers, batches, strict=True))
        assert not found.keys() & mine.keys()
        assert all(batches.indices(*key).tolist() == value for key, value in mine.items())
        found |= mine
    return found


@pytest.mark.parametrize("num_workers", [2, 3, 4, 6, 9])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_any_number_of_workers_runs_the_same_micro_batches(settings, num_workers):
    assert of_all_workers(num_workers, **settings) == of_all_workers(1, **settings)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_an_epoch_has_every_example_once(settings):
    batches = cd.MicroBatches(**settings)
    for epoch in range(3):
        assert batches.step == epoch * batches.num_steps
        seen = sorted(itertools.chain.from_iterable(batches))
        whole = settings["size"] * settings["per_step"] * batches.num_steps
        assert len(set(seen)) == len(seen) == min(whole, settings["num_examples"])


def test_a_run_goes_on_at_any_step_with_another_number_of_workers():
    settings = SETTINGS[1]
    num_steps = cd.MicroBatches(**settings).num_steps
    whole = {**of_all_workers(1, 0, **settings), **of_all_workers(1, num_steps, **settings)}
    for step in (1, num_steps - 1, num_steps, num_steps + 2):
        left = of_all_workers(3, step, **settings)
        end = step - step % num_steps + num_steps
        assert left == {key: value for key, value in whole.items() if step <= key[0] < end}


def test_the_order_is_another_one_in_each_epoch_and_for_each_seed_and_fixed_for_ever():
    def order(seed, epoch):
        batches = cd.MicroBatches(64, size=64, per_step=1, seed=seed)
        return tuple(batches.indices(epoch, 0).tolist())

    assert len({order(seed, epoch) for seed in (0, 1, 1 << 70) for epoch in range(5)}) == 15
    assert order(0, 0)[:8] == GOLDEN
    assert order(None, 3) == tuple(range(64))


GOLDEN = (12, 22, 33, 14, 17, 2, 41, 23)


def test_orders_look_random():
    firsts = [cd.MicroBatches(10, size=1, per_step=1, seed=seed).indices(0, 0)[0] for seed in range(2000)]
    counts = np.bincount(firsts, minlength=10)
    assert counts.min() > 140
    assert counts.max() < 260


def test_every_micro_batch_has_one_owner():
    for rank in range(3):
        batches = cd.MicroBatches(100, size=5, per_step=4, rank=rank, num_workers=3)
        assert [batches.owner(number) for number in range(4)] == [0, 1, 2, 0]
        assert batches.of_step(0) == [number for number in range(4) if batches.owner(number) == rank]


def test_a_data_loader_takes_it_as_its_batch_sampler():
    torch = pytest.importorskip("torch")
    dataset = torch.utils.data.TensorDataset(torch.arange(20) * 10)
    batches = cd.MicroBatches(20, size=3, per_step=2, rank=1, num_workers=2)
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=batches)
    assert len(loader) == 3
    expected = [(batches.indices(step, 1) * 10).tolist() for step in range(3)]
    assert [values.tolist() for (values,) in loader] == expected
    assert batches.step == batches.num_steps  # the next epoch


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_examples": 0}, "num_examples must be 1 or more"),
        ({"size": 1.5}, "size must be a whole number"),
        ({"rank": 2, "num_workers": 2}, "rank must be below num_workers=2; got 2"),
        ({"seed": -1}, "seed"),
        ({"num_examples": 3, "drop_last": True}, "3 examples do not fill one step of 3 micro-batches of 2"),
    ],
)
def test_arguments_outside_of_their_range_are_refused(changed, message):
    with pytest.raises(OptionError, match=message):
        cd.MicroBatches(**{**SETTINGS[0], **changed})


def test_micro_batches_that_do_not_exist_are_refused():
    batches = cd.MicroBatches(**SETTINGS[1])
    with pytest.raises(OptionError, match="step 4 has 1 micro-batches; got micro_batch=1"):
        batches.indices(4, 1)
    with pytest.raises(OptionError, match="micro_batch must be below per_step=3; got 3"):
        batches.owner(3)
    with pytest.raises(OptionError, match="step"):
        batches.resume(-1)
