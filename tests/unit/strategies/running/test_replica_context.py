"""Inside a replica function: who one is, and what all replicas do together."""

from __future__ import annotations

import contextvars
import threading

import numpy as np
import pytest
import torch

import crossdevice as cd
from crossdevice.errors import ContextError, ReduceOpError
from crossdevice.strategies.base import Strategy

NUM_REPLICAS = 3


def context():
    return cd.get_replica_context()


def own_replica():
    return context().replica_id_in_sync_group


class Counting(cd.DirectAllReduce):
    """Counts the batches it is asked for."""

    def __init__(self):
        super().__init__()
        self.batches = []

    def batch_reduce(self, reduce_op, value_destination_pairs, options=None, **more):
        self.batches.append((reduce_op, len(list(value_destination_pairs)), options))
        return super().batch_reduce(reduce_op, value_destination_pairs, options, **more)


@pytest.fixture
def strategy():
    return cd.MirroredStrategy([f"cpu:{replica}" for replica in range(NUM_REPLICAS)])


def test_a_replica_knows_its_number_its_device_and_its_strategy(strategy):
    def step():
        assert isinstance(context(), cd.ReplicaContext)
        assert cd.get_strategy() is context().strategy is strategy
        assert cd.has_strategy()
        assert not cd.in_cross_replica_context()
        assert context().num_replicas_in_sync == NUM_REPLICAS
        return own_replica(), context().devices

    numbers, (devices,) = strategy.run(step)
    assert numbers.values == (0, 1, 2)
    assert [str(device) for device in devices.values] == ["cpu:0", "cpu:1", "cpu:2"]
    assert cd.get_replica_context() is not None  # the default one again


def test_contextvars_of_the_caller_are_seen_and_changes_stay_inside(strategy):
    color = contextvars.ContextVar("color", default="none")
    color.set("red")

    def step():
        seen = color.get()
        color.set(f"blue {own_replica()}")
        context().all_reduce("sum", 1.0)
        return seen, color.get()

    before, after = strategy.run(step)
    assert before == "red"
    assert after.values == ("blue 0", "blue 1", "blue 2")
    assert color.get() == "red"


# -------------------------------------------------------------------- all_reduce


def trees(library):
    make = np.array if library == "numpy" else torch.tensor
    return lambda: {
        "dense": make([1.0, float(own_replica())]),
        "count": [make(own_replica())],
        "sparse": cd.IndexedSlices(make([[1.0 + own_replica()]]), make([own_replica()]), (5, 1)),
    }


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_whole_tree_is_reduced_in_one_batch_and_each_replica_gets_its_own_copy(library):
    ops = Counting()
    strategy = cd.MirroredStrategy([f"cpu:{replica}" for replica in range(NUM_REPLICAS)], ops)
    result = strategy.run(lambda: context().all_reduce("mean", trees(library)()))
    assert [(op.name, size) for op, size, _ in ops.batches] == [("MEAN", 1)]
    for component in result["dense"].values:
        assert component.tolist() == [1.0, 1.0]
    assert len({id(component) for component in result["dense"].values}) == NUM_REPLICAS
    assert [float(value) for value in result["count"][0].values] == [1.0] * NUM_REPLICAS
    slices = result["sparse"].values[2]
    assert slices.indices.tolist() == [0, 1, 2]
    assert np.allclose(slices.values.ravel(), [1 / 3, 2 / 3, 1])


def test_the_options_reach_the_algorithm():
    ops = Counting()
    strategy = cd.MirroredStrategy(["cpu:0", "cpu:1"], ops)
    options = cd.CommunicationOptions(precision="exact")
    strategy.run(lambda: context().all_reduce("sum", 1.0, options))
    assert ops.batches[0][2] == options


def test_a_subclass_that_brings_its_own_arithmetic_is_used():
    class Always7(cd.CrossDeviceOps):
        def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
            return cd.Mirrored([np.float64(7)] * len(per_replica_value.values), per_replica_value.devices)

    strategy = cd.MirroredStrategy(["cpu:0", "cpu:1"], Always7())
    result = strategy.run(lambda: context().all_reduce("sum", {"a": np.ones(()), "b": np.ones(())}))
    assert [float(value) for value in (*result["a"].values, *result["b"].values)] == [7] * 4


@pytest.mark.parametrize(
    ("op", "right"), [("sum", 6), ("MEAN", 2), ("min", 1), ("Max", 3), (cd.ReduceOp.PROD, 6)]
)
def test_all_operations_are_there(strategy, op, right):
    result = strategy.run(lambda: context().all_reduce(op, float(own_replica() + 1)))
    assert [float(value) for value in result.values] == [right] * NUM_REPLICAS


def test_an_unknown_operation_is_refused_in_the_replica(strategy):
    with pytest.raises(ReduceOpError):
        strategy.run(lambda: context().all_reduce("mode", 1.0))


def test_distributed_values_and_variables_stand_for_the_replicas_own(strategy):
    value = cd.PerReplica([1.0, 2.0, 3.0])
    variable = strategy.create_variable(np.float32([2.0]))
    result = strategy.run(lambda: context().all_reduce("sum", (value, variable)))
    assert [float(part.values[1].sum()) for part in result] == [6, 6]


def test_an_empty_tree_is_its_own_sum(strategy):
    assert strategy.run(lambda: context().all_reduce("sum", {})) == {}


def test_each_replica_gets_its_part_of_the_reduction_and_of_everyones_values(strategy):
    def step():
        value = {"x": np.arange(5, dtype=np.float32) + 10 * own_replica()}
        part = context().reduce_scatter("mean", value)["x"]
        return part, context().all_gather(part, axis=0), context().all_to_all(value)["x"]

    parts, wholes, moved = ([array.tolist() for array in result.values] for result in strategy.run(step))
    assert parts == [[10, 11], [12, 13], [14]]
    assert wholes == [[10, 11, 12, 13, 14]] * 3
    assert moved == [[0, 1, 10, 11, 20, 21], [2, 3, 12, 13, 22, 23], [4, 14, 24]]


def test_replicas_that_cut_other_axes_are_told(strategy):
    with pytest.raises(cd.errors.MismatchError, match=r"reduce_scatter\(SUM, axis=1\)"):
        strategy.run(lambda: context().reduce_scatter("sum", np.ones((3, 3)), axis=min(own_replica(), 1)))


def test_all_gather_takes_uneven_parts(strategy):
    result = strategy.run(lambda: context().all_gather(np.full(own_replica(), own_replica()), axis=0))
    assert [component.tolist() for component in result.values] == [[1, 2, 2]] * NUM_REPLICAS


def test_one_replica_reduces_and_gathers_with_itself():
    strategy = cd.MirroredStrategy(["cpu:0"])
    assert strategy.run(lambda: context().all_reduce("mean", np.float32([2]))).tolist() == [2]
    assert strategy.run(lambda: context().all_gather(np.float32([2]), axis=0)).tolist() == [2]
    assert strategy.run(lambda: context().merge_call(lambda s, x: x + 1, args=(2,))) == 3


# -------------------------------------------------------------------- merge_call


def test_a_merge_function_is_called_once_in_the_cross_replica_context(strategy):
    calls = []

    def merge(given, values, tree, *, key):
        calls.append((given, threading.current_thread()))
        assert cd.in_cross_replica_context()
        assert cd.get_strategy() is strategy
        assert tree == {"name": "same"}
        return given.extended.reduce_to("sum", values, "cpu:0"), key, "bare"

    def step():
        return context().merge_call(merge, (float(own_replica()), {"name": "same"}), {"key": own_replica()})

    total, key, bare = strategy.run(step)
    assert [float(value) for value in total.values] == [3, 3, 3]
    assert key.values == (0, 1, 2)
    assert bare == "bare"
    assert calls == [(strategy, threading.current_thread())]


def test_arrays_that_all_replicas_share_are_merged_once_per_replica(strategy):
    constant = np.float32([2.0])

    def merge(given, value):
        assert isinstance(value, cd.PerReplica)
        return given.extended.reduce_to("sum", value, value)

    result = strategy.run(lambda: context().merge_call(merge, (constant,)))
    assert [component.tolist() for component in result.values] == [[6.0]] * NUM_REPLICAS


def test_calls_in_a_foreign_context_are_refused_instead_of_hanging(strategy):
    kept = []

    def of_another_replica():
        kept.append(context())
        context().merge_call(lambda strategy: None)
        kept[0].all_reduce("sum", 1.0)

    with pytest.raises(ContextError, match="was called elsewhere"):
        strategy.run(of_another_replica)

    def in_a_merge_function():
        mine = context()
        mine.merge_call(lambda strategy: mine.all_reduce("sum", 1.0))

    with pytest.raises(ContextError, match="was called elsewhere"):
        strategy.run(in_a_merge_function)
    with pytest.raises(ContextError, match="was called elsewhere"):
        kept[0].all_reduce("sum", 1.0)

    def in_another_thread():
        mine, errors = context(), []

        def call():
            with pytest.raises(ContextError) as caught:
                mine.all_reduce("sum", 1.0)
            errors.append(caught.value)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        return len(errors)

    assert strategy.run(in_another_thread).values == (1, 1, 1)


def test_reductions_of_the_algorithm_itself_are_refused_in_a_replica(strategy):
    ops = strategy.extended.cross_device_ops
    with pytest.raises(RuntimeError, match="called inside replica"):
        strategy.run(lambda: ops.reduce("sum", cd.PerReplica([1.0]), "cpu:0"))


# -------------------------------------------------------------------- no strategy


def test_without_a_strategy_code_is_one_replica():
    strategy, alone = cd.get_strategy(), cd.get_replica_context()
    assert isinstance(strategy, Strategy)
    assert not cd.has_strategy()
    assert not cd.in_cross_replica_context()
    assert strategy.num_replicas_in_sync == alone.num_replicas_in_sync == 1
    assert alone.replica_id_in_sync_group == 0
    assert alone.strategy is strategy
    value = np.ones(2)
    assert alone.all_reduce("sum", value) is value
    assert alone.all_gather(value, axis=0) is value
    assert alone.reduce_scatter("sum", value) is value
    assert alone.all_to_all(value) is value
    assert alone.merge_call(lambda s, x: (s is strategy, x, cd.in_cross_replica_context()), (1,)) == (
        True,
        1,
        True,
    )


def test_without_a_strategy_values_are_their_own_reductions():
    strategy, value = cd.get_strategy(), np.ones(2)
    assert strategy.run(lambda x: x, args=(value,)) is value
    assert strategy.extended.reduce_to("sum", value, "cpu:0") is value
    assert strategy.extended.batch_reduce_to("sum", [(value, "cpu:0")]) == [value]
    assert strategy.reduce("mean", value, axis=None) is value
    with pytest.raises(NotImplementedError):
        strategy.extended.broadcast_to(value, "cpu:0")
    with pytest.raises(ValueError, match="list or tuple"):
        strategy.run(print, args=3)
    assert strategy.extended.update(cd.Variable(1.0), lambda variable, x: variable.value() + x, (2,)) == 3
    with strategy.scope():
        assert not cd.has_strategy()


def test_a_thread_started_in_the_context_of_a_replica_takes_part_in_its_calls():
    def step():
        totals = []
        thread = threading.Thread(
            target=contextvars.copy_context().run,
            args=(lambda: totals.append(cd.get_replica_context().all_reduce("sum", np.float32(1))),),
        )
        thread.start()
        thread.join()
        return float(totals[0])

    assert cd.MirroredStrategy(["cpu:0", "cpu:1"]).run(step).values == (2.0, 2.0)
