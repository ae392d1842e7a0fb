"""A strategy runs one function per device and combines what comes back."""

from __future__ import annotations

import logging
import os
import threading

import numpy as np
import pytest

import crossdevice as cd
from crossdevice.errors import ContextError, ConversionError, DeviceError, OptionError, StructureMismatchError

DEVICES = ["cpu:0", "cpu:1", "cpu:2"]


@pytest.fixture
def strategy():
    return cd.MirroredStrategy(DEVICES)


def own_replica():
    return cd.get_replica_context().replica_id_in_sync_group


# -------------------------------------------------------------------- devices


def test_without_devices_and_gpus_every_usable_core_is_one(monkeypatch):
    monkeypatch.setattr("crossdevice.strategies.running.loaded_libraries.num_torch_gpus", lambda: 0)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = cd.MirroredStrategy().extended.worker_devices
    assert [str(device) for device in found] == [f"cpu:{core}" for core in range(cores)]


def test_without_devices_all_gpus_that_pytorch_sees_are_used(monkeypatch):
    monkeypatch.setattr("crossdevice.strategies.running.loaded_libraries.num_torch_gpus", lambda: 2)
    found = cd.MirroredStrategy().extended.worker_devices
    assert [str(device) for device in found] == ["cuda:0", "cuda:1"]


def test_a_device_given_twice_gets_two_replicas():
    strategy = cd.MirroredStrategy(["cpu:0", "/device:CPU:0", "CPU:1"])
    assert strategy.num_replicas_in_sync == 3
    result = strategy.run(lambda: cd.get_replica_context().all_reduce("sum", np.float32(1)))
    assert [float(value) for value in result.values] == [3, 3, 3]
    assert [str(device) for device in result.devices] == ["cpu:0", "cpu:0", "cpu:1"]


@pytest.mark.parametrize(
    "devices", [["cpu:x"], ["nonsense"], "cpu:0", 3, ["cpu:-1"], ["/job:far/cpu:0"], np.ones(2), ""], ids=repr
)
def test_bad_devices_are_refused(devices):
    with pytest.raises(DeviceError):
        cd.MirroredStrategy(devices)


def test_no_device_at_all_is_refused():
    for make in (cd.MirroredStrategy, lambda none: cd.MultiWorkerMirroredStrategy(devices=none)):
        with pytest.raises(OptionError, match="devices is empty; expected at least one, or None for all"):
            make([])


@pytest.mark.parametrize(
    ("ops", "found"),
    [
        ("ring", "str"),
        (cd.RingAllReduce, r"the class RingAllReduce; make one: RingAllReduce\(\)"),
        (3, "int"),
    ],
)
def test_something_else_than_an_algorithm_is_refused(ops, found):
    with pytest.raises(OptionError, match=f"must be a CrossDeviceOps or None, got {found}"):
        cd.MirroredStrategy(DEVICES, cross_device_ops=ops)


def test_the_choice_and_its_reason_are_explained_and_logged(caplog):
    with caplog.at_level(logging.INFO, logger="crossdevice"):
        strategy = cd.MirroredStrategy(DEVICES)
        given = cd.MirroredStrategy(DEVICES, cd.RingAllReduce())
    assert "DirectAllReduce: all devices share the host's memory" in strategy.explain()
    assert "RingAllReduce: given to the strategy" in given.explain()
    assert [record.getMessage() for record in caplog.records] == [strategy.explain(), given.explain()]


# -------------------------------------------------------------------- scope


def test_a_scope_makes_the_strategy_current_and_may_be_entered_again(strategy):
    assert not cd.has_strategy()
    with strategy.scope() as entered, strategy.scope():
        assert entered is strategy
        assert cd.get_strategy() is strategy
        assert cd.has_strategy()
        assert cd.in_cross_replica_context()
        assert cd.get_replica_context() is None
    assert not cd.has_strategy()


def test_a_scope_or_run_in_another_strategys_scope_is_refused(strategy):
    other = cd.MirroredStrategy(["cpu:0"])
    with other.scope():
        with pytest.raises(RuntimeError, match="do not nest"), strategy.scope():
            pass
        with pytest.raises(ContextError, match="do not nest"):
            strategy.run(own_replica)
        assert cd.get_strategy() is other


def test_a_scope_inside_a_replica_is_refused(strategy):
    with pytest.raises(ContextError, match="scope was entered inside"):
        strategy.run(lambda: strategy.scope().__enter__())


def test_another_thread_is_not_in_the_scope(strategy):
    seen = []
    with strategy.scope():
        thread = threading.Thread(target=lambda: seen.append(cd.has_strategy()))
        thread.start()
        thread.join()
    assert seen == [False]


# -------------------------------------------------------------------- run


def test_each_replica_gets_its_own_components_of_nested_arguments(strategy):
    number = cd.PerReplica([1, 2, 3])
    mirrored = cd.Mirrored(["a", "a", "a"])
    seen = strategy.run(
        lambda x, tree, *, key: (x, tree["deep"][0], tree["same"], key),
        args=(number, {"deep": [mirrored], "same": "s"}),
        kwargs={"key": number},
    )
    assert seen[0].values == seen[3].values == (1, 2, 3)
    assert (seen[1], seen[2]) == ("a", "s")


def test_arguments_must_be_a_list_or_tuple(strategy):
    with pytest.raises(ValueError, match="list or tuple"):
        strategy.run(print, args=np.ones(3))


def test_an_argument_with_another_number_of_components_is_refused(strategy):
    with pytest.raises(StructureMismatchError, match="has 2 components; expected 3"):
        strategy.run(print, args=(cd.PerReplica([1, 2]),))


def test_results_are_structures_of_per_replica_values(strategy):
    result = strategy.run(lambda: {"loss": own_replica(), "pair": (own_replica() * 2.0, None)})
    assert result["loss"].values == (0, 1, 2)
    assert result["pair"][0].values == (0, 2, 4)
    assert result["pair"][1] is None


def test_objects_that_all_replicas_share_stay_bare_but_arrays_and_numbers_do_not(strategy):
    shared, array = object(), np.ones(2)
    assert strategy.run(lambda: (shared, "text", None)) == (shared, "text", None)
    assert strategy.run(lambda: 1.0).values == (1.0, 1.0, 1.0)
    assert strategy.run(lambda: array).values == (array, array, array)
    assert float(strategy.reduce("sum", strategy.run(lambda: 1), axis=None)) == 3


def test_a_replica_may_return_none_where_others_return_something(strategy):
    result = strategy.run(lambda: 5.0 if own_replica() == 0 else None)
    assert result.values == (5.0, None, None)


def test_structures_that_differ_name_the_odd_one_out(strategy):
    with pytest.raises(StructureMismatchError, match=r"replica 1 \(cpu:1\) has structure"):
        strategy.run(lambda: [1.0] if own_replica() == 1 else {"a": 1.0})


def test_the_result_of_one_replica_is_bare():
    strategy = cd.MirroredStrategy(["cpu:0"])
    assert strategy.run(lambda x: x + 1, args=(cd.PerReplica([1]),)) == 2
    assert float(strategy.reduce("sum", 2.0, axis=None)) == 2
    assert strategy.experimental_local_results(2) == (2,)


def test_replicas_run_at_once_each_in_its_own_thread(strategy):
    everybody = threading.Barrier(3)

    def meet_outside_of_crossdevice():
        everybody.wait(timeout=120)  # one after another, this would break
        return threading.current_thread().name

    assert strategy.run(meet_outside_of_crossdevice).values == (
        "replica 0 (cpu:0)",
        "replica 1 (cpu:1)",
        "replica 2 (cpu:2)",
    )


def test_a_nested_run_is_refused_in_replicas_and_of_other_strategies(strategy):
    with pytest.raises(RuntimeError, match="run was called inside ReplicaContext"):
        strategy.run(lambda: strategy.run(own_replica))
    other = cd.MirroredStrategy(["cpu:0"])
    with pytest.raises(RuntimeError, match="do not nest"):
        strategy.run(lambda: cd.get_replica_context().merge_call(lambda _: other.run(own_replica)))
    with pytest.raises(RuntimeError, match="do not nest"):
        strategy.run(lambda: other.run(own_replica))


def test_two_threads_may_run_the_same_strategy_at_once(strategy):
    everybody = threading.Barrier(6)
    results = []

    def step():
        everybody.wait(timeout=120)
        return float(cd.get_replica_context().all_reduce("sum", 1.0))

    callers = [threading.Thread(target=lambda: results.append(strategy.run(step))) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert [result.values for result in results] == [(3.0, 3.0, 3.0)] * 2


# -------------------------------------------------------------------- after the run


def test_local_results_are_one_entry_per_replica(strategy):
    value = cd.PerReplica([1, 2, 3])
    assert strategy.experimental_local_results(value) == (1, 2, 3)
    assert strategy.experimental_local_results({"a": value, "b": 0}) == tuple(
        {"a": number, "b": 0} for number in (1, 2, 3)
    )
    assert strategy.experimental_local_results(7) == (7,)


def test_values_from_a_function_are_always_per_replica(strategy):
    made = strategy.experimental_distribute_values_from_function(
        lambda context: (context.replica_id_in_sync_group, context.num_replicas_in_sync, "same")
    )
    assert [part.values for part in made] == [(0, 1, 2), (3, 3, 3), ("same", "same", "same")]
    alone = cd.MirroredStrategy(["cpu:0"])
    assert isinstance(alone.experimental_distribute_values_from_function(lambda _: 1), cd.PerReplica)


def test_gather_takes_uneven_parts_and_leaves_plain_values_alone(strategy):
    parts = strategy.run(lambda: np.full((own_replica(), 2), own_replica()))
    assert strategy.gather(parts, axis=0)[:, 0].tolist() == [1, 2, 2]
    plain = np.ones(2)
    assert strategy.gather(plain, axis=0) is plain
    with pytest.raises(RuntimeError, match="inside replica"):
        strategy.run(lambda: strategy.gather(parts, axis=0))


def test_run_refuses_options_of_another_kind(strategy):
    with pytest.raises(OptionError):
        strategy.run(own_replica, options="fast")
    with pytest.raises(ConversionError):
        strategy.experimental_distribute_dataset(3)


def test_merge_functions_run_replicas_of_their_own_and_a_failure_there_ends_the_outer_run():
    strategy = cd.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    variable = strategy.create_variable(np.float32([0]), aggregation="sum")

    def inner(own, bad=None):
        number = cd.get_replica_context().replica_id_in_sync_group
        if number == bad:
            raise KeyError("inside")
        variable.assign_add(np.float32([number]))
        return own * 10 + number

    def step(bad=None):
        context = cd.get_replica_context()
        own = np.float32([context.replica_id_in_sync_group])
        merged = context.merge_call(lambda inside, x: inside.run(inner, args=(x, bad)), args=(own,))
        return merged, float(context.all_reduce("sum", own)[0])

    merged, totals = strategy.run(step)
    assert [part.tolist() for part in merged.values] == [[0], [11], [22]]
    assert totals.values == (3.0, 3.0, 3.0)
    assert variable.numpy().tolist() == [3]
    with pytest.raises(KeyError, match="inside") as failure:
        strategy.run(step, args=(1,))
    assert any("raised by replica 1" in note for note in failure.value.__notes__)
    assert strategy.run(step)[1].values == (3.0, 3.0, 3.0)


def test_datasets_may_hold_scalars():
    strategy = cd.MirroredStrategy(["cpu:0", "cpu:1"])
    alone = cd.MirroredStrategy(["cpu:0"])
    dealt = strategy.distribute_datasets_from_function(lambda context: range(4))
    assert [[int(part) for part in batch.values] for batch in dealt] == [[0, 1], [2, 3]]
    assert [int(x) for x in alone.distribute_datasets_from_function(lambda context: range(3))] == [0, 1, 2]
    assert [int(x) for x in alone.experimental_distribute_dataset(range(3))] == [0, 1, 2]
    with pytest.raises(ConversionError, match="scalars have no empty part"):
        list(strategy.distribute_datasets_from_function(lambda context: range(3)))


def test_structures_are_named_without_the_words_of_the_library_that_reads_them(strategy):
    with pytest.raises(StructureMismatchError) as refusal:
        strategy.run(lambda: [1.0] if own_replica() else {"a": (1.0, None)})
    assert str(refusal.value) == "replica 0 (cpu:0) has structure {'a': (*, *)}; the other 2 have [*]"
