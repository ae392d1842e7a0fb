"""One rank that keeps the laws of reductions with its arrays on a GPU, and reports what became of each."""

import warnings

import ml_dtypes
import numpy as np
import torch

import crossdevice as cd
from crossdevice.process_groups import cluster
from crossdevice.values.nesting import flatten, unflatten
from multiprocess import laws_of_reductions, laws_of_shards
from multiprocess.launching import report
from multiprocess.laws_rank import fate

ON_THE_HOST = {
    "tensors_of_pytorch_come_back_as_such",
    "backward_passes_are_calls_of_all_ranks",
    "bound_reductions_may_be_anywhere_in_memory",
}
"""Laws of memory of the host."""


def on_gpu(tree):
    """The same structure of tensors; NumPy's bfloat16 goes by way of integers."""
    leaves, structure = flatten(tree)
    tensors = []
    for leaf in leaves:
        if isinstance(leaf, cd.IndexedSlices):
            tensors.append(cd.IndexedSlices(on_gpu(leaf.values), on_gpu(leaf.indices), leaf.dense_shape))
            continue
        array = np.array(leaf)
        if array.dtype == ml_dtypes.bfloat16:
            tensors.append(torch.from_numpy(array.view(np.int16)).cuda().view(torch.bfloat16))
        else:
            tensors.append(torch.from_numpy(array).cuda())
    return tensors[0] if structure is None else unflatten(structure, tensors)


def on_host(tree):
    leaves, structure = flatten(tree)
    arrays = []
    for leaf in leaves:
        if isinstance(leaf, cd.IndexedSlices):
            arrays.append(cd.IndexedSlices(on_host(leaf.values), on_host(leaf.indices), leaf.dense_shape))
            continue
        assert leaf.is_cuda
        if leaf.dtype == torch.bfloat16:
            arrays.append(leaf.cpu().view(torch.int16).numpy().view(ml_dtypes.bfloat16))
        else:
            arrays.append(leaf.cpu().numpy())
    return arrays[0] if structure is None else unflatten(structure, arrays)


class OnGpu(cd.CollectiveAllReduce):
    """Takes arrays of NumPy to the GPU, and results from there."""

    def reduce(self, op, value, destinations, options=None, *, out=None, weights=None):
        placed, targets = pair_on_gpu(value, destinations)
        into = None if out is None else out_on_gpu(out, is_bare=targets is not placed)
        found = results_on_host(super().reduce(op, placed, targets, options, out=into, weights=weights))
        return found if out is None else written(out, found)

    def reduce_scatter(self, op, value, axis=0, options=None, *, sizes=None, out=None, weights=None):
        placed, _ = pair_on_gpu(value, None)
        into = None if out is None else out_on_gpu(out, is_bare=len(placed.values) == 1)
        parts = super().reduce_scatter(op, placed, axis, options, sizes=sizes, out=into, weights=weights)
        found = results_on_host(parts, cd.PerReplica)
        return found if out is None else written(out, found)

    def gather(self, value, destinations, axis=0, options=None, *, out=None):
        placed, targets = pair_on_gpu(value, destinations)
        into = None if out is None else out_on_gpu(out, is_bare=targets is not placed)
        found = results_on_host(super().gather(placed, targets, axis, options, out=into))
        return found if out is None else written(out, found)

    def all_to_all(self, value, axis=0, options=None, *, sizes=None, out=None):
        is_distributed = isinstance(value, cd.DistributedValues)
        placed = pair_on_gpu(value, None)[0] if is_distributed else on_gpu(value)
        into = None if out is None else out_on_gpu(out, is_bare=not is_distributed)
        moved = super().all_to_all(placed, axis, options, sizes=sizes, out=into)
        found = results_on_host(moved, cd.PerReplica)
        return found if out is None else written(out, found)

    def broadcast(self, value, destinations, *, from_rank):
        placed, _ = pair_on_gpu(destinations, None)
        return results_on_host(super().broadcast(on_gpu(value), placed, from_rank=from_rank))

    def batch_reduce(self, op, pairs, options=None):
        results = super().batch_reduce(op, [pair_on_gpu(*pair) for pair in pairs], options)
        return [results_on_host(result) for result in results]


def pair_on_gpu(value, destinations):
    is_distributed = isinstance(value, cd.DistributedValues)
    values = value.values if is_distributed else (value,)
    devices = ["cuda:0"] * len(values) if flatten(values[0])[0] else None  # nothing is on the host
    placed = cd.PerReplica([on_gpu(each) for each in values], devices)
    return placed, placed if destinations is value and is_distributed else "cuda:0"


def out_on_gpu(out, is_bare):
    outs = laws_of_reductions.components(out)
    into = cd.PerReplica([on_gpu(each) for each in outs], ["cuda:0"] * len(outs))
    return into.values[0] if is_bare else into


def written(out, found):
    """`out`, to which results on the host are copied."""
    pairs = zip(*map(laws_of_reductions.components, (out, found)), strict=True)
    for target, each in pairs:
        for array, leaf in zip(flatten(target)[0], flatten(each)[0], strict=True):
            array[...] = leaf
    return out


def results_on_host(result, container=cd.Mirrored):
    if isinstance(result, cd.DistributedValues):
        return container([on_host(each) for each in result.values])
    return on_host(result)


class CrossdeviceOnGpu:
    """The package, but for one class."""

    @staticmethod
    def CollectiveAllReduce(group):
        # NCCL, which `fast` is left to where ranks do not reach each other's memory, refuses to share a GPU.
        return OnGpu(group=group, options=cd.CommunicationOptions(implementation="ring"))

    def __getattr__(self, name):
        return getattr(cd, name)


def main():
    warnings.simplefilter("error")
    here = cluster.cluster_from_env()
    torch.cuda.set_device(0)
    laws_of_reductions.cd = laws_of_shards.cd = CrossdeviceOnGpu()

    def form():
        return here.form_group("torch", timeout_seconds=60.0)

    with form() as group:
        laws = laws_of_reductions.REDUCTION_LAWS | laws_of_shards.SHARD_LAWS
        fates = {name: fate(law, group, form) for name, law in laws.items() if name not in ON_THE_HOST}
        told = CrossdeviceOnGpu.CollectiveAllReduce(group).explain(torch.ones(3, device="cuda"), "cuda:0")
        explained = [line for line in told.splitlines() if not line.startswith(" ")][-1]
    report(here.rank, {"fates": fates, "explained": explained})


if __name__ == "__main__":
    main()
