"""A strategy over several processes does what one process with all their replicas does, to the bit."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest

import crossdevice as cd
from crossdevice.errors import (
    ContextError,
    ConversionError,
    DeviceError,
    MismatchError,
    OptionError,
    ProcessGroupError,
    ReduceOpError,
)
from crossdevice.process_groups import cluster
from crossdevice.process_groups.engines.thread_engine import run_ranks
from multiprocess.strategy_laws import LAWS, bits, local, numbers, replica_id

GRIDS = [(8,), (4, 4), (2, 2, 2, 2), (1,) * 8, (1, 5, 2), (3, 1, 4)]
"""How many replicas each process has: 8 in all."""

EXACT = cd.CommunicationOptions(precision="exact")


def on_one_process(program):
    return program(cd.MirroredStrategy([f"cpu:{index}" for index in range(8)]))


def on_grid(grid, program, options=None, timeout_seconds=30.0):
    """What each process returns."""

    def rank(group):
        devices = [f"cpu:{index}" for index in range(grid[group.rank])]
        return program(cd.MultiWorkerMirroredStrategy(None, options, devices=devices, group=group))

    return run_ranks(len(grid), rank, timeout_seconds=timeout_seconds)


# -------------------------------------------------------------------- laws that hold on every grid


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_processes_compute_what_one_process_computes(law, grid):
    expected = bits(on_one_process(LAWS[law]))
    for found in on_grid(grid, LAWS[law]):
        assert bits(found) == expected


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_exact_sums_do_not_depend_on_who_holds_which_numbers(grid):
    def sums(strategy, order):
        value = strategy.run(lambda: numbers(order[replica_id()]))
        return bits([strategy.reduce("sum", value, axis=None), strategy.reduce("mean", value, axis=None)])

    expected = on_grid((8,), lambda strategy: sums(strategy, range(8)), EXACT)[0]
    for order in itertools.islice(itertools.permutations(range(8)), 0, 40000, 9000):
        assert set(map(tuple, on_grid(grid, lambda s, order=order: sums(s, order), EXACT))) == {
            tuple(expected)
        }


# -------------------------------------------------------------------- who is who


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_replicas_are_numbered_process_by_process(grid):
    def who(strategy):
        values = strategy.experimental_distribute_values_from_function(
            lambda context: (context.replica_id_in_sync_group, context.num_replicas_in_sync)
        )
        numbered = strategy.run(lambda: (replica_id(), cd.get_replica_context().num_replicas_in_sync))
        assert [part.values for part in values] == [part.values for part in numbered]
        assert strategy.num_replicas_in_sync == 8
        return list(numbered[0].values)

    found = on_grid(grid, who)
    assert [len(of_rank) for of_rank in found] == list(grid)
    assert list(itertools.chain(*found)) == list(range(8))


def test_results_are_per_replica_even_where_a_process_has_one_replica():
    def program(strategy):
        result = strategy.run(lambda: {"loss": np.float32(1), "name": "same"})
        assert isinstance(result["loss"], cd.PerReplica)
        assert result["name"] == "same"
        (batch,) = strategy.experimental_distribute_dataset([np.arange(6)])
        assert isinstance(batch, cd.PerReplica)
        return len(strategy.experimental_local_results(result))

    assert on_grid((1, 2, 1), program) == [1, 2, 1]


def test_without_others_results_of_one_replica_are_bare():
    (result,) = on_grid((1,), lambda strategy: strategy.run(lambda: np.float32(2)))
    assert result == np.float32(2)


def test_rank_0_is_the_chief_and_each_explains_itself():
    def program(strategy):
        return strategy.is_chief, strategy.explain(), repr(strategy)

    first, second = on_grid((1, 2), program)
    assert (first[0], second[0]) == (True, False)
    assert first[1].splitlines() == [
        "MultiWorkerMirroredStrategy: rank 0 of 2 on threads, replica 0 of 3: cpu:0",
        "CollectiveAllReduce: reduces over the replicas of all processes (1 + 2)",
    ]
    assert "rank 1 of 2 on threads, replicas 1 to 2 of 3: cpu:0, cpu:1" in second[1]
    assert second[2] == "MultiWorkerMirroredStrategy(rank 1 of 2, ['cpu:0', 'cpu:1'])"


def test_without_a_launcher_there_is_one_process(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "TF_CONFIG", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    strategy = cd.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1", "cpu:2"])
    assert strategy.cluster_resolver.size == 1
    assert strategy.group.size == 1
    assert float(strategy.reduce("sum", strategy.run(lambda: 1.0), axis=None)) == 3


@pytest.mark.parametrize(
    ("num_gpus", "local_rank", "local_size", "expected"),
    [
        (4, 1, 2, ["cuda:1", "cuda:3"]),
        (8, 3, 8, ["cuda:3"]),
        (2, 3, 4, ["cuda:1"]),
        (0, 1, 2, ["cpu:0", "cpu:1"]),
        (0, 1, 9, ["cpu:0"]),
        (0, None, None, ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]),
    ],
)
def test_processes_of_a_host_share_its_devices(num_gpus, local_rank, local_size, expected, monkeypatch):
    from crossdevice.strategies import multi_worker

    monkeypatch.setattr("crossdevice.strategies.running.loaded_libraries.num_torch_gpus", lambda: num_gpus)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(4), raising=False)
    here = cluster.Cluster(rank=0, size=16, local_rank=local_rank, local_size=local_size)
    assert [str(device) for device in multi_worker.share_of(here)] == expected


@pytest.mark.parametrize(("devices", "error"), [([], OptionError), (3, DeviceError)])
def test_what_is_no_list_of_devices_is_refused_before_a_group_is_formed(monkeypatch, devices, error):
    monkeypatch.setattr(cluster.Cluster, "form_group", lambda _: pytest.fail("a group was formed"))
    with pytest.raises(error, match="devices"):
        cd.MultiWorkerMirroredStrategy(devices=devices)


def test_what_is_no_cluster_and_a_cluster_beside_a_group_are_refused():
    with pytest.raises(OptionError, match="must be a Cluster or None, got str"):
        cd.MultiWorkerMirroredStrategy("worker:0")

    def program(group):
        with pytest.raises(OptionError, match="expected one of them"):
            cd.MultiWorkerMirroredStrategy(cluster.Cluster(), group=group)

    run_ranks(1, program)


def test_the_options_given_are_the_defaults_of_every_reduction():
    def program(strategy):
        ops = strategy.extended.cross_device_ops
        assert isinstance(ops, cd.CollectiveAllReduce)
        return ops.options.precision, ops.group is strategy.group

    assert on_grid((2, 2), program, EXACT) == [("exact", True)] * 2


# -------------------------------------------------------------------- variables


def test_variables_start_with_the_value_of_rank_0():
    def program(group):
        strategy = cd.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"], group=group)
        made = strategy.create_variable(lambda: np.full(3, group.rank + 1.0))
        number = strategy.create_variable(float(group.rank + 5))
        return [*(copy.value().tolist() for copy in made.values), float(number.read_value())]

    assert run_ranks(3, program) == [[[1.0] * 3, [1.0] * 3, 5.0]] * 3


def test_variables_of_different_shapes_are_refused_on_all_processes_which_can_go_on():
    def program(group):
        strategy = cd.MultiWorkerMirroredStrategy(devices=["cpu:0"], group=group)
        with pytest.raises(MismatchError, match=r"rank 1 .* has shape \(2,\)"):
            strategy.create_variable(np.zeros(2 if group.rank == 1 else 3))
        return float(strategy.reduce("sum", strategy.run(lambda: 1.0), axis=None))

    assert run_ranks(3, program) == [3, 3, 3]


@pytest.mark.parametrize("grid", [(2, 2), (1, 1, 1)], ids=str)
def test_what_is_not_distributed_is_judged_alike_on_every_grid(grid):
    def program(strategy):
        with pytest.raises(ReduceOpError, match="it is unclear whether each"):
            strategy.reduce("sum", np.float32([1, 2]), axis=None)
        assert strategy.gather(np.float32([1, 2]), axis=0).tolist() == [1, 2]
        return strategy.reduce("mean", np.float32([1, 2]), axis=None).tolist()

    assert on_grid(grid, program) == [[1, 2]] * len(grid)


# -------------------------------------------------------------------- datasets


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("num_examples", [1, 8, 21, 50])
def test_every_example_goes_to_one_replica_of_one_process(grid, num_examples):
    def shares(strategy):
        dataset = strategy.experimental_distribute_dataset(np.arange(num_examples), batch_size=20)
        return [[list(part) for part in local(strategy, batch)] for batch in dataset]

    expected = on_one_process(shares)
    found = on_grid(grid, shares)
    for batch in range(len(expected)):
        assert list(itertools.chain(*(of_rank[batch] for of_rank in found))) == expected[batch]


def test_each_process_is_an_input_pipeline_and_all_go_on_until_the_last_has_no_more():
    def program(strategy):
        def make(context):
            assert (context.num_input_pipelines, context.num_replicas_in_sync) == (3, 4)
            assert context.get_per_replica_batch_size(8) == 2
            rank = context.input_pipeline_id
            return [np.full(2, 10 * rank + number) for number in range(1 + 2 * rank)]

        rounds = [
            [list(part) for part in local(strategy, batch)]
            for batch in strategy.distribute_datasets_from_function(make)
        ]
        return strategy.group.rank, rounds

    assert on_grid((1, 1, 2), program) == [
        (0, [[[0, 0]], [[]], [[]]]),
        (1, [[[10, 10]], [[11, 11]], [[12, 12]]]),
        (2, [[[20, 20], [21, 21]], [[22, 22], [23, 23]], [[24, 24], []]]),
    ]


def test_a_process_without_any_batch_is_named_on_all_processes():
    def program(strategy):
        dataset = strategy.distribute_datasets_from_function(
            lambda context: [] if context.input_pipeline_id == 1 else [np.ones(2)]
        )
        with pytest.raises(ConversionError, match="dataset of process 1 is empty"):
            list(dataset)

    on_grid((1, 1, 1), program)


def test_datasets_that_are_empty_everywhere_give_no_batches():
    assert on_grid((1, 2), lambda s: list(s.distribute_datasets_from_function(lambda _: []))) == [[], []]


# -------------------------------------------------------------------- failures


def test_a_replica_that_raises_ends_the_run_on_all_processes_at_once():
    def step():
        if replica_id() == 3:
            raise ZeroDivisionError("no mean of nothing")
        return cd.get_replica_context().all_reduce("sum", np.ones(2))

    def program(strategy):
        failed = strategy.group.rank == 1
        told = "no mean" if failed else "gave up: ZeroDivisionError: no mean of nothing"
        with pytest.raises(ZeroDivisionError if failed else ProcessGroupError, match=told):
            strategy.run(step)
        with pytest.raises(ProcessGroupError, match="a new one has to be formed"):
            strategy.reduce("sum", cd.PerReplica([1.0, 1.0]), axis=None)

    # A deadline that nobody would wait for.
    on_grid((2, 2, 2), program, timeout_seconds=3600.0)


def test_replicas_that_differ_between_processes_raise_on_all_which_can_go_on():
    def program(strategy):
        with pytest.raises(MismatchError, match=r"rank 1 .* calls reduce MEAN"):
            strategy.run(
                lambda: cd.get_replica_context().all_reduce("mean" if replica_id() > 1 else "sum", np.ones(2))
            )
        return float(strategy.reduce("sum", strategy.run(lambda: 1.0), axis=None))

    assert on_grid((2, 1), program) == [3, 3]


def test_reductions_inside_replicas_are_refused_as_ever():
    def program(strategy):
        with pytest.raises(ContextError, match="reduce_to was called inside replica"):
            strategy.run(lambda: strategy.reduce("sum", np.ones(2), axis=None))

    on_grid((1, 1), program)


def test_strategies_leave_no_thread_of_a_replica_behind():
    before = {thread.ident for thread in threading.enumerate() if thread.name.startswith("replica ")}
    on_grid((2, 2), lambda strategy: strategy.run(replica_id).values)
    left = [t for t in threading.enumerate() if t.name.startswith("replica ") and t.ident not in before]
    for thread in left:
        thread.join(120)
    assert not any(thread.is_alive() for thread in left)
