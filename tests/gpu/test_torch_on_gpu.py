"""Tensors on a GPU: the bits of the host, for every algorithm; skipped where there is no GPU."""

import itertools

import numpy as np
import pytest

import crossdevice as cd
from crossdevice.algorithms.registry import ALGORITHMS

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")

DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "int32", "int64", "uint8", "complex64")
PLACEMENTS = (["cuda:0"] * 3, ["cuda:0", "cpu:0", "cuda:0", "cpu:1"], ["cuda:0"])


def tensors(dtype, count):
    generator = torch.Generator().manual_seed(count)
    wide = torch.randn(count, 211, generator=generator, dtype=torch.float64)
    wide *= 2.0 ** torch.randint(-12, 12, (count, 211), generator=generator)
    if dtype.startswith(("int", "uint")):
        return list((wide * 50).to(torch.int64).to(getattr(torch, dtype)))
    wide[0, :3] = torch.tensor([float("inf"), float("nan"), -0.0])
    return list(wide.to(getattr(torch, dtype)))


def bits(tensor):
    host = tensor.cpu().reshape(-1)
    return torch.view_as_real(host) if host.is_complex() else host


def same(left, right):
    left, right = bits(left), bits(right)
    return ((left == right) | ((left != left) & (right != right))).all()


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_gives_the_bits_of_the_host(name, dtype):
    ops = ALGORITHMS.load(name)()
    for placement, precision in itertools.product(PLACEMENTS, ("fast", "accurate", "exact")):
        options = cd.CommunicationOptions(precision=precision)
        on_host = tensors(dtype, len(placement))
        placed = [tensor.to(device.split(":")[0]) for tensor, device in zip(on_host, placement, strict=True)]
        value = cd.PerReplica(placed, devices=placement)
        reference = cd.PerReplica(on_host)
        for op in ("sum", "mean", "min", "max", "prod"):
            if dtype.startswith("complex") and op in ("min", "max", "prod"):
                continue
            if op == "prod" and precision == "fast" and dtype in ("float16", "bfloat16"):
                continue  # products may be contracted differently
            expected = ops.reduce(op, reference, "cpu:0", options)
            result = ops.reduce(op, value, value, options)
            parts = result.values if isinstance(result, cd.Mirrored) else (result,)
            for part, device in zip(parts, placement, strict=True):
                assert part.device.type == device.split(":")[0]
                assert same(part, expected), (placement, precision, op)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_on_a_gpu_have_the_bits_of_the_host(dtype):
    for placement, precision in itertools.product(PLACEMENTS, ("accurate", "exact")):
        options = cd.CommunicationOptions(precision=precision)
        on_host = tensors(dtype, len(placement))
        placed = [tensor.to(device.split(":")[0]) for tensor, device in zip(on_host, placement, strict=True)]
        value = cd.PerReplica(placed, devices=placement)
        for call in (
            lambda each, options=options: cd.reduce_scatter(each, "mean", options=options),
            cd.all_gather,
            cd.all_to_all,
        ):
            for part, right, device in zip(call(value), call(on_host), placement, strict=True):
                assert part.device.type == device.split(":")[0]
                assert same(part, right), (placement, precision)


def test_results_and_copies_are_where_they_were_asked_for():
    value = cd.PerReplica([torch.ones(4, device="cuda"), torch.ones(4, device="cuda")])
    assert value.devices == (cd.Device("cuda", 0),) * 2
    assert cd.RingAllReduce().reduce("sum", value, "cpu:3").device.type == "cpu"
    copies = cd.CrossDeviceOps().broadcast(torch.ones(3), value)
    assert [copy.device.type for copy in copies.values] == ["cuda", "cuda"]
    gathered = cd.CrossDeviceOps().gather(
        cd.PerReplica([torch.ones(2, device="cuda"), torch.zeros(1)]), "cuda:0"
    )
    assert gathered.tolist() == [1, 1, 0]
    out = [torch.empty(4, device="cuda") for _ in range(2)]
    cd.TreeAllReduce().reduce("mean", value, value, out=out)
    assert out[1].tolist() == [1, 1, 1, 1]


def test_nccl_itself_reduces_one_replica_per_gpu():
    value = cd.PerReplica(
        [torch.full((5,), 3.0, device=f"cuda:{i}") for i in range(torch.cuda.device_count())]
    )
    ops = cd.NcclAllReduce()
    assert ops.fallback_reason(value.devices) is None
    plan_text = ops.explain(value, value)
    assert "engine all-reduce" in plan_text or torch.cuda.device_count() == 1
    result = ops.reduce("mean", value, value)
    first = result.values[0] if isinstance(result, cd.Mirrored) else result
    assert first.tolist() == [3.0] * 5


def test_devices_that_do_not_exist_are_named_with_those_that_do():
    value = cd.PerReplica([torch.ones(1, device="cuda")])
    with pytest.raises(cd.errors.DeviceError, match=r"cuda:99 does not exist here; .* cuda:0"):
        cd.RingAllReduce().reduce("sum", value, "cuda:99")


def test_sparse_values_are_gathered_on_the_gpu():
    slices = [
        cd.IndexedSlices(torch.ones(2, 3, device="cuda"), torch.tensor([0, 4], device="cuda"), (5, 3))
        for _ in range(2)
    ]
    result = cd.DirectAllReduce().reduce("mean", cd.PerReplica(slices), "cuda:0")
    assert result.indices.tolist() == [0, 4, 0, 4]
    assert np.allclose(cd.to_dense(result).cpu(), [[1] * 3, [0] * 3, [0] * 3, [0] * 3, [1] * 3])


def test_replicas_work_on_the_callers_stream():
    strategy = cd.MirroredStrategy(["cuda:0", "cuda:0"])

    def step():
        torch.cuda._sleep(2_000_000)  # what is combined comes late
        value = torch.full((99,), float(cd.get_replica_context().replica_id_in_sync_group), device="cuda")
        return torch.cuda.current_stream().cuda_stream, cd.get_replica_context().all_reduce("sum", value)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            streams, sums = strategy.run(step)
            assert streams.values == (side.cuda_stream,) * 2
            assert sums.values[1].tolist() == [1.0] * 99
    (streams, _) = strategy.run(step)
    assert streams.values == (torch.cuda.default_stream().cuda_stream,) * 2


@pytest.mark.parametrize("elements", [0, 1, 1023, 4096, 4099, 70_001, 9_000_001])
def test_a_fingerprint_on_a_gpu_is_that_of_the_host(elements):
    host = torch.randint(-100, 100, (elements + 1,), dtype=torch.int16)
    found, expected = (
        cd.fingerprint(
            {"whole": each, "elsewhere": each[1:], "turned": each[: elements // 6 * 6].reshape(6, -1).T}
        )
        for each in (host.cuda(), host)
    )
    assert found.leaves == expected.leaves


def test_a_fingerprint_waits_for_pending_work_and_reads_what_it_made():
    memory = torch.zeros(1 << 20, device="cuda")
    torch.cuda._sleep(20_000_000)
    memory += 1
    assert cd.fingerprint(memory) == cd.fingerprint(torch.ones(1 << 20))
