"""One test for each defect of TensorFlow's strategies that crossdevice does not have."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import numpy as np
import pytest
import torch

import crossdevice as cd

DEVICES = ["cpu:0", "cpu:1"]


def context():
    return cd.get_replica_context()


class Recording(cd.ReductionToOneDevice):
    """Remembers what it was asked to reduce."""

    def __init__(self):
        super().__init__(accumulation_fn=lambda arrays: arrays[0] * 0 + 7)
        self.dtypes = []

    def reduce(self, reduce_op, per_replica_value, *rest, **more):
        self.dtypes.append(str(per_replica_value.values[0].dtype))
        return super().reduce(reduce_op, per_replica_value, *rest, **more)

    def batch_reduce(self, reduce_op, value_destination_pairs, *rest, **more):
        pairs = list(value_destination_pairs)
        self.dtypes += [str(value.values[0].dtype) for value, _ in pairs]
        return super().batch_reduce(reduce_op, pairs, *rest, **more)


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_the_configured_object_is_always_used_also_for_the_cpu_and_for_int32(dtype):
    ops = Recording()
    strategy = cd.MirroredStrategy(DEVICES, ops)
    value = cd.PerReplica([np.ones(1, dtype), np.ones(1, dtype)])
    extended = strategy.extended
    assert extended.reduce_to("sum", value, "cpu:0").tolist() == [7]
    assert extended.reduce_to("sum", value, value).values[1].tolist() == [7]
    assert strategy.reduce("sum", value, axis=None).tolist() == [7]
    assert [array.tolist() for array in extended.batch_reduce_to("sum", [(value, "cpu:0")] * 2)] == [[7]] * 2
    result = strategy.run(lambda: context().all_reduce("sum", np.ones(1, dtype)))
    assert result.values[0].tolist() == [7]
    assert ops.dtypes[:5] == [dtype] * 5
    assert extended.cross_device_ops is ops


@pytest.mark.parametrize("make", [np.float32, torch.tensor, list], ids=["numpy", "torch", "numbers"])
def test_a_captured_constant_counts_once_for_every_replica(make):
    constant = make([2.0])
    strategy = cd.MirroredStrategy(DEVICES)
    for value in (constant, [constant, {"deep": constant}]):
        result = strategy.run(lambda value=value: context().all_reduce("sum", value))
        leaves = [result] if value is constant else [result[0], result[1]["deep"]]
        for leaf in leaves:
            assert [component.tolist() for component in leaf.values] == [[4.0], [4.0]]


@pytest.mark.parametrize("method", ["assign", "assign_add", "assign_sub"])
def test_a_per_replica_value_cannot_make_the_copies_of_a_variable_differ(method):
    strategy = cd.MirroredStrategy(DEVICES)
    variable = strategy.create_variable(1.0, "weights")
    different = cd.PerReplica([np.float32(1), np.float32(2)])
    with pytest.raises(
        ValueError, match="'weights' got a PerReplica: its copies would differ; reduce it first"
    ):
        getattr(variable, method)(different)
    for arguments in ((different,), ({"nested": [different]},)):
        with pytest.raises(ValueError, match="PerReplica"):
            strategy.extended.update(variable, lambda copy, x: copy.assign(x), arguments)
    with pytest.raises(ValueError, match="PerReplica"):
        strategy.extended.update(variable, lambda copy, x: copy.assign(x), kwargs={"x": different})
    assert [float(copy.value()) for copy in variable.values] == [1, 1]


def test_an_error_or_a_second_strategy_does_not_poison_the_process():
    first, second = cd.MirroredStrategy(DEVICES), cd.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    for strategy, size in itertools.product((first, second, first), (3, 5)):
        with pytest.raises(ValueError, match="has shape"):
            strategy.run(lambda: context().all_reduce("sum", np.ones(1 + context().replica_id_in_sync_group)))
        result = strategy.run(lambda size=size: context().all_reduce("sum", np.ones(size)))
        assert result.values[-1].tolist() == [strategy.num_replicas_in_sync] * size


def test_an_empty_batch_is_an_empty_list_and_generators_are_batches():
    extended = cd.MirroredStrategy(DEVICES).extended
    value = cd.PerReplica([np.int32([1]), np.int32([2])])
    assert extended.batch_reduce_to("sum", []) == []
    assert extended.batch_reduce_to("sum", iter(())) == []
    results = extended.batch_reduce_to("sum", ((value, "cpu:0") for _ in range(2)))
    assert [array.tolist() for array in results] == [[3], [3]]


def test_the_exact_mean_of_fixed_gradients_has_the_same_bits_however_they_are_dealt():
    generator = np.random.default_rng(24)
    gradients = [
        (generator.standard_normal(50) * 10.0 ** generator.integers(-12, 12, 50)).astype(np.float32)
        for _ in range(24)
    ]
    right = np.array(
        [sum(map(Fraction, map(float, column)), Fraction()) / 24 for column in zip(*gradients, strict=True)],
        dtype=object,
    )
    right = np.array([np.float32(float(value)) for value in right])
    exact = cd.CommunicationOptions(precision="exact")
    dice, answers = random.Random(8), set()
    for count in (1, 2, 3, 4, 8):
        strategy = cd.MirroredStrategy([f"cpu:{device}" for device in range(count)])
        for _ in range(4):
            order = dice.sample(range(24), 24)
            dealt = cd.PerReplica(
                [gradients[example] for example in order],
                devices=[f"cpu:{position % count}" for position in range(24)],
            )
            results = strategy.extended.reduce_to("mean", dealt, strategy.create_variable(0.0), exact)
            for result in strategy.experimental_local_results(results):
                answers.add(result.tobytes())
    assert len(answers) == 1
    assert np.allclose(np.frombuffer(answers.pop(), np.float32), right, rtol=1e-7, atol=0)
