"""Replicas in the memory of one GPU: one fused pass with the bits of the host, in the order of streams."""

import itertools

import pytest

import crossdevice as cd
from crossdevice.algorithms.registry import ALGORITHMS
from crossdevice.errors import OutError
from crossdevice.kernels.cuda.driver import kernels_unavailable
from crossdevice.values.dtypes import COMPLEXES, ITEM_BYTES, SHORT_FLOATS

torch = pytest.importorskip("torch")
MISSING = kernels_unavailable() if torch.cuda.is_available() else "no CUDA device on this machine"
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

OPS = ("sum", "mean", "min", "max", "prod")


def tensors(dtype, count, size=211):
    generator = torch.Generator().manual_seed(count + size)
    wide = torch.randn(count, size, generator=generator, dtype=torch.float64)
    wide *= 2.0 ** torch.randint(-12, 12, (count, size), generator=generator)
    kind = getattr(torch, dtype)
    if dtype in COMPLEXES:
        return list((wide + 1j * wide.flip(1)).to(kind))
    if dtype.startswith("uint"):
        return list((wide * 50).to(torch.int64).abs().to(kind))
    if dtype.startswith("int"):
        return list((wide * 50).to(torch.int64).to(kind))
    wide[0, :4] = torch.tensor([float("inf"), float("nan"), -0.0, 1e300])[: min(4, size)]
    return list(wide.to(kind))


def numbers(tensor):
    """On the host, as NumPy has them: without complex numbers and bfloat16."""
    host = tensor.detach().cpu().reshape(-1)
    host = torch.view_as_real(host) if host.is_complex() else host
    return host.float().numpy() if host.dtype == torch.bfloat16 else host.numpy()


def same(left, right):
    assert (left.dtype, left.shape) == (right.dtype, right.shape)
    left, right = numbers(left), numbers(right)
    return bool(((left == right) | ((left != left) & (right != right))).all())


def placed(arrays):
    return cd.PerReplica([array.cuda() for array in arrays])


def fused_text(ops, value, options):
    return "one fused pass adds" in ops.explain(value, value, options)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "int16"])
@pytest.mark.parametrize("lowering", ["auto", "off"])
def test_weighted_sums_and_means_have_the_bits_of_the_host(dtype, lowering):
    for precision, op in itertools.product(("fast", "accurate", "exact"), ("sum", "mean")):
        options = cd.CommunicationOptions(precision=precision, lowering=lowering)
        for weights in ([0.1, 0.2, 0.7], [3, 0, 1]):  # the second pair finds a kernel that is there already
            arrays = tensors(dtype, 3, 5003)
            right = cd.reduce(arrays, op, options=options, weights=weights)
            value, ops = placed(arrays), cd.DirectAllReduce()
            results = ops.reduce(op, value, value, options, weights=weights).values
            assert all(same(result, right) for result in results), (precision, op, weights)
            assert same(ops.bind(op, value, value, options, weights=weights)().values[2], right)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("count", [2, 17, 64, 65, 200])
def test_exact_sums_of_any_number_of_replicas_have_the_bits_of_the_host(dtype, count):
    options = cd.CommunicationOptions(precision="exact")
    for op in ("sum", "mean"):
        arrays = tensors(dtype, count, 5003)
        arrays[1][1000:2000] = -arrays[0][1000:2000]  # so that what is small counts
        right = cd.reduce(arrays, op, options=options)
        value, ops = placed(arrays), cd.DirectAllReduce()
        assert "one fused pass adds" in ops.explain(value, "cuda:0", options)
        assert same(ops.reduce(op, value, "cuda:0", options), right)
        results = ops.reduce(op, value, value, options, out=value).values
        assert len(results) == count
        assert all(same(result, right) for result in results)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_exact_sums_of_any_bits_have_the_bits_of_the_host(dtype):
    """Most of these columns are added up as integers; two thirds of the blocks are cut or misaligned."""
    kind, options = getattr(torch, dtype), cd.CommunicationOptions(precision="exact")
    generator = torch.Generator().manual_seed(6)
    for count, size, op in itertools.product((2, 9), (1024, 1023, 5000), ("sum", "mean")):
        raw = torch.randint(-(2**63), 2**63 - 1, (count, size), generator=generator).view(kind)
        arrays = [row[:size].clone() for row in raw]
        arrays[-1][:300] = -arrays[0][:300]
        right = cd.reduce(arrays, op, options=options)
        for offset in (0, 1):
            moved = [torch.cat([array[:offset], array]).cuda()[offset:] for array in arrays]
            value = cd.PerReplica(moved)
            result = cd.DirectAllReduce().reduce(op, value, "cuda:0", options)
            assert same(result, right), (count, size, op, offset)


def test_results_of_another_float_dtype_have_the_bits_of_the_host():
    for (dtype, into), op in itertools.product(
        itertools.permutations(("float16", "bfloat16", "float32", "float64"), 2),
        ("sum", "mean", "max", "median"),
    ):
        arrays = tensors(dtype, 3, 1009)
        right, out = (
            torch.empty(1009, dtype=getattr(torch, into), device=place) for place in ("cpu", "cuda")
        )
        cd.reduce(arrays, op, out=right)
        assert same(cd.DirectAllReduce().reduce(op, placed(arrays), "cuda:0", out=out), right), (
            dtype,
            into,
            op,
        )


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES.keys() - {"bool", *SHORT_FLOATS}))
@pytest.mark.parametrize("precision", ["fast", "accurate", "exact"])
@pytest.mark.parametrize("lowering", ["auto", "off"])
def test_every_dtype_has_the_bits_of_the_host(dtype, precision, lowering):
    if lowering == "off" and dtype in ("uint16", "uint32", "uint64"):
        pytest.skip("PyTorch itself cannot compute with them")
    options = cd.CommunicationOptions(precision=precision, lowering=lowering)
    for count, size, op in itertools.product((1, 3), (1, 5003), OPS):
        if dtype in COMPLEXES and op in ("min", "max", "prod"):
            continue
        if lowering == "off" and op == "prod" and precision == "fast" and "float" in dtype:
            continue  # PyTorch may contract products
        if precision == "exact" and op == "prod" and size > 1:
            continue  # in Python's integers, on the host
        arrays = tensors(dtype, count, size)
        expected = cd.DirectAllReduce().reduce(op, cd.PerReplica(arrays, ["cpu:0"] * count), "cpu:0", options)
        value = placed(arrays)
        result = cd.DirectAllReduce().reduce(op, value, value, options)
        for part in result.values if count > 1 else (result,):
            assert part.device.type == "cuda"
            assert same(part, expected), (count, size, op)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
@pytest.mark.parametrize("precision", ["fast", "accurate"])
def test_every_algorithm_is_fused_and_keeps_its_order(name, precision):
    ops, options = ALGORITHMS.load(name)(), cd.CommunicationOptions(precision=precision)
    for count, dtype in ((2, "float32"), (3, "bfloat16"), (5, "float64"), (8, "float32"), (16, "float16")):
        arrays = tensors(dtype, count, 1003)
        value = placed(arrays)
        assert fused_text(ops, value, options)
        expected = ops.reduce("mean", cd.PerReplica(arrays, ["cpu:0"] * count), "cpu:0", options)
        result = ops.reduce("mean", value, value, options)
        assert len({part.data_ptr() for part in result.values}) == count
        assert all(same(part, expected) for part in result.values), (count, dtype)


def batch(count, dtypes=("float32", "bfloat16", "int32"), sizes=(1, 7, 0, 4096, 100_003)):
    return [tensors(dtype, count, size) for dtype, size in itertools.product(dtypes, sizes)]


def check_batch(ops, columns, results):
    for column, result in zip(columns, results, strict=True):
        expected = ops.reduce("mean", cd.PerReplica(column, ["cpu:0"] * len(column)), "cpu:0")
        assert all(same(part, expected) for part in result.values)


def test_a_batch_is_reduced_again_and_again_from_new_addresses():
    ops, columns = cd.DirectAllReduce(), batch(5)
    for _ in range(4):
        values = [placed(column) for column in columns]
        check_batch(ops, columns, ops.batch_reduce("mean", [(value, value) for value in values]))


def test_views_with_gaps_and_odd_addresses_are_read():
    whole = torch.randn(3, 8, 1001)
    for cut in (lambda t: t[:, 1:], lambda t: t[::2, 1:].t(), lambda t: t.reshape(-1)[3:], lambda t: t[2, 5]):
        host = [cut(part) for part in whole]
        expected = cd.DirectAllReduce().reduce("sum", cd.PerReplica(host, ["cpu:0"] * 3), "cpu:0")
        value = cd.PerReplica([cut(part) for part in whole.cuda()])
        for part in cd.DirectAllReduce().reduce("sum", value, value).values:
            assert same(part, expected)


def test_out_and_in_place():
    ops, arrays = cd.TreeAllReduce(), tensors("float32", 4, 1003)
    expected = ops.reduce("mean", cd.PerReplica(arrays, ["cpu:0"] * 4), "cpu:0")
    for precision in ("accurate", "fast"):
        options = cd.CommunicationOptions(precision=precision)
        expected = ops.reduce("mean", cd.PerReplica(arrays, ["cpu:0"] * 4), "cpu:0", options)
        value = placed(arrays)
        strided = [torch.empty(2006, device="cuda")[::2] for _ in range(4)]
        for out in (strided, value.values, [torch.empty(1004, device="cuda")[1:] for _ in range(4)]):
            value = placed(arrays) if out is not value.values else value
            result = ops.reduce("mean", value, value, options, out=out)
            assert all(a is b for a, b in zip(result.values, out, strict=True))
            assert all(same(part, expected) for part in out)
    memory = torch.zeros(1500, device="cuda")
    value = cd.PerReplica([memory[:1003]])
    with pytest.raises(OutError, match="overlap"):
        ops.reduce("sum", value, "cuda:0", out=memory[1:1004])


@pytest.mark.parametrize("is_bound", [False, True], ids=["called", "bound"])
def test_a_batch_is_reduced_in_place_again_and_again(is_bound):
    ops, columns = cd.DirectAllReduce(), batch(5, dtypes=("float32", "bfloat16"))
    values = [placed(column) for column in columns]
    for turn in range(6):
        if turn in (0, 3):  # at other addresses
            values = [placed(column) for column in columns]
            bound = ops.bind("mean", [(value, value) for value in values], out=values)
        for value, column in zip(values, columns, strict=True):
            for array, source in zip(value.values, column, strict=True):
                array.copy_(source)
        pairs = [(value, value) for value in values]
        results = bound() if is_bound else ops.batch_reduce("mean", pairs, out=values)
        assert all(
            a is b
            for result, value in zip(results, values, strict=True)
            for a, b in zip(result.values, value.values, strict=True)
        )
        check_batch(ops, columns, results)


@pytest.mark.parametrize("precision", ["accurate", "fast"])
def test_known_batches_write_to_whatever_memory_is_given(precision):
    ops, options = cd.HierarchicalCopyAllReduce(), cd.CommunicationOptions(precision=precision)
    columns = [tensors("float32", 4, size) for size in (5, 1003, 1003, 70)]
    hosts = [cd.PerReplica(column, ["cpu:0"] * 4) for column in columns]
    expected = ops.batch_reduce("mean", [(host, "cpu:0") for host in hosts], options)
    for _ in range(4):
        values = [placed(column) for column in columns]
        strided = [torch.empty(2006, device="cuda")[::2] for _ in range(4)]
        odd = [torch.empty(1004, device="cuda")[1:] for _ in range(4)]
        outs = [None, strided, odd, [*reversed(values[3].values)]]
        results = ops.batch_reduce("mean", [(value, value) for value in values], options, out=outs)
        for result, out, right in zip(results, outs, expected, strict=True):
            assert out is None or all(a is b for a, b in zip(result.values, out, strict=True))
            assert all(same(part, right) for part in result.values)
    memory = torch.zeros(2100, device="cuda")
    overlapping = [memory[:1003], memory[1002:2005], *odd[2:]]
    wide = [*strided[:3], torch.empty(2006, dtype=torch.float64, device="cuda")[::2]]
    before = [value.clone() for value in values[3].values]
    for wrong, message in (
        ([None, strided, overlapping, outs[3]], r"out\[0\] and out\[1\] overlap"),
        ([None, wide, odd, outs[3]], "has dtype float64"),
    ):
        with pytest.raises(OutError, match=message):
            ops.batch_reduce("mean", [(value, value) for value in values], options, out=wrong)
    assert all(map(same, before, values[3].values))


def test_shared_results_are_one_memory():
    value = placed(tensors("float32", 3))
    result = cd.DirectAllReduce().reduce("sum", value, value, cd.CommunicationOptions(share_results=True))
    assert len({part.data_ptr() for part in result.values}) == 1


def test_results_may_outlive_each_other():
    ops, columns = cd.DirectAllReduce(), batch(3)
    kept = []
    for _ in range(3):
        values = [placed(column) for column in columns]
        results = ops.batch_reduce("mean", [(value, value) for value in values])
        kept.append([result.values[1] for result in results])
        del results, values
    for column, parts in zip(columns, zip(*kept, strict=True), strict=True):
        expected = ops.reduce("mean", cd.PerReplica(column, ["cpu:0"] * 3), "cpu:0")
        assert all(same(part, expected) for part in parts)


def slow_fill(target, source):
    torch.cuda._sleep(20_000_000)  # about 10 ms, far longer than a launch takes
    target.copy_(source)


@pytest.mark.parametrize("num_values", [1, 6])
def test_work_comes_after_a_producer_on_its_stream_and_before_a_consumer(num_values):
    """Without order, results would be those of the zeros that were there before."""
    ops, stream = cd.DirectAllReduce(), torch.cuda.Stream()
    sources = [
        [torch.full((50_001,), float(r + 1), device="cuda") for r in range(3)] for _ in range(num_values)
    ]
    targets = [[torch.zeros_like(source) for source in column] for column in sources]
    pairs = [(value, value) for value in map(cd.PerReplica, targets)]
    ops.batch_reduce("sum", pairs)
    torch.cuda.synchronize()
    for current in (stream, torch.cuda.Stream(), torch.cuda.default_stream(), stream):
        for column in targets:
            for target in column:
                target.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(current):
            for column, originals in zip(targets, sources, strict=True):
                slow_fill(column[2], originals[2])
                column[0].copy_(originals[0])
                column[1].copy_(originals[1])
            results = ops.batch_reduce("sum", pairs) if num_values > 1 else [ops.reduce("sum", *pairs[0])]
            copies = [part.clone() for result in results for part in result.values]
            for column in targets:
                column[0].zero_()
        current.synchronize()
        assert all((copy == 6).all() for copy in copies)


def test_a_producer_elsewhere_is_waited_for_with_its_event():
    side, target = torch.cuda.Stream(), [torch.zeros(1_000_001, device="cuda") for _ in range(2)]
    value = cd.PerReplica(target)
    cd.DirectAllReduce().reduce("sum", value, value)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        slow_fill(target[1], torch.ones_like(target[1]))
    torch.cuda.current_stream().wait_stream(side)
    result = cd.DirectAllReduce().reduce("sum", value, value)
    assert all((part == 1).all().item() for part in result.values)


@pytest.mark.parametrize("num_values", [1, 6])
def test_a_warm_reduction_can_be_captured_in_a_graph(num_values):
    ops = cd.DirectAllReduce()
    inputs = [[torch.zeros(5003, device="cuda") for _ in range(4)] for _ in range(num_values)]
    pairs = [(value, value) for value in map(cd.PerReplica, inputs)]

    def call():
        return ops.batch_reduce("mean", pairs) if num_values > 1 else [ops.reduce("mean", *pairs[0])]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = call()
        second = call()
    for turn in range(1, 4):
        call()  # other work with the same objects must not disturb what the graph reads
        for column in inputs:
            for replica, array in enumerate(column):
                array.fill_(turn * (replica + 1))
        graph.replay()
        torch.cuda.synchronize()
        for result in (*first, *second):
            assert all((part == 2.5 * turn).all() for part in result.values)


def test_a_graph_and_calls_outside_of_it_do_not_share_their_tables():
    ops, stream = cd.DirectAllReduce(), torch.cuda.Stream()
    inputs = [[torch.ones(size, device="cuda") for _ in range(3)] for size in (5, 5003, 70)]
    outs = [[torch.zeros_like(array) for array in column] for column in inputs]
    pairs = [(value, value) for value in map(cd.PerReplica, inputs)]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        ops.batch_reduce("sum", pairs)
        ops.batch_reduce("sum", pairs, out=outs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        ops.batch_reduce("sum", pairs, out=outs)
    with torch.cuda.stream(stream):
        for column in outs:
            torch._foreach_zero_(column)
        ops.batch_reduce("sum", pairs, out=outs)  # not replayed yet: the graph's own table is still empty
    torch.cuda.synchronize()
    assert all((array == 3).all() for column in outs for array in column)
    others = [cd.PerReplica([array.clone() for array in column]) for column in inputs]
    for _ in range(3):
        ops.batch_reduce("sum", [(value, value) for value in others])
    del ops, others
    torch.cuda.empty_cache()
    for column in outs:
        torch._foreach_zero_(column)
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    assert all((array == 3).all() for column in outs for array in column)


def test_explain_says_what_is_fused_and_why_not():
    value, ops = placed(tensors("float32", 3)), cd.RingAllReduce()
    assert "all float32 values are in the memory of cuda:0: one fused pass" in ops.explain(value, value)
    wide, exact = placed(tensors("float64", 3)), cd.CommunicationOptions(precision="exact")
    assert "one fused pass" in ops.explain(wide, wide, exact)
    text = ops.explain(wide, wide, exact, "prod")
    assert "run step by step: exact products of float64 have no GPU kernel" in text
    assert "run step by step: lowering is off" in ops.explain(
        value, value, cd.CommunicationOptions(lowering="off")
    )


def test_a_current_device_or_default_dtype_elsewhere_does_not_matter():
    torch.set_default_dtype(torch.float64)
    try:
        value = placed(tensors("float32", 3))
        assert cd.DirectAllReduce().reduce("sum", value, value).values[0].dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
