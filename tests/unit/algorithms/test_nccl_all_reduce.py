import logging

import numpy as np

from crossdevice import Device, NcclAllReduce, PerReplica
from crossdevice.execution.local.passes import lower
from crossdevice.plans.builder import PlanBuilder
from crossdevice.plans.ledger import check_plan
from crossdevice.plans.steps import EngineAllReduce
from crossdevice.values.device import host_device
from unit.algorithms.planning import planned

GPUS = [Device("cuda", index) for index in range(4)]


def test_distinct_gpus_take_one_engine_step():
    plan = planned(NcclAllReduce(), GPUS, GPUS)
    check_plan(plan)
    assert [type(step) for step in plan.steps] == [EngineAllReduce]
    assert plan.num_rounds == 1


def test_destinations_without_a_replica_get_a_copy():
    plan = planned(NcclAllReduce(), GPUS, [GPUS[3], host_device(0)])
    check_plan(plan)
    assert plan.traffic() == {(GPUS[0], host_device(0)): 640}


def test_without_gpus_there_is_one_fallback_with_its_reason_in_the_log_and_in_explain(caplog):
    value = PerReplica([np.float32([1]), np.float32([2])])
    ops = NcclAllReduce()
    with caplog.at_level(logging.WARNING, logger="crossdevice"):
        assert ops.reduce("sum", value, value).values[1] == [3]
        ops.batch_reduce("sum", [(value, value)])
    assert [record.getMessage() for record in caplog.records] == [
        "NcclAllReduce sums on the first destination instead: "
        "NCCL works on GPUs only, and values are on cpu:0, cpu:1"
    ]
    assert "sums on the first destination instead: NCCL works on GPUs only" in ops.explain(value, value)


def test_the_same_reason_is_told_once_whatever_the_devices(caplog):
    ops = NcclAllReduce()
    with caplog.at_level(logging.WARNING, logger="crossdevice"):
        for count in (2, 3, 4):
            ops.reduce("sum", PerReplica([np.float32([1])] * count), "cpu:0")
    assert len(caplog.records) == 1


def test_several_replicas_on_one_gpu_are_the_other_reason():
    reason = NcclAllReduce().fallback_reason([GPUS[0], GPUS[0], GPUS[1]])
    assert reason == "NCCL takes one replica per GPU, and several are on cuda:0"
    assert NcclAllReduce().fallback_reason(GPUS) is None


def test_where_the_order_of_replicas_counts_shards_are_summed_in_it():
    build = PlanBuilder(GPUS, 640, has_engine=False)
    plan = build.plan(NcclAllReduce().plan_sum(build, GPUS))
    check_plan(plan)
    assert not any(isinstance(step, EngineAllReduce) for step in plan.steps)
    assert {piece.order for piece in lower(plan)} == {(0, 1, 2, 3)}
