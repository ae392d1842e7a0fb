"""CuPy and JAX arrays on a GPU: the bits of the host, for every algorithm; skipped where there is no GPU."""

import importlib
import itertools

import numpy as np
import pytest

import crossdevice as cd
from conformance import array_libraries
from crossdevice.algorithms.registry import ALGORITHMS
from crossdevice.errors import ConversionError, DeviceError, OutError
from crossdevice.kernels.cuda.driver import kernels_unavailable

DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "int32", "int64", "uint8", "complex64")
PLACEMENTS = {
    "cupy": (["cuda:0"] * 3, ["cuda:0"]),
    "jax": (["cuda:0"] * 3, ["cuda:0", "cpu:0", "cuda:0"], ["cuda:0"]),
}


@pytest.fixture(params=sorted(PLACEMENTS))
def library(request):
    """A library that is here and sees a GPU, with 64-bit dtypes."""
    module = pytest.importorskip(request.param)
    if request.param == "cupy":
        try:
            count = module.cuda.runtime.getDeviceCount()
        except module.cuda.runtime.CUDARuntimeError:
            count = 0
        if not count:
            pytest.skip("no CUDA device on this machine")
    else:
        array_libraries.jax_devices()  # other tests of this process need as many
        if module.default_backend() != "gpu":
            pytest.skip("JAX sees no GPU on this machine")
    return request.param


def placed(library, array, device):
    if library == "cupy":
        return importlib.import_module("cupy").array(array)
    jax = importlib.import_module("jax")
    return jax.device_put(array, jax.devices("gpu" if device.startswith("cuda") else "cpu")[0])


def on_host(array):
    return array.get() if hasattr(array, "get") else np.asarray(array)


def arrays_of(dtype, count):
    chosen = np.random.default_rng(count)
    wide = chosen.normal(size=(count, 211)) * 2.0 ** chosen.integers(-12, 12, size=(count, 211))
    if dtype.startswith(("int", "uint")):
        return [row.astype(np.int64).astype(dtype) for row in wide * 50]
    wide[0, :3] = np.inf, np.nan, -0.0
    kind = importlib.import_module("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype
    return [row.astype(kind) for row in wide]


def same(found, right):
    assert (found.dtype, found.shape) == (right.dtype, right.shape)
    parts = [a.view(f"f{a.dtype.itemsize // 2}") if a.dtype.kind == "c" else a for a in (found, right)]
    left, right = (np.asarray(part, np.float64) if part.dtype.itemsize == 2 else part for part in parts)
    return np.array_equal(left, right, equal_nan=True)


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - {"nccl"}))
@pytest.mark.parametrize(
    ("precision", "lowering"),
    [("fast", "auto"), ("accurate", "auto"), ("accurate", "off"), ("exact", "auto")],
)
def test_results_have_the_bits_of_the_host(library, name, precision, lowering):
    if (precision, lowering) != ("accurate", "auto") and name not in ("tree", "direct"):
        pytest.skip("two algorithms stand for all, since JAX compiles every step of each")
    ops = ALGORITHMS.load(name)()
    options = cd.CommunicationOptions(precision=precision, lowering=lowering)
    for dtype, placement, op in itertools.product(DTYPES, PLACEMENTS[library], ("sum", "mean", "max")):
        if (dtype == "complex64" and op == "max") or (dtype, library) == ("bfloat16", "cupy"):
            continue
        is_stepped = lowering == "off" or "cpu:0" in placement or kernels_unavailable() is not None
        if is_stepped and precision == "fast":
            continue  # in the order of the plan, whose steps on one device the host does not take
        if is_stepped and (library, op) == ("jax", "mean") and dtype in ("int8", "uint8"):
            continue  # a float32 division, which XLA does on GPUs to within a unit of the last place only
        arrays = arrays_of(dtype, len(placement))
        right = ops.reduce(op, cd.PerReplica(arrays, ["cpu:0"] * len(arrays)), "cpu:0", options)
        value = cd.PerReplica([placed(library, *pair) for pair in zip(arrays, placement, strict=True)])
        result = ops.reduce(op, value, value, options)
        components = result.values if len(placement) > 1 else (result,)
        for component, array in zip(components, value.values, strict=True):
            assert component.device == array.device
            assert same(on_host(component), right), (dtype, placement, op)


def test_batches_gathers_broadcasts_and_slices_work(library):
    arrays = [placed(library, np.float32([[k, 1], [2, k]]), "cuda:0") for k in range(3)]
    numbers = placed(library, np.int64([1, 1]), "cuda:0")
    value = cd.PerReplica(arrays)
    ops = cd.RingAllReduce(num_packs=2)
    first, second = ops.batch_reduce("sum", [(value, value), (value, "cuda:0")])
    assert on_host(first.values[2]).tolist() == on_host(second).tolist() == [[3, 3], [6, 3]]
    assert on_host(ops.gather(value, "cuda:0")).shape == (6, 2)
    assert on_host(ops.broadcast(arrays[1], value).values[2]).tolist() == [[1, 1], [2, 1]]
    slices = cd.PerReplica([cd.IndexedSlices(array, numbers, (4, 2)) for array in arrays])
    joined = ops.reduce("mean", slices, "cuda:0")
    assert on_host(joined.indices).tolist() == [1] * 6
    assert np.allclose(on_host(cd.to_dense(joined))[1], [3, 2])
    with pytest.raises(DeviceError, match="cuda:99 does not exist"):
        ops.reduce("sum", value, "cuda:99")


def test_out_is_written_where_the_library_can(library):
    arrays = [placed(library, np.float32([k, 1]), "cuda:0") for k in range(3)]
    value = cd.PerReplica(arrays)
    if library == "jax":
        with pytest.raises(OutError, match="cannot be written to"):
            cd.TreeAllReduce().reduce("sum", value, value, out=value)
    else:
        cd.TreeAllReduce().reduce("sum", value, value, out=value)
        assert [on_host(array).tolist() for array in arrays] == [[3, 3]] * 3


def test_a_gpu_is_one_memory_and_its_plans_are_fused(library):
    if kernels_unavailable() is not None:
        pytest.skip(str(kernels_unavailable()))
    value = cd.PerReplica([placed(library, np.ones(3, np.float32), "cuda:0") for _ in range(3)])
    assert "one fused pass adds" in cd.RingAllReduce().explain(value, value)


def test_work_comes_after_what_the_library_does_and_before_what_it_does_next(library):
    """Long computations before, and inputs that are gone or overwritten right after."""
    ops, size = cd.DirectAllReduce(), 2_000_001
    if library == "cupy":
        cupy = importlib.import_module("cupy")
        for stream in (cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream.null):
            with stream:
                big = cupy.ones((3000, 3000), cupy.float32)
                arrays = [cupy.zeros(size, cupy.float32) for _ in range(3)]
                for _ in range(20):
                    big = big @ big * 0
                arrays[2] += 5 + big[0, 0]
                value = cd.PerReplica(arrays)
                result = ops.reduce("sum", value, value)
                total = result.values[1] + 0
                arrays[2][:] = -1
                del result
                cupy.zeros(size, cupy.float32).fill(-1)
            stream.synchronize()
            assert (total == 5).all()
        return
    jax = importlib.import_module("jax")
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, y: (y @ y) * 0, x)[0, 0])
    for _ in range(3):
        zero = slow(placed(library, np.ones((3000, 3000), np.float32), "cuda:0"))
        arrays = [placed(library, np.zeros(size, np.float32), "cuda:0") + zero + k for k in range(3)]
        result = ops.reduce("sum", cd.PerReplica(arrays), "cuda:0")
        del arrays, zero
        overwriting = [jax.numpy.full(size, -1.0) for _ in range(4)]
        assert (np.asarray(result) == 3).all()
        del overwriting


def test_cupys_bfloat16_is_refused(library):
    if library == "cupy":
        kind = importlib.import_module("ml_dtypes").bfloat16
        array = importlib.import_module("cupy").zeros(2, kind)
        with pytest.raises(ConversionError, match="bfloat16 array of CuPy"):
            cd.all_reduce([array, array])
