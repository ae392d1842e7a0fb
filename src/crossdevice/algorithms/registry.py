"""The algorithms by name."""

from crossdevice.values.registry import Registry

ALGORITHMS = Registry(
    "an all-reduce algorithm",
    {
        "one_device": "crossdevice.algorithms.reduction_to_one_device:ReductionToOneDevice",
        "hierarchical_copy": "crossdevice.algorithms.hierarchical_copy_all_reduce:HierarchicalCopyAllReduce",
        "nccl": "crossdevice.algorithms.nccl_all_reduce:NcclAllReduce",
        "ring": "crossdevice.algorithms.ring_all_reduce:RingAllReduce",
        "halving_doubling": "crossdevice.algorithms.halving_doubling_all_reduce:HalvingDoublingAllReduce",
        "tree": "crossdevice.algorithms.tree_all_reduce:TreeAllReduce",
        "direct": "crossdevice.algorithms.direct_all_reduce:DirectAllReduce",
    },
    entry_point_group="crossdevice.algorithms",
)
