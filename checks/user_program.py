"""What users write, with types: with the installed wheel it runs and passes `mypy --strict` and pyright."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import crossdevice as cd
from crossdevice.integrations import legacy
from crossdevice.testing import Injected, faults, run_ranks

Floats = NDArray[np.float32]


def floats(*numbers: float) -> Floats:
    return np.array(numbers, np.float32)


def functions() -> None:
    totals: list[Any] = cd.all_reduce([floats(1), floats(2)], "max")
    assert [total.tolist() for total in totals] == [[2], [2]]
    cd.all_reduce([{"w": floats(1)}, {"w": floats(2)}], cd.ReduceOp.MEAN, algorithm="ring")
    cd.reduce((floats(1), floats(2)), destinations="cpu:1", out=floats(0))
    cd.reduce([floats(1), floats(2)], destinations=["cpu:0", cd.Device("cpu", 1)])
    cd.all_reduce(
        [1.0, 2.0], options=cd.CommunicationOptions(precision="exact"), algorithm=cd.RingAllReduce()
    )
    assert len(cd.broadcast(floats(1), ["cpu:0", "cpu:1"])) == 2
    assert cd.gather([floats(1), floats(2, 3)], axis=0).tolist() == [1, 2, 3]
    slices = cd.IndexedSlices(floats(1, 2), np.array([0, 2]), dense_shape=(4,))
    assert cd.to_dense(slices).tolist() == [1, 0, 2, 0]
    with contextlib.suppress(cd.errors.ShapeMismatchError):
        cd.all_reduce([floats(1), floats(2, 3)])


def parts() -> None:
    arrays = [floats(1, 2, 3, 4, 5), floats(10, 20, 30, 40, 50)]
    own: list[Any] = cd.reduce_scatter(arrays, "mean", sizes=[1, 4])
    assert [part.shape for part in own] == [(1,), (4,)]
    assert cd.all_gather(own, axis=0, out=arrays)[1] is arrays[1]
    assert cd.all_to_all(arrays, axis=0, sizes=[[1, 4], [3, 2]])[0].shape == (4,)
    assert cd.all_to_all(arrays, sizes=(2, 3))[1].shape == (6,)
    ops, value = cd.AllReduceCrossDeviceOps("ring", num_packs=2), cd.PerReplica(arrays)
    scattered: cd.DistributedValues = ops.reduce_scatter("sum", value, axis=0)
    assert ops.all_gather(scattered, -1).values[0].shape == (5,)


def models(folder: Path) -> None:
    clients = [({"w": floats(1, 2)}, 30), ({"w": floats(5, 6)}, 10)]
    total, other = cd.Accumulator("exact", max_pending=2), cd.Accumulator("exact", integers="first")
    for model, num_examples in clients:
        total.add(model, weight=num_examples)
    assert total.count == 2
    assert total.mean()["w"].tolist() == [2, 3]
    total.save(folder / "sum.npz")
    other = cd.Accumulator.load(str(folder / "sum.npz"))
    saved = str(folder / "sum.npz")
    batches = cd.MicroBatches(10, size=2, per_step=3, rank=1, num_workers=2)
    assert [len(examples) for examples in batches] == [2, 2]
    batches.resume(step=1)
    indices: NDArray[np.int64] = batches.indices(1, batches.of_step(1)[0])
    assert indices.shape == (2,)
    combined = run_ranks(2, lambda group: cd.Accumulator.load(saved).sum(group)["w"].tolist())
    assert combined == [[160, 240]] * 2
    other.merge(total)
    assert other.sum()["w"].tolist() == [160, 240]
    for name, (model, _) in zip("ab", clients, strict=True):
        np.savez(folder / f"{name}.npz", w=model["w"])
    cd.average_files([folder / "a.npz", str(folder / "b.npz")], folder / "mean.npz", [3, 1], keys="union")
    assert np.load(folder / "mean.npz")["w"].tolist() == [2, 3]
    trees = [model for model, _ in clients]
    assert cd.reduce(trees, "mean", weights=[num for _, num in clients])["w"].tolist() == [2, 3]
    assert cd.reduce([floats(1), floats(9), floats(2)], cd.trimmed_mean(1)).tolist() == [2]
    assert cd.reduce([floats(1), floats(9), floats(2)], "median").tolist() == [2]


def classes() -> None:
    grads = cd.PerReplica([{"w": floats(1, 2)}, {"w": floats(3, 4)}])
    placed = cd.PerReplica([floats(1), floats(2)], devices=["cpu:0", cd.Device.parse("cpu:1")])
    algorithms: list[cd.CrossDeviceOps] = [
        cd.ReductionToOneDevice(reduce_to_device="cpu:0"),
        cd.HierarchicalCopyAllReduce(num_packs=2),
        # begin: checks/generated.py instances
        cd.ReductionToOneDevice(),
        cd.HierarchicalCopyAllReduce(),
        cd.NcclAllReduce(),
        cd.RingAllReduce(),
        cd.HalvingDoublingAllReduce(),
        cd.TreeAllReduce(),
        cd.DirectAllReduce(),
        # end
    ]
    for ops in algorithms:
        mean = ops.reduce("mean", grads, destinations=grads)
        assert mean.values[1]["w"].tolist() == [2, 3]
        total: float = ops.reduce(cd.ReduceOp.SUM, placed, destinations="cpu:0").item()
        assert total == 3
    assert issubclass(type(cd.NcclAllReduce(num_packs=2)), cd.CrossDeviceOps)
    ops = cd.DirectAllReduce()
    first, second = ops.batch_reduce("sum", [(grads, grads), (placed, "cpu:0")])
    assert isinstance(first, cd.Mirrored)
    assert second.tolist() == [3]
    everywhere = ops.broadcast(floats(1), grads)
    assert isinstance(everywhere, cd.Mirrored)
    assert (-everywhere + 1 < everywhere).tolist() == [True]
    device: cd.Device = everywhere.devices[1]
    assert str(device) == "cpu:1"
    assert ops.gather(placed, "cpu:0", axis=0).tolist() == [1, 2]
    text: str = str(ops.explain(placed, placed))
    assert text
    options = cd.CommunicationOptions(bytes_per_pack=1 << 20, timeout_seconds=30.0, precision="fast")
    ops.reduce("sum", placed, placed, options=options)
    by_name = cd.CommunicationOptions(implementation="ring", timeout_seconds=timedelta(seconds=30))
    assert by_name.merge(options).implementation is cd.CommunicationImplementation.RING
    hints = cd.CollectiveHints(bytes_per_pack=1 << 20)
    ops.reduce("sum", placed, placed, experimental_hints=hints)
    bound: cd.BoundCall = ops.bind("sum", placed, placed)
    assert bound().values[1].tolist() == [3]
    assert cd.bind([floats(1), floats(2)], "mean")()[0].tolist() == [1.5]
    pending: cd.Pending = bound.start()
    assert pending.wait(timeout=60).values[0].tolist() == [3]
    assert ops.start_reduce("sum", placed, "cpu:0").wait().tolist() == [3]
    parts: cd.BoundCall = ops.bound.reduce_scatter("sum", placed, sizes=[0, 1])
    assert parts().values[1].tolist() == [3]
    assert ops.bound.gather(placed, "cpu:0", out=floats(0, 0))().tolist() == [1, 2]
    assert ops.bound.all_gather(placed)().values[1].tolist() == [1, 2]
    assert ops.bound.all_to_all(placed, sizes=[1, 0])().values[0].tolist() == [1, 2]
    assert ops.bound.broadcast(floats(1), placed)().values[1].tolist() == [1]
    assert ops.bound.batch_reduce("sum", [(placed, "cpu:0")])()[0].tolist() == [3]
    gathering: cd.Pending = ops.started.gather(placed, "cpu:0")
    assert gathering.wait().tolist() == [1, 2]
    assert ops.started.reduce("sum", placed, "cpu:0", weights=[1, 2]).wait().tolist() == [5]
    with faults(ops, replica=0, corrupt=lambda array: -array) as injected:
        assert ops.reduce("sum", placed, "cpu:0", experimental_hints=options).tolist() == [1]
    assert isinstance(injected, Injected)
    assert injected.count == 1
    largest = cd.ReductionToOneDevice(accumulation_fn=lambda components: np.maximum(*components))
    assert largest.reduce("sum", placed, "cpu:0").tolist() == [2]
    per_device = legacy.PerDevice({"/cpu:0": 1.0, "/cpu:1": 3.0})
    assert legacy.ReductionToOneDeviceCrossTowerOps().reduce("mean", per_device, None).values[0] == 2
    assert isinstance(legacy.AllReduceCrossDeviceOps("ring"), legacy.CrossDeviceOps)


def step(x: Floats, rate: float = 1.0) -> Any:
    assert not cd.in_cross_replica_context()
    return cd.get_replica_context().all_reduce("mean", rate * x)


def strategies() -> None:
    strategy = cd.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=cd.TreeAllReduce())
    with strategy.scope():
        assert cd.has_strategy()
        weights = cd.Variable(floats(0, 0), name="weights")
        steps = strategy.create_variable(
            np.int64(0),
            synchronization=cd.VariableSynchronization.ON_READ,
            aggregation=cd.VariableAggregation.SUM,
        )
    weights.assign_add(floats(1, 1))
    assert (2 * weights - 1).tolist() == [1, 1]
    assert weights.read_value().tolist() == [1, 1]
    assert steps.dtype == np.int64
    for batch in strategy.experimental_distribute_dataset(np.ones((4, 1), np.float32), batch_size=2):
        result = strategy.run(step, args=(batch,), kwargs={"rate": 2.0})
        assert strategy.reduce("sum", result, axis=None).tolist() == [[4]]
    for part in strategy.experimental_local_results(weights):
        assert part.shape == (2,)

    def shard(context: cd.ValueContext) -> int:
        return context.replica_id_in_sync_group

    def dataset(context: cd.InputContext) -> Floats:
        return floats(*range(context.num_input_pipelines, 3))

    (batch,) = strategy.distribute_datasets_from_function(lambda context: [dataset(context)])
    assert strategy.experimental_local_results(batch)[0].tolist() == [1, 2]
    assert strategy.experimental_distribute_values_from_function(shard).values == (0, 1)
    assert strategy.num_replicas_in_sync == 2
    assert cd.get_strategy() is not strategy
    extended: cd.StrategyExtended = strategy.extended
    assert extended.reduce_to("sum", cd.PerReplica([1.0, 2.0]), "cpu:0") == 3
    alone: cd.Strategy = cd.OneDeviceStrategy("cpu:0")
    cd.experimental_set_strategy(alone)
    assert isinstance(cd.get_replica_context(), cd.ReplicaContext | None)
    cd.experimental_set_strategy(None)
    assert isinstance(weights, cd.MirroredVariable)
    assert isinstance(steps, cd.SyncOnReadVariable)


def rank(group: cd.ProcessGroup) -> list[float]:
    ops = cd.CollectiveAllReduce(group=group, options=cd.CommunicationOptions(timeout_seconds=30))
    shared = group.empty_like({"w": floats(0, 0)})
    shared["w"][:] = ops.broadcast(floats(1, 2), "cpu:0", from_rank=0)
    group.check_same(shared)
    strategy = cd.MultiWorkerMirroredStrategy(devices=["cpu:0"], group=group)
    weights = strategy.create_variable(lambda: floats(group.rank))
    weights.assign_sub(floats(1))
    assert weights.numpy().tolist() == [-1]
    with faults(group, rank=1, raises=OSError("disk full"), calls=[100]):
        total: list[float] = ops.reduce("sum", shared, "cpu:0")["w"].tolist()
    return total


def processes() -> None:
    assert run_ranks(2, rank, return_errors=True, checks="always") == [[2, 4], [2, 4]]
    cluster: cd.Cluster = cd.cluster_from_env({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node7"})
    assert cluster.rank == 1


def resources() -> None:
    threads, idle_bytes = cd.num_threads(), cd.pool_bytes()
    cd.set_num_threads(threads)
    cd.set_pool_bytes(idle_bytes)
    freed: int = cd.release_memory()
    assert freed >= 0


def machines(folder: Path) -> None:
    topology: cd.Topology = cd.read_topology("dgx1v")
    assert topology.num_devices == 8
    name: str = cd.choose_algorithm(8, topology, 1 << 20, precision="fast").name
    assert name
    with cd.trace(folder / "run.json"):
        cd.all_reduce([floats(1), floats(2)])
    assert (folder / "run.json").exists()
    assert cd.flight_record()
    found: cd.Fingerprint = cd.fingerprint({"w": floats(1)})
    assert found.differing_leaves(cd.fingerprint({"w": floats(2)})) == ["value['w']"]
    with cd.record_bits(folder / "run.bits"):
        cd.mark_bits("after forward", floats(1), inputs={"x": floats(2)})
    cd.RingAllReduce().check_same(cd.Mirrored([floats(1), floats(1)]))
    cluster = cd.cluster_from_env()
    assert cluster.size == 1


functions()
parts()
models(Path.cwd())
classes()
strategies()
processes()
resources()
machines(Path.cwd())
