"""A rank that makes every collective of torch.distributed on two backends, and compares them."""

import contextlib
import functools
import os
import signal
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._C._distributed_c10d import _make_nccl_premul_sum
from torch.distributed.device_mesh import init_device_mesh

from crossdevice.integrations.torch import BackendOptions
from entered_functions import num_of_rank_entered
from multiprocess.launching import report

OPS = ("SUM", "MIN", "MAX", "PRODUCT", "AVG")
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int8, torch.uint8)
BITWISE = ("BAND", "BOR", "BXOR")


def values(*shape, dtype=torch.float32, seed=0):
    """Small whole numbers, whose sums and products every order of adding gives exactly."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    numbers = torch.randint(1, 4, shape, generator=generator, device="cpu")
    return numbers.to(dtype).to(torch.get_default_device())


def in_place(call, tensor):
    call(tensor)
    return tensor


def cases(rank, size):
    """Calls by name; each takes a group and returns what ranks have afterwards."""

    def all_reduce(op, dtype, group):
        return in_place(
            lambda t: dist.all_reduce(t, getattr(dist.ReduceOp, op), group=group), values(5, 3, dtype=dtype)
        )

    named = {
        f"all_reduce {op} {dtype}": functools.partial(all_reduce, op, dtype)
        for op, dtypes in (
            *((op, FLOATS) for op in OPS),
            *((op, INTEGERS) for op in OPS[:4]),
            *((op, INTEGERS) for op in BITWISE),
            *((op, (torch.bool,)) for op in ("SUM", "PRODUCT", "MIN", "MAX", *BITWISE[:2])),
            ("SUM", (torch.complex64, torch.complex128)),
        )
        for dtype in dtypes
    }

    def case(function):
        named[function.__name__] = function
        return function

    @case
    def all_reduce_of_nothing(group):
        return in_place(lambda t: dist.all_reduce(t, group=group), torch.zeros(0))

    @case
    def all_reduce_of_a_number(group):
        return in_place(lambda t: dist.all_reduce(t, group=group), torch.tensor(rank + 1.0))

    @case
    def ten_in_flight(group):
        tensors = [values(100, seed=seed) for seed in range(10)]
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()
        if tensors[0].is_cuda:
            torch.cuda.synchronize()  # `wait` only orders the stream after a collective
        return [*tensors, all(work.is_completed() for work in works)]

    @case
    def future(group):
        work = dist.all_reduce(values(7), group=group, async_op=True)
        return work.get_future().then(lambda ended: ended.value()[0] * 2).wait()

    @case
    def all_reduce_coalesced(group):
        tensors = [values(3), values(4, 2, seed=1)]
        work = group.allreduce_coalesced(tensors)
        work.wait()
        return tensors

    @case
    def a_tensor_twice(group):
        tensor = values(3)
        group.allreduce_coalesced([tensor, tensor]).wait()
        return tensor

    @case
    def gathered_lists(group):
        out = [[torch.zeros(2), torch.zeros(3)] for _ in range(size)]
        work = group.allgather_coalesced(out, [values(2), values(3, seed=1)])
        work.wait()
        return [out, work.get_future().wait()]

    @case
    def a_functional_result(group):
        found = funcol.all_reduce(values(4), "sum", group)
        dist.all_reduce(found, group=group)
        return found

    @case
    def reduce(group):
        tensor = values(4)
        dist.reduce(tensor, 1, group=group)
        return tensor if rank == 1 else None

    @case
    def broadcast(group):
        return [
            in_place(lambda t: dist.broadcast(t, 1, group=group), values(4, dtype=dtype)) for dtype in FLOATS
        ]

    @case
    def broadcast_of_truth_values(group):
        return in_place(lambda t: dist.broadcast(t, 0, group=group), values(9) > 1)

    @case
    def all_gather(group):
        found = [torch.zeros(2, 3) for _ in range(size)]
        dist.all_gather(found, values(2, 3), group=group)
        return found

    @case
    def all_gather_into_tensor(group):
        return in_place(
            lambda out: dist.all_gather_into_tensor(out, values(2, 3), group=group), torch.zeros(2 * size, 3)
        )

    @case
    def reduce_scatter(group):
        out = torch.zeros(2)
        dist.reduce_scatter(out, [values(2, seed=seed) for seed in range(size)], group=group)
        return out

    @case
    def reduce_scatter_tensor(group):
        return [
            in_place(
                lambda out, op=op: dist.reduce_scatter_tensor(out, values(2 * size, 3), op, group=group),
                torch.zeros(2, 3),
            )
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX)
        ]

    @case
    def all_to_all_single(group):
        return in_place(
            lambda out: dist.all_to_all_single(out, values(2 * size, 3), group=group),
            torch.zeros(2 * size, 3),
        )

    @case
    def all_to_all_single_with_splits(group):
        sent = values(sum(range(1, size + 1)), 2)
        out = torch.zeros((rank + 1) * size, 2)
        dist.all_to_all_single(out, sent, [rank + 1] * size, list(range(1, size + 1)), group=group)
        return out

    @case
    def all_to_all(group):
        out = [torch.zeros(2) for _ in range(size)]
        dist.all_to_all(out, [values(2, seed=seed) for seed in range(size)], group=group)
        return out

    @case
    def all_to_all_of_more_than_one_rank_can_show_at_once(group):
        sizes = [(1 + each) << 18 for each in range(size)]  # of one rank more than 2 MiB, of another one less
        out = torch.zeros(size * sizes[rank])
        dist.all_to_all_single(out, values(sum(sizes)), [sizes[rank]] * size, sizes, group=group)
        few = torch.zeros(sum(sizes) if rank == 0 else 0)
        sent = values(sizes[rank])
        dist.all_to_all_single(
            few,
            sent,
            sizes if rank == 0 else [0] * size,
            [sizes[rank]] + [0] * (size - 1),
            group=group,
        )
        return [out, few]

    @case
    def gather(group):
        out = [torch.zeros(2) for _ in range(size)] if rank == 0 else None
        dist.gather(values(2), out, 0, group=group)
        return out

    @case
    def scatter(group):
        sent = [values(2, seed=seed) for seed in range(size)] if rank == 0 else None
        return in_place(lambda out: dist.scatter(out, sent, 0, group=group), torch.zeros(2))

    @case
    def send_and_recv(group):
        out = torch.zeros(3)
        works = [
            *(dist.isend(values(3), to, group=group) for to in range(size) if to > rank),
            *(dist.irecv(out, source, group=group) for source in range(size) if source < rank),
        ]
        for work in works:
            work.wait()
        return out if rank < 2 else None  # else it is whoever came last

    @case
    def receives_that_begin_long_before_anything_is_sent(group):
        ours = dist.new_group(backend=dist.get_backend(group))  # whose ranks have not sent anything yet
        received = [torch.zeros(3) for _ in range(size)]
        works = [dist.irecv(received[peer], peer, group=ours) for peer in range(size) if peer != rank]
        dist.barrier(group=ours)
        sent = values(3)
        works += [dist.isend(sent, peer, group=ours) for peer in range(size) if peer != rank]
        for work in works:
            work.wait()
        return received

    @case
    def a_ring_of_messages(group):
        out = torch.zeros(3)
        operations = [
            dist.P2POp(dist.isend, values(3), (rank + 1) % size, group=group),
            dist.P2POp(dist.irecv, out, (rank - 1) % size, group=group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return out

    @case
    def objects(group):
        everyones, shared, scattered = [None] * size, [rank, "x"], [None]
        dist.all_gather_object(everyones, {"rank": rank}, group=group)
        dist.broadcast_object_list(shared, 0, group=group)
        dist.scatter_object_list(scattered, [10 * each for each in range(size)], 0, group=group)
        return [everyones, shared, scattered]

    @case
    def functional(group):
        return [
            funcol.wait_tensor(found)
            for found in (
                funcol.all_reduce(values(4), "sum", group),
                funcol.all_gather_tensor(values(4, 2), 0, group),
                funcol.reduce_scatter_tensor(values(2 * size), "sum", 0, group),
                funcol.all_to_all_single(values(2 * size), None, None, group),
                funcol.broadcast(values(4), 0, group),
                *funcol.all_reduce_coalesced([values(3), values(2)], "sum", group),
            )
        ]

    @case
    def sparse(group):
        tensor = torch.sparse_coo_tensor([[0, 1]], values(2, 3), (4, 3))
        dist.all_reduce(tensor, group=group)
        return tensor.to_dense()

    @case
    def barrier(group):
        return dist.barrier(group=group)

    return named


def same(ours, theirs):
    if isinstance(ours, torch.Tensor):
        is_alike = ours.shape == theirs.shape and ours.dtype == theirs.dtype
        return is_alike and torch.equal(ours.cpu(), theirs.cpu())
    if isinstance(ours, (list, tuple)):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return ours == theirs


def differences(rank, size, gloo, device="cpu"):
    """The names of calls whose results are not those of gloo on the host, and of those that gloo refuses."""
    found, refused = [], []
    for name, case in cases(rank, size).items():
        try:
            theirs = case(gloo)
        except RuntimeError as error:
            if "does not support" not in str(error):
                raise
            refused.append(name)
            continue
        with torch.device(device):
            ours = case(dist.group.WORLD)
        if not same(ours, theirs):
            found.append(name)
    return {"differences": found, "refused by gloo": refused}


def integer_means():
    """Means of integers whose sums have no room in their dtype, by each collective; all are to be equal."""
    found = {}
    for dtype in (torch.int64, torch.int32, torch.int8, torch.uint8, torch.uint64):
        size, limits = dist.get_world_size(), torch.iinfo(dtype)
        numbers = [limits.max - dist.get_rank(), limits.min + dist.get_rank()]
        whole = torch.tensor(numbers, dtype=dtype)
        dist.all_reduce(whole, dist.ReduceOp.AVG)
        parts = [torch.empty(2, dtype=dtype) for _ in range(2)]
        sent = torch.tensor([numbers] * size, dtype=dtype)
        dist.reduce_scatter_tensor(parts[0], sent, dist.ReduceOp.AVG)
        on_root = torch.tensor(numbers, dtype=dtype)
        dist.reduce(on_root, 0, dist.ReduceOp.AVG)
        dist.broadcast(on_root, 0)
        parts[1] = on_root
        found[str(dtype)] = [whole.tolist(), *(part.tolist() for part in parts)]
    return found


def of_our_own(rank, size):
    """What gloo does not have, or does otherwise."""
    strided = torch.arange(8.0)
    dist.all_reduce(strided[::2])
    uneven = [torch.zeros(2 + each) for each in range(size)]
    dist.all_gather(uneven, torch.full((2 + rank,), float(rank)))
    short = torch.tensor([1.0, 2.0]).to(torch.float8_e5m2)
    dist.all_reduce(short)
    doubled = torch.tensor([rank + 1.0])
    dist.all_reduce(doubled, _make_nccl_premul_sum(0.5))
    counts = torch.tensor([7, -7], dtype=torch.int64) + rank
    dist.all_reduce(counts, dist.ReduceOp.AVG)
    pieces = [torch.tensor([float(rank + 1)]), torch.tensor([10.0 * (rank + 1)])]
    dist.group.WORLD.allreduce(pieces).wait()
    with torch.inference_mode():
        inferred = torch.ones(2)
    dist.all_reduce(inferred)
    tensors = [values(3, seed=seed) for seed in range(3)]
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as started:
        for tensor in tensors:
            dist.all_reduce(tensor)
    started.wait()
    return {
        "strided": strided.tolist(),
        "uneven": [each.tolist() for each in uneven],
        "short": short.float().tolist(),
        "premultiplied": doubled.item(),
        "integer mean": counts.tolist(),
        "large integer means": integer_means(),
        "several": [piece.item() for piece in pieces],
        "inferred": inferred.tolist(),
        "coalesced": [torch.equal(tensor, sum_of(seed, size)) for seed, tensor in enumerate(tensors)],
    }


def sum_of(seed, size):
    total = torch.zeros(3)
    for rank in range(size):
        total += torch.randint(1, 4, (3,), generator=torch.Generator().manual_seed(100 * seed + rank))
    return total


def groups(rank, size):
    """Sub-groups, meshes and groups that are made again."""
    facts = {}
    sub = dist.new_group([0, size - 1], backend="crossdevice")
    tensor = torch.tensor([float(rank)])
    if rank in (0, size - 1):
        dist.all_reduce(tensor, group=sub)
    facts["sub-group"] = tensor.item()
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("a", "b"))
    facts["mesh"] = dist.get_backend(mesh["b"].get_group())
    split = dist.group.WORLD.split_group(list(range(size)))
    whole = torch.ones(1)
    split.allreduce(whole).wait()
    split.shutdown()
    facts["split"] = whole.item()
    exact = dist.new_group(pg_options=BackendOptions(precision="exact"), backend="crossdevice")
    hidden = torch.tensor([(1e20, 1.0, -1e20)[rank] if rank < 3 else 0.0])
    dist.all_reduce(hidden, group=exact)
    facts["exact"] = hidden.item()
    facts["store"] = isinstance(dist.group.WORLD.get_group_store(), dist.Store)
    before = dist.group.WORLD._get_sequence_number_for_group()
    dist.barrier()
    facts["sequence"] = dist.group.WORLD._get_sequence_number_for_group() - before
    return facts


def asynchronous(rank):
    """Whether a started call lets the program go on while another rank is late."""
    tensor, group = torch.ones(1), dist.group.WORLD
    store = group.get_group_store()
    if rank == 1:
        store.wait([f"rank {other} went on" for other in range(dist.get_world_size()) if other != 1])
    work = dist.all_reduce(tensor, async_op=True)
    went_on = rank == 1 or not work.is_completed()
    store.set(f"rank {rank} went on", "")
    work.wait()
    names = [thread.name for thread in threading.enumerate()]
    return [went_on, tensor.item(), "crossdevice process group" in names, group.rank() == rank]


def small_copies(size):
    """The functions entered by copies of a few bytes, once they were made before."""
    tensor, whole = torch.ones(2), torch.zeros(2 * size)
    calls = {
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, tensor),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.zeros(2 * size), whole),
        "broadcast": lambda: dist.broadcast(tensor, 0),
        "barrier": dist.barrier,
    }
    for call in calls.values():
        call()
    return {name: num_of_rank_entered(call) for name, call in calls.items()}


SLEEP_CYCLES = 500_000_000
"""A quarter of a second of a GPU's clock, and more."""


def streams(rank, size):
    """Whether collectives of GPU tensors come after what makes them and before what reads them."""
    facts = {}
    tensor = torch.ones(1 << 20, device="cuda")
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    tensor.fill_(rank + 1.0)  # after the sleep, which the collective has to wait for
    work = dist.all_reduce(tensor, async_op=True)
    product = torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")  # goes on beside it
    work.wait()
    doubled = tensor * 2
    facts["in order"] = bool((doubled == size * (size + 1)).all()) and product[0, 0].item() == 64
    parts = [torch.full((1 << 18,), rank + 1.0, device="cuda") for _ in range(size)]
    out = torch.empty(1 << 18, device="cuda")
    work = dist.reduce_scatter(out, parts, async_op=True)
    del parts
    other = [
        torch.full((1 << 18,), 99.0, device="cuda") for _ in range(4 * size)
    ]  # in what was freed, if anything was
    work.wait()
    facts["memory is kept"] = bool((out == size * (size + 1) / 2).all())
    del other
    future = dist.all_reduce(torch.ones(8, device="cuda"), async_op=True).get_future()
    facts["future"] = future.then(lambda ended: ended.value()[0] * 2).wait().tolist() == [2.0 * size] * 8
    return facts


def errors(rank):
    """Types and texts of what goes wrong."""
    facts = {}

    def attempt(name, call):
        try:
            call()
            facts[name] = None
        except Exception as error:
            facts[name] = [[kind.__name__ for kind in type(error).__mro__], str(error)]

    attempt("root", lambda: dist.group.WORLD.broadcast(torch.ones(1), root=99))
    attempt("empty", lambda: dist.group.WORLD.allreduce([]))
    attempt("types", lambda: dist.group.WORLD.allreduce([torch.ones(1), torch.ones(1, dtype=torch.int32)]))
    attempt("operation", lambda: dist.all_reduce(torch.ones(1), dist.ReduceOp.BAND))
    short = torch.ones(1).to(torch.float8_e4m3fnuz)
    attempt("dtype", lambda: dist.all_reduce(short))
    attempt("sizes", lambda: dist.all_reduce(torch.ones(2 + rank)))
    dist.barrier()
    uneven, own = dist.new_group(backend="crossdevice"), torch.ones(4)
    if rank == 1:  # refused before anything is sent
        attempt("parts", lambda: dist.all_to_all_single(torch.zeros(4 + rank), own, [2, 2 + rank], [2, 2]))
    attempt(
        "splits",
        lambda: dist.all_to_all_single(torch.zeros(4 + rank), own, [2 + rank, 2], [2, 2], group=uneven),
    )
    late = dist.new_group(timeout=timedelta(seconds=2), backend="crossdevice")
    if rank == 1:
        time.sleep(12)  # whatever else the machine has to do
    attempt("late", lambda: dist.all_reduce(torch.ones(1), group=late))
    attempt("late, started", lambda: dist.all_reduce(torch.ones(1), group=late, async_op=True).wait())
    return facts


def broken(rank, size, what):
    """What the others say of the last rank, which is killed or interrupted; then, a group of those left."""
    odd, tensor = size - 1, torch.ones(1 << 10)
    for _ in range(20):
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).wait()
    dist.barrier()
    began = time.monotonic()
    number = signal.SIGKILL if what == "killed" else signal.SIGINT
    if rank == odd:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.5, lambda: os.kill(os.getpid(), number)).start()
    facts = {}
    try:
        while True:
            work = dist.all_reduce(tensor, async_op=what == "started")
            if work is not None:
                work.wait()
            if rank != odd and time.monotonic() - began > 0.2:
                time.sleep(0.01)  # the odd one waits most of the time
    except BaseException as error:
        facts["error"] = [[kind.__name__ for kind in type(error).__mro__], str(error)]
    facts["seconds"] = time.monotonic() - began
    dist.destroy_process_group()
    facts["ended"] = time.monotonic() - began - facts["seconds"]
    left = size - (what == "killed")
    dist.init_process_group("crossdevice", rank=rank, world_size=left)
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return facts | {"again": total.item()}


def main(rank, size, what):
    torch.set_num_threads(1)
    dist.init_process_group("crossdevice", rank=rank, world_size=size)
    if what in ("killed", "interrupted", "started"):
        report(rank, broken(rank, size, what))
        return
    facts = {"backend": dist.get_backend()}
    if what == "on GPUs":
        gloo = dist.new_group(backend="gloo")
        facts |= differences(rank, size, gloo, "cuda")
        facts["streams"] = streams(rank, size)
    elif what == "calls":
        gloo = dist.new_group(backend="gloo")
        facts |= differences(rank, size, gloo)
        facts["own"] = of_our_own(rank, size)
        facts["groups"] = groups(rank, size)
        facts["asynchronous"] = asynchronous(rank)
        facts["entered"] = small_copies(size)
    else:
        facts["errors"] = errors(rank)
    dist.destroy_process_group()
    if what == "errors":  # and again, after everything that went wrong
        dist.init_process_group("cpu:crossdevice", rank=rank, world_size=size)
        again = torch.ones(1)
        with contextlib.suppress(ValueError):
            dist.all_reduce(again)
        facts["again"] = again.item()
        dist.destroy_process_group()
    report(rank, facts)


if __name__ == "__main__":
    main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), sys.argv[1])
