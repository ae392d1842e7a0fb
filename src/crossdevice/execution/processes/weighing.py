"""The weights of the replicas of all ranks, and operations that need so many replicas."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from crossdevice.execution.processes.agreement import refused_by_all
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.weights import Weights, weights_for


def weights_of_all_ranks(
    call: GroupCall, op: ReduceOp, factors: tuple[float, ...] | None, counts: Sequence[Sequence[int]]
) -> Weights | None:
    """The weights of all replicas, in the order of ranks; refuses those, and operations, that do not fit."""
    with refused_by_all():
        if op.is_order_statistic:
            for count in counts:
                op.sorted_range(sum(count))
        if factors is None:
            return None
        records = call.all_gather_uneven(np.array(factors).tobytes())
        return weights_for(tuple(np.frombuffer(b"".join(records)).tolist()), op)
