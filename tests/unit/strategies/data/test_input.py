"""Every example of a dataset goes to exactly one replica."""

from __future__ import annotations

from collections import UserDict

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import crossdevice as cd
from crossdevice.errors import ConversionError, OptionError, ShapeMismatchError


@pytest.fixture
def strategy():
    return cd.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])


def lengths(value):
    return [len(component) for component in value.values]


def joined(values):
    return np.concatenate([np.asarray(part) for value in values for part in value.values]).tolist()


@pytest.mark.parametrize("num_examples", range(1, 14))
@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 7, 20])
def test_nothing_is_dropped_or_counted_twice(strategy, num_examples, batch_size):
    examples = np.arange(num_examples)
    dataset = strategy.experimental_distribute_dataset(examples, batch_size=batch_size)
    parts = list(dataset)
    assert len(dataset) == len(parts) == -(-num_examples // batch_size)
    assert joined(parts) == examples.tolist()
    for part in parts:
        assert max(lengths(part)) - min(lengths(part)) <= 1
        assert lengths(part) == sorted(lengths(part), reverse=True)


def test_structures_stay_together(strategy):
    images, labels = np.arange(10).reshape(5, 2), np.arange(5)
    for batch in strategy.experimental_distribute_dataset({"x": images, "y": (labels,)}, batch_size=5):
        assert lengths(batch["x"]) == lengths(batch["y"][0]) == [2, 2, 1]
        for x, y in zip(batch["x"].values, batch["y"][0].values, strict=True):
            assert (x[:, 0] == 2 * y).all()


@pytest.mark.parametrize("make", [list, iter], ids=["list", "iterator"])
def test_any_iterable_of_batches_is_a_dataset(strategy, make):
    batches = make([np.arange(4), np.arange(4, 6), [6, 7, 8]])
    parts = list(strategy.experimental_distribute_dataset(batches))
    assert [lengths(part) for part in parts] == [[2, 1, 1], [1, 1, 0], [1, 1, 1]]
    assert joined(parts) == list(range(9))


def test_a_dataset_can_be_gone_through_again(strategy):
    dataset = strategy.experimental_distribute_dataset([np.arange(3)])
    assert [len(list(dataset)) for _ in range(2)] == [1, 1]
    assert len(dataset) == 1


def test_a_pytorch_data_loader_is_a_dataset(strategy):
    loader = DataLoader(TensorDataset(torch.arange(10), torch.arange(10) * 2), batch_size=4)
    dataset = strategy.experimental_distribute_dataset(loader)
    parts = list(dataset)
    assert len(dataset) == 3
    assert [lengths(part[0]) for part in parts] == [[2, 1, 1], [2, 1, 1], [1, 1, 0]]
    assert joined(part[0] for part in parts) == list(range(10))
    assert all(isinstance(part, torch.Tensor) for part in parts[0][1].values)


def test_parts_of_host_arrays_are_views_on_the_replicas_devices(strategy):
    batch = np.arange(6)
    (part,) = strategy.experimental_distribute_dataset([batch])
    assert all(np.shares_memory(component, batch) for component in part.values)
    assert [str(device) for device in part.devices] == ["cpu:0", "cpu:1", "cpu:2"]


def test_the_parts_feed_a_run_and_a_mean_over_examples(strategy):
    examples = np.arange(7.0)
    total, count = 0.0, 0.0
    for batch in strategy.experimental_distribute_dataset(examples, batch_size=4):
        losses = strategy.run(lambda x: x * 2, args=(batch,))
        total += float(strategy.reduce("sum", losses, axis=0))
        count += sum(lengths(losses))
    assert total / count == 6


def test_a_user_dict_is_cut_as_its_dict(strategy):
    batch = UserDict(ids=np.arange(4), mask=torch.ones(4))
    part = next(iter(strategy.experimental_distribute_dataset([batch])))
    assert joined([part["ids"]]) == [0, 1, 2, 3]
    assert lengths(part["mask"]) == [2, 1, 1]


def test_one_replica_gets_bare_batches():
    alone = cd.MirroredStrategy(["cpu:0"])
    (batch,) = alone.experimental_distribute_dataset([(np.arange(3), np.arange(3))])
    assert isinstance(batch[0], np.ndarray)


@pytest.mark.parametrize("dataset", [np.ones(3), (np.ones(3), np.ones(3)), {"x": np.ones(3)}, "text", 3])
def test_arrays_without_a_batch_size_are_refused(strategy, dataset):
    with pytest.raises(ConversionError, match="iterable of batches"):
        strategy.experimental_distribute_dataset(dataset)


@pytest.mark.parametrize("batch_size", [0, -1, 1.5, True])
def test_bad_batch_sizes_are_refused(strategy, batch_size):
    with pytest.raises(OptionError, match="batch_size"):
        strategy.experimental_distribute_dataset(np.ones(3), batch_size=batch_size)


def test_batches_that_cannot_be_cut_are_named(strategy):
    uneven = {"x": np.ones(4), "y": np.ones(3)}
    with pytest.raises(ShapeMismatchError, match=r"batch 1\['y'\] has 3 examples; batch 1\['x'\] has 4"):
        list(strategy.experimental_distribute_dataset([{"x": np.ones(2)}, uneven]))
    whole = type("SparseTensor", (), {"shape": (2, 2)})()  # TensorFlow's has a shape and no slices
    with pytest.raises(ConversionError, match=r"batch 0\['x'\] is a SparseTensor, which cannot be cut"):
        list(strategy.experimental_distribute_dataset([{"x": whole}]))
    shape = type("TensorShape", (tuple,), {"__bool__": lambda _: True})()
    scalar = type("EagerTensor", (), {"shape": shape})()
    for batch in (np.float32(1), {"x": np.ones(2), "name": "text"}, 3.0, scalar):
        with pytest.raises(ConversionError, match="without a first axis"):
            list(strategy.experimental_distribute_dataset([batch]))
    with pytest.raises(ConversionError, match="no arrays"):
        list(strategy.experimental_distribute_dataset([()]))


def test_batches_of_a_function_are_dealt_out_and_missing_ones_are_empty(strategy):
    seen = []

    def make(context):
        seen.append(context)
        size = context.get_per_replica_batch_size(6)
        return [{"x": np.arange(start, start + size)} for start in range(0, 10, size)]

    parts = list(strategy.distribute_datasets_from_function(make))
    assert [lengths(part["x"]) for part in parts] == [[2, 2, 2], [2, 2, 0]]
    assert joined(part["x"] for part in parts) == list(range(10))
    assert (seen[0].num_input_pipelines, seen[0].input_pipeline_id) == (1, 0)
    assert seen[0].num_replicas_in_sync == 3
    with pytest.raises(ValueError, match="cannot be shared equally"):
        seen[0].get_per_replica_batch_size(7)
