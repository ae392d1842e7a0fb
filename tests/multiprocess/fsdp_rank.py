"""Four ranks that train sharded models with our reduce-scatter, and report the bits of their gradients.

They are forked from one process: to import FSDP takes a process longer than everything it does here.
"""

import contextlib
import io
import multiprocessing
import os
import runpy
import sys
from pathlib import Path
from unittest import mock

import torch
import torch._dynamo
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import crossdevice as cd
from crossdevice.integrations.torch import ReproducibleReduceScatter
from crossdevice.process_groups.engines.torch_engine import form_group
from multiprocess.gradients import batch, digest, gradients, network
from multiprocess.launching import report

SIZE = 4
WIDTHS = (33, 60, 70, 3)
EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp2_reproducible.py"


def sharded(dtype, mesh, *, layer_by_layer):
    model = network(WIDTHS, dtype)
    for layer in (model[0], model[2], model[3]) if layer_by_layer else ():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def reduced(comm, dtype, mesh, share, *, layer_by_layer=True, over=None):
    model = sharded(dtype, mesh, layer_by_layer=layer_by_layer)
    comm.use_in(model)
    for module in model.modules() if over is not None else ():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(comm.mean_over(over.get_group()))
    return [gradient.full_tensor() for gradient in gradients(model, batch(share, WIDTHS[0], dtype))]


def main(rank):
    torch.set_num_threads(1)  # not before forks: threads of new processes would race for its pool
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(SIZE))
    dist.init_process_group("gloo")
    ops = cd.CollectiveAllReduce(group=form_group(rank, SIZE, name="test"))
    line = init_device_mesh("cpu", (SIZE,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    accurate, exact = ReproducibleReduceScatter(), ReproducibleReduceScatter(precision="exact")
    facts = {"example": output_of_example()}
    for dtype in (torch.float32, torch.bfloat16):
        own = gradients(network(WIDTHS, dtype), batch(rank, WIDTHS[0], dtype))
        means = ops.batch_reduce("mean", [(gradient, gradient) for gradient in own])
        tolerance = {"rtol": 0.05, "atol": 0.05} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
        lines = [reduced(accurate, dtype, line, rank, layer_by_layer=each) for each in (True, False)]
        squares = [reduced(accurate, dtype, square, rank, layer_by_layer=each) for each in (True, False)]
        hooked = reduced(accurate, dtype, square["shard"], rank, over=square["replicate"])
        facts[str(dtype)] = {
            "wrapping makes no difference": digest(lines[0]) == digest(lines[1]),
            "as CollectiveAllReduce": digest(lines[0]) == digest(means),
            "wrapping makes no difference to HSDP": digest(squares[0]) == digest(squares[1]),
            "HSDP gives means": all(
                torch.allclose(each, mean, **tolerance) for each, mean in zip(squares[0], means, strict=True)
            ),
            "means over replicas as HSDP's": digest(hooked) == digest(squares[0]),
            "the order of ranks makes no difference to exact": digest(reduced(exact, dtype, line, rank))
            == digest(reduced(exact, dtype, line, (rank + 1) % SIZE)),
        }
    facts["asynchronous"] = is_done_at_once(accurate, rank)
    facts["divided"] = error_of_a_factor(line, accurate)
    report(rank, facts)
    dist.barrier()
    dist.destroy_process_group()


def output_of_example():
    """What the example prints in the group that is there."""
    printed = io.StringIO()
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
        contextlib.redirect_stdout(printed),
    ):
        runpy.run_path(str(EXAMPLE))
    return printed.getvalue()


def is_done_at_once(comm, rank):
    whole = torch.arange(8.0) + rank
    part = comm.allocate((2,), dtype=whole.dtype, device=whole.device)
    work = comm(part, whole, dist.group.WORLD, dist.ReduceOp.SUM, async_op=True)
    return [work.wait(), work.is_completed(), part.tolist()]


def error_of_a_factor(mesh, comm):
    model = sharded(torch.float32, mesh, layer_by_layer=False)
    comm.use_in(model)
    model.set_gradient_divide_factor(3.0)
    try:
        gradients(model, batch(0, WIDTHS[0], torch.float32))
    except RuntimeError as error:
        return str(error)
    except cd.errors.ReduceOpError as error:
        return str(error)
    return "none"


if __name__ == "__main__":
    forking = multiprocessing.get_context("fork")
    processes = [forking.Process(target=main, args=(rank,)) for rank in range(SIZE)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(any(process.exitcode for process in processes))
