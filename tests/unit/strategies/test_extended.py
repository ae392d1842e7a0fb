"""Reducing, copying and updating under a strategy."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

import crossdevice as cd
from crossdevice.errors import ContextError, ConversionError, DestinationError, OptionError, ReduceOpError

MEAN_LIKE = ["mean", "MIN", cd.ReduceOp.MAX]


@pytest.fixture
def strategy():
    return cd.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.fixture
def extended(strategy):
    return strategy.extended


@pytest.fixture(params=["numpy", "torch"])
def value(request):
    make = np.float32 if request.param == "numpy" else torch.tensor
    return cd.PerReplica([make([1.0]), make([3.0])])


def test_a_distributed_value_goes_to_where_it_is_asked_for(strategy, extended, value):
    assert extended.reduce_to("sum", value, "cpu:5").tolist() == [4]
    mirrored = extended.reduce_to("Mean", value, strategy.create_variable(0.0))
    assert isinstance(mirrored, cd.Mirrored)
    assert [component.tolist() for component in mirrored.values] == [[2], [2]]


def test_structures_are_reduced_leaf_by_leaf(extended, value):
    result = extended.reduce_to("mean", {"a": [value], "b": 5, "c": None}, "cpu:0")
    assert result["a"][0].tolist() == [2]
    assert (result["b"], result["c"]) == (5, None)


@pytest.mark.parametrize("op", MEAN_LIKE)
def test_what_is_the_same_everywhere_is_its_own_mean(extended, op):
    for same in (cd.Mirrored([np.ones(1), np.ones(1)]), np.ones(2), 3, None):
        assert extended.reduce_to(op, same, "cpu:0") is same
        assert extended.batch_reduce_to(op, [(same, "cpu:0")])[0] is same


@pytest.mark.parametrize("op", ["sum", "prod"])
def test_the_sum_of_what_is_the_same_everywhere_is_refused(strategy, extended, op):
    variable = strategy.create_variable(1.0)
    for same in (cd.Mirrored([1.0, 1.0]), variable, np.ones(2), 3, 0.5):
        with pytest.raises(ReduceOpError, match="PerReplica"):
            extended.reduce_to(op, same, "cpu:0")
        with pytest.raises(ReduceOpError, match="PerReplica"):
            extended.batch_reduce_to(op, [(same, "cpu:0")])


def test_the_sum_of_zeros_is_zero(extended):
    zeros = np.zeros(3, np.int8)
    result = extended.reduce_to("sum", zeros, "cpu:0")
    assert result.tolist() == [0, 0, 0]
    assert result.dtype == np.int8
    assert not np.shares_memory(result, zeros)
    assert extended.reduce_to("sum", 0, "cpu:0") == 0
    assert extended.reduce_to("sum", 0.0, "cpu:0") == 0


def test_with_one_replica_any_value_is_its_sum():
    extended = cd.MirroredStrategy(["cpu:0"]).extended
    assert extended.reduce_to("sum", np.float32([2]), "cpu:0").tolist() == [2]
    assert float(extended.reduce_to("sum", 2.0, "cpu:0")) == 2


def test_a_variable_that_is_synchronized_on_reading_is_reduced(strategy, extended):
    counter = strategy.create_variable(
        1.0, synchronization=cd.VariableSynchronization.ON_READ, aggregation=cd.VariableAggregation.SUM
    )
    assert float(extended.reduce_to("sum", counter, "cpu:0")) == 2


@pytest.mark.parametrize("op", ["mode", None, cd.VariableAggregation.SUM])
def test_unknown_operations_are_refused(extended, op):
    with pytest.raises(ReduceOpError):
        extended.reduce_to(op, 1.0, "cpu:0")
    with pytest.raises(ReduceOpError):
        extended.batch_reduce_to(op, [])


@pytest.mark.parametrize("destinations", [["cpu:0"], ("cpu:0",), None, "", 3])
def test_destinations_that_are_none_are_refused(extended, destinations):
    for call in (
        lambda: extended.reduce_to("mean", 1.0, destinations),
        lambda: extended.batch_reduce_to("mean", [(1.0, destinations)]),
        lambda: extended.broadcast_to(1.0, destinations),
    ):
        with pytest.raises(DestinationError):
            call()


def test_batches_keep_their_order_and_mix_what_is_distributed_with_what_is_not(extended, value):
    results = extended.batch_reduce_to("mean", [(value, "cpu:0"), (7, "cpu:0"), ({"x": value}, value)])
    assert results[0].tolist() == [2]
    assert results[1] == 7
    assert results[2]["x"].values[1].tolist() == [2]
    for pairs in ([value], [(value,)], [[value, "cpu:0"]]):
        with pytest.raises(ConversionError, match="pair 0"):
            extended.batch_reduce_to("sum", pairs)


def test_in_a_replica_everything_is_refused(strategy, extended):
    for call in (
        lambda: extended.reduce_to("mean", 1.0, "cpu:0"),
        lambda: extended.batch_reduce_to("mean", [(1.0, "cpu:0")]),
        lambda: extended.broadcast_to(1.0, "cpu:0"),
        lambda: strategy.reduce("mean", 1.0, axis=0),
    ):
        with pytest.raises(RuntimeError, match="inside replica"):
            strategy.run(call)


def test_update_in_a_replica_updates_its_copy_with_its_arguments(strategy, extended):
    variable = strategy.create_variable([1.0])

    def step():
        number = cd.get_replica_context().replica_id_in_sync_group
        return extended.update(
            variable, lambda copy, x: copy.assign_add(x), (np.float32([number]),), group=False
        )

    strategy.run(step)
    assert [copy.numpy().tolist() for copy in variable.values] == [
        [1.0 + k] for k in range(len(variable.values))
    ]


def test_broadcast_copies_arrays_and_leaves_plain_numbers_alone(strategy, extended):
    variable = strategy.create_variable([1.0, 2.0])
    source = np.float32([5.0])
    copies = extended.broadcast_to(source, variable)
    assert [copy.tolist() for copy in copies.values] == [[5], [5]]
    assert not any(np.shares_memory(copy, source) for copy in copies.values)
    assert variable.values[0].value().tolist() == [1, 2]  # a destination is never written
    for number in (3, 0.5, True):
        assert extended.broadcast_to(number, variable) is number
    assert extended.broadcast_to(variable, "cpu:3").tolist() == [1, 2]


def test_update_calls_a_function_on_each_copy_with_its_own_arguments(strategy, extended):
    variable = strategy.create_variable([1.0])
    delta = extended.broadcast_to(np.float32([2.0]), variable)
    seen = []

    def apply(copy, change, factor, *, name):
        seen.append((copy.name, str(copy.device), change is delta.values[len(seen)], name))
        copy.assign_add(change * factor)
        return copy.value()

    result = extended.update(variable, apply, (delta, 3), {"name": "n"})
    assert isinstance(result, cd.Mirrored)
    assert [copy.tolist() for copy in result.values] == [[7], [7]]
    assert seen == [("Variable", "cpu:0", True, "n"), ("Variable/replica_1", "cpu:1", True, "n")]


def test_update_groups_results_as_asked(strategy, extended):
    variable = strategy.create_variable([1.0])
    shared = object()
    assert extended.update(variable, lambda copy: shared) is shared
    assert extended.update(variable, lambda copy: object()) is None
    assert extended.update(variable, lambda copy: copy.name, group=False) == (
        "Variable",
        "Variable/replica_1",
    )
    assigned = extended.update(variable, lambda copy: {"new": copy.assign_add(1.0)})
    assert [array.tolist() for array in assigned["new"].values] == [[2], [2]]
    alone = cd.MirroredStrategy(["cpu:0"])
    assert alone.extended.update(alone.create_variable(1.0), lambda copy: 7) == 7


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("aggregation", ["none", "mean"])
def test_a_variable_that_an_update_captures_is_written_once_on_each_device(num_replicas, aggregation):
    strategy = cd.MirroredStrategy([f"cpu:{k}" for k in range(num_replicas)])
    weights = strategy.create_variable([1.0, 1.0], aggregation=aggregation)
    momentum = strategy.create_variable([0.0, 0.0], aggregation=aggregation)
    steps = strategy.create_variable(0.0, synchronization="on_read", aggregation="sum")

    def apply(copy, gradient):
        momentum.assign(momentum * 0.5 + gradient)
        steps.assign_add(1.0)
        copy.assign_sub(momentum)
        return momentum.device, steps.read_value()

    for step in (1.0, 2.0):
        devices, counts = strategy.extended.update(weights, apply, (np.float32([1.0, 2.0]),), group=False)
        assert devices == strategy.extended.worker_devices
        assert [float(count) for count in counts] == [step] * num_replicas
    assert [copy.numpy().tolist() for copy in momentum.values] == [[1.5, 3.0]] * num_replicas
    assert [copy.numpy().tolist() for copy in weights.values] == [[-1.5, -4.0]] * num_replicas
    assert float(steps) == 2.0 * num_replicas


def test_an_update_is_in_the_cross_replica_context_of_its_strategy(strategy, extended):
    variable = strategy.create_variable(1.0)
    each = cd.Mirrored([1.0, 2.0])

    def look(*_):
        assert cd.get_strategy() is strategy
        assert cd.in_cross_replica_context()
        assert np.asarray(cd.PerReplica(each.values)) == each.current()
        return each + 1.0

    assert extended.update(variable, look, group=False) == (2.0, 3.0)
    assert extended.update_non_slot(extended.non_slot_devices([]), look, group=False) == (2.0, 3.0)
    assert not cd.has_strategy()


@pytest.mark.parametrize("thing", [cd.Variable(1.0), np.ones(2), cd.Mirrored([1.0, 1.0])])
def test_update_takes_only_variables_of_a_strategy(extended, thing):
    with pytest.raises(ConversionError, match="create_variable"):
        extended.update(thing, print)


def test_devices_and_containers(strategy, extended):
    variable = strategy.create_variable(1.0)
    assert [str(device) for device in extended.worker_devices] == ["cpu:0", "cpu:1"]
    assert extended.parameter_devices == extended.worker_devices == variable.devices
    assert not extended.experimental_require_static_shapes
    for copy in variable.values:
        assert extended.value_container(copy) is variable
    assert extended.value_container(variable) is variable
    assert extended.value_container(3) == 3


def test_hints_are_options_under_their_older_name_and_both_are_refused(strategy, extended, value):
    hints = cd.CommunicationOptions(bytes_per_pack=8)
    assert extended.reduce_to("sum", value, "cpu:0", experimental_hints=hints).tolist() == [4]
    pairs = [(value, "cpu:0")]
    assert extended.batch_reduce_to("sum", pairs, experimental_hints=hints)[0].tolist() == [4]
    own = strategy.run(
        lambda x: cd.get_replica_context().all_reduce("sum", x, experimental_hints=hints), args=(value,)
    )
    assert [component.tolist() for component in own.values] == [[4], [4]]
    for call in (
        lambda both: extended.reduce_to("sum", value, "cpu:0", **both),
        lambda both: extended.batch_reduce_to("sum", pairs, **both),
        lambda both: extended.cross_device_ops.reduce("sum", value, "cpu:0", **both),
        lambda both: extended.cross_device_ops.batch_reduce("sum", pairs, **both),
        lambda both: strategy.run(lambda: cd.get_replica_context().all_reduce("sum", 1.0, **both)),
        lambda both: cd.get_replica_context().all_reduce("sum", 1.0, **both),
    ):
        with pytest.raises(OptionError, match="both given"):
            call({"options": hints, "experimental_hints": hints})


def test_the_calls_of_older_optimizers_are_there(strategy, extended):
    variable, other = strategy.create_variable(1.0), cd.MirroredStrategy(["cpu:0", "cpu:1"])
    assert extended.variable_created_in_scope(variable)
    assert not other.extended.variable_created_in_scope(variable)
    assert not extended.variable_created_in_scope(cd.Variable(1.0))
    devices = extended.non_slot_devices([variable])
    assert devices == extended.worker_devices
    shares = cd.Mirrored([np.float32([1]), np.float32([2])])
    made = extended.update_non_slot(devices, lambda x, by: x * by, (shares,), {"by": 3})
    assert [component.tolist() for component in made.values] == [[3], [6]]
    assert extended.update_non_slot(devices, lambda: 5, group=False) == (5, 5)
    with extended.colocate_vars_with(variable):
        assert strategy.create_variable(2.0).devices == variable.devices
    with pytest.raises(ConversionError), other.extended.colocate_vars_with(variable):
        pass
    again = pickle.loads(pickle.dumps(strategy))
    for each in (strategy, again):
        found = each.extended.call_for_each_replica(lambda x, y: (x, y), (1,), {"y": 2})
        assert [part.values for part in found] == [(1, 1), (2, 2)]


def test_a_strategy_is_set_until_it_is_unset(strategy):
    cd.experimental_set_strategy(strategy)
    try:
        assert cd.get_strategy() is strategy
        assert isinstance(cd.Variable(1.0), cd.MirroredVariable)
        with strategy.scope(), pytest.raises(RuntimeError, match="inside the scope of"):
            cd.experimental_set_strategy(None)
    finally:
        cd.experimental_set_strategy(None)
    assert not cd.has_strategy()
    with strategy.scope(), pytest.raises(RuntimeError, match="inside the scope of"):
        cd.experimental_set_strategy(strategy)


def test_only_a_strategy_is_set(strategy):
    with pytest.raises(ConversionError, match="takes a strategy or None, got a list"):
        cd.experimental_set_strategy([strategy])
    assert not cd.has_strategy()


def test_calls_of_a_strategy_are_refused_inside_the_scope_of_another(strategy):
    value, variable = cd.PerReplica([1.0] * 2), strategy.create_variable(1.0)
    for call in (
        lambda: strategy.reduce("sum", value, axis=None),
        lambda: strategy.reduce("sum", cd.PerReplica([np.ones(2)] * 2), axis=0),
        lambda: strategy.gather(cd.PerReplica([np.ones(2)] * 2), axis=0),
        lambda: strategy.extended.reduce_to("sum", value, "cpu:0"),
        lambda: strategy.extended.batch_reduce_to("sum", [(value, "cpu:0")]),
        lambda: strategy.extended.broadcast_to(1.0, "cpu:0"),
        lambda: strategy.extended.update(variable, lambda copy: copy.assign(2.0)),
        lambda: strategy.extended.update_non_slot(["cpu:0"], lambda: 1),
    ):
        with cd.OneDeviceStrategy("cpu:0").scope(), pytest.raises(ContextError, match="inside the scope of"):
            call()
        with strategy.scope():
            call()


def test_a_structure_of_what_is_not_distributed_is_every_replicas(strategy):
    names = {"a": ["x", ("y", None)]}
    assert strategy.experimental_local_results(names) == (names, names)
    assert strategy.experimental_local_results([]) == ([], [])
    assert strategy.experimental_local_results(None) == (None,)
    assert cd.OneDeviceStrategy("cpu:0").experimental_local_results([1]) == ([1],)


def test_results_of_an_update_are_tuples_in_the_structure_that_the_function_returns(strategy):
    variable = strategy.create_variable(2.0)
    found = strategy.extended.update(variable, lambda copy: {"a": copy + 1.0, "b": None}, group=False)
    assert [float(each) for each in found["a"]] == [3.0, 3.0]
    assert found["b"] == (None, None)
    assert strategy.extended.update(variable, lambda _: None, group=False) == (None, None)


def test_a_name_of_a_device_is_no_list_of_devices(strategy):
    for wrong in ("/cpu:0", np.ones(())):
        with pytest.raises(ConversionError, match="takes the devices that non_slot_devices returned"):
            strategy.extended.update_non_slot(wrong, lambda: 1)


def test_a_variable_of_a_strategy_is_a_variable(strategy):
    mirrored = strategy.create_variable(1.0)
    counter = strategy.create_variable(1.0, synchronization="on_read", aggregation="sum")
    for each in (mirrored, counter, mirrored.values[0], cd.Variable(1.0)):
        assert isinstance(each, cd.Variable)
        assert issubclass(type(each), cd.Variable)
    assert not isinstance(cd.Mirrored([1.0, 1.0]), cd.Variable)
    assert not isinstance(mirrored, cd.SyncOnReadVariable)
    created = strategy.extended.variable_created_in_scope
    assert [created(each) for each in (mirrored, mirrored.values[1], cd.Variable(1.0))] == [True, True, False]


def test_a_counter_of_one_replica_is_counted_up_outside_of_it():
    counter = cd.OneDeviceStrategy("cpu:0").create_variable(2.0, synchronization="on_read", aggregation="sum")
    counter.assign_add(3.0)
    assert float(counter) == 5.0


def test_datasets_from_functions_are_there_by_their_older_name(strategy):
    (batch,) = strategy.experimental_distribute_datasets_from_function(
        lambda context: [np.full(context.get_per_replica_batch_size(4), k) for k in range(2)]
    )
    assert [part.tolist() for part in batch.values] == [[0, 0], [1, 1]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s, v: s.run(print, kwargs=3), "kwargs of run must be a dict, got an int"),
        (lambda s, v: s.extended.update(v, print, 3), "args of update must be a list or tuple, got an int"),
        (lambda s, v: s.extended.update_non_slot(["cpu:0"], print, "ab"), "args of update_non_slot must be"),
        (lambda s, v: s.extended.update_non_slot([], print), "takes the devices"),
        (lambda s, v: s.run(lambda: cd.get_replica_context().merge_call(print, None)), "args of merge_call"),
        (
            lambda s, v: cd.get_replica_context().merge_call(print, 3),
            "args of merge_call must be a list or tuple",
        ),
        (
            lambda s, v: s.run(lambda: cd.get_replica_context().all_reduce("sum", cd.PerReplica([]))),
            "0 compo",
        ),
        (lambda s, v: s.extended.read_var(3), "read_var takes a variable, got an int"),
        (lambda s, v: v.assign([[1.0], [1.0, 2.0]]), "lists differ in length"),
        (lambda s, v: s.create_variable([[1.0], [1.0, 2.0]]), "lists differ in length"),
        (lambda s, v: cd.PerReplica(3), "a PerReplica takes a list of components"),
        (lambda s, v: cd.PerReplica([1.0], 3), "devices must be a list of device names, got 3"),
        (lambda s, v: list(s.distribute_datasets_from_function(lambda _: [object()])), "holds an object"),
        (lambda s, v: cd.CommunicationOptions().merge("fast"), "options must be a CommunicationOptions"),
        (lambda s, v: cd.InputContext().get_per_replica_batch_size("8"), "global_batch_size must be a whole"),
    ],
)
def test_arguments_of_the_wrong_kind_are_named(strategy, call, message):
    with pytest.raises(cd.errors.CrossDeviceError, match=message):
        call(strategy, strategy.create_variable([1.0]))
