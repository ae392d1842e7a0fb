"""What users write, with types: with the installed wheel it runs and passes `mypy --strict` and pyright."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import crossdevice as cd

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


def classes() -> None:
    grads = cd.PerReplica([{"w": floats(1, 2)}, {"w": floats(3, 4)}])
    placed = cd.PerReplica([floats(1), floats(2)], devices=["cpu:0", cd.Device.parse("cpu:1")])
    algorithms: list[cd.CrossDeviceOps] = [
        cd.ReductionToOneDevice(reduce_to_device="cpu:0"),
        cd.HierarchicalCopyAllReduce(num_packs=2),
        cd.RingAllReduce(),
        cd.HalvingDoublingAllReduce(),
        cd.TreeAllReduce(),
        cd.DirectAllReduce(),
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
    bound: cd.BoundReduction = ops.bind("sum", placed, placed)
    assert bound().values[1].tolist() == [3]
    assert cd.bind([floats(1), floats(2)], "mean")()[0].tolist() == [1.5]


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

    def shard(context: Any) -> int:
        return int(context.replica_id_in_sync_group)

    assert strategy.experimental_distribute_values_from_function(shard).values == (0, 1)
    assert strategy.num_replicas_in_sync == 2
    assert cd.get_strategy() is not strategy


def machines(folder: Path) -> None:
    topology: cd.Topology = cd.read_topology("dgx1v")
    assert topology.num_devices == 8
    name: str = cd.choose_algorithm(8, topology, 1 << 20, precision="fast").name
    assert name
    with cd.trace(folder / "run.json"):
        cd.all_reduce([floats(1), floats(2)])
    assert (folder / "run.json").exists()
    assert cd.flight_record()
    cluster = cd.cluster_from_env()
    assert cluster.size == 1


functions()
classes()
strategies()
machines(Path.cwd())
