"""Kernels compile for a GPU that is not there, and read and write 16 bytes at a time wherever they can.

Collected only by test_triton_kernels.py, in a process of its own.
"""

from __future__ import annotations

import re

import pytest
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from crossdevice.kernels.cuda.families import arranged, block_elements, exact_warps
from crossdevice.kernels.cuda.gpu_fingerprint import BLOCKS, UNROLLED
from crossdevice.kernels.cuda.gpu_fingerprint import NUM_WARPS as FINGERPRINT_WARPS
from crossdevice.kernels.cuda.gpu_sums import BLOCK as SUM_BLOCK
from crossdevice.kernels.cuda.gpu_sums import NUM_WARPS as SUM_WARPS
from crossdevice.kernels.cuda.triton_arithmetic import kernel_spec
from crossdevice.kernels.cuda.triton_exact import exact_by_table
from crossdevice.kernels.cuda.triton_fingerprint import sum_blocks
from crossdevice.kernels.cuda.triton_kernels import pass_by_arguments, pass_by_table
from crossdevice.kernels.cuda.triton_launching import ANY_ADDRESS, NUM_WARPS, WARP_THREADS, spare_arguments
from crossdevice.kernels.cuda.triton_sums import TYPES, add_arrays
from crossdevice.values.recipe import Recipe
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.weights import UNKNOWN_WEIGHTS

SUM, MEAN = Recipe(ReduceOp.SUM, "accurate"), Recipe(ReduceOp.SUM, "accurate", 3)
KINDS = {
    "wide": (MEAN, "float32", "float32"),
    "wide bfloat16": (SUM, "bfloat16", "bfloat16"),
    "wide into another dtype": (MEAN, "bfloat16", "float32"),
    "wide product": (Recipe(ReduceOp.PROD, "accurate"), "float16", "float16"),
    "compensated": (MEAN, "float64", "float64"),
    "native": (Recipe(ReduceOp.SUM, "fast", 4), "float32", "float32"),
    "native tree": (Recipe(ReduceOp.SUM, "fast", 3, (0, (2, 1))), "float32", "float32"),
    "rounded tree": (Recipe(ReduceOp.SUM, "fast", 3, (0, (2, 1))), "bfloat16", "bfloat16"),
    "least": (Recipe(ReduceOp.MIN, "accurate"), "float16", "float16"),
    "greatest": (Recipe(ReduceOp.MAX, "accurate"), "uint64", "uint64"),
    "wrapping": (SUM, "uint8", "uint8"),
    "wrapping mean": (Recipe(ReduceOp.SUM, "fast", 3), "int64", "float64"),
    "true mean": (MEAN, "int16", "float32"),
    "weighted": (SUM._replace(weights=UNKNOWN_WEIGHTS), "bfloat16", "bfloat16"),
    "weighted compensated": (SUM._replace(weights=UNKNOWN_WEIGHTS), "float64", "float64"),
}


class _AbsentGpu:
    """As much of a driver as compiling needs."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


@pytest.fixture
def _absent_gpu(monkeypatch):
    if not hasattr(pass_by_arguments, "device_caches"):
        pytest.skip("Triton interprets kernels in this process")
    monkeypatch.setattr(driver, "_active", _AbsentGpu())
    kernels = pass_by_arguments, pass_by_table, exact_by_table, sum_blocks, add_arrays
    for kernel in kernels:
        kernel.device_caches.clear()
    yield
    for kernel in kernels:
        kernel.device_caches.clear()


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.usefixtures("_absent_gpu")
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_compile_with_wide_accesses_and_without_contraction(kind):
    arithmetic = arranged(*KINDS[kind]).arithmetic
    spec, block = kernel_spec(arithmetic), block_elements(arithmetic)
    options = {"grid": (1,), "num_warps": NUM_WARPS, "enable_fp_fusion": False}
    num_inputs = 3 if spec.numbers_per_input == 1 else 8
    inputs, outputs = (ANY_ADDRESS,) * num_inputs, (ANY_ADDRESS,) * 3
    by_arguments = pass_by_arguments.warmup(inputs, outputs, ANY_ADDRESS, spec, block, **options)
    by_table = pass_by_table.warmup(ANY_ADDRESS, ANY_ADDRESS, num_inputs, 3, spec, block, **options)
    for compiled, num_numbers in ((by_arguments, num_inputs + 3 + 1), (by_table, 2)):
        assert spare_arguments(compiled, num_numbers) in (0, 1, 2)  # so that the driver launches it
        assert spare_arguments(compiled, 99) is None
        code = compiled.asm["ptx"]
        assert re.search(r"ld\.global\.v(4\.b32|2\.b64)", code)
        assert re.search(r"st\.global\.v(4\.b32|2\.b64)", code)
        assert not re.search(r"\bfma\.|\.ftz|div\.full|div\.approx", code)


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.usefixtures("_absent_gpu")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_one_kernel_of_a_dtype_adds_exactly_and_contracts_nothing(dtype):
    specs = [
        (kernel_spec(arithmetic), block_elements(arithmetic), exact_warps(arithmetic))
        for divisor in (None, 3, 70_000)
        for arithmetic in [arranged(Recipe(ReduceOp.SUM, "exact", divisor), dtype, dtype).arithmetic]
    ]
    assert len(set(specs)) == 1
    spec, block, warps = specs[0]
    options = {"grid": (1,), "num_warps": warps, "enable_fp_fusion": False}
    chunk = warps * WARP_THREADS
    compiled = exact_by_table.warmup(*[ANY_ADDRESS] * 5, spec, block, chunk, **options)
    assert spare_arguments(compiled, 5) in (0, 1, 2)
    # Of the loop over limbs: the carry, the three limbs before, a bit for those below, and six of the result.
    loops = re.findall(r"scf\.for .* iter_args\(.*\) -> \((.*?)\)", compiled.asm["ttir"])
    assert max(loop.count(f"tensor<{chunk}xi64>") for loop in loops) >= 11
    code = compiled.asm["ptx"]
    widest = {"bfloat16": "v2.b32", "float32": "v4.b32", "float64": "v2.b64"}[dtype]
    assert re.search(rf"ld\.global\.{widest}", code)
    assert re.search(rf"st\.global\.{widest}", code)
    assert not re.search(r"\bfma\.|\.ftz|div\.full|div\.approx", code)


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.usefixtures("_absent_gpu")
def test_fingerprints_read_16_bytes_at_a_time_and_multiply_32_bits():
    numbers = (ANY_ADDRESS,) * 3, (1, 2)
    compiled = sum_blocks.warmup(
        *numbers[0], *numbers[1], BLOCKS, UNROLLED, grid=(1,), num_warps=FINGERPRINT_WARPS
    )
    code = compiled.asm["ptx"]
    # Words and keys; of keys that two loads share a part, some are read one by one.
    assert len(re.findall(r"ld\.global\.v4\.b32", code)) > 2 * len(re.findall(r"ld\.\w+\.b32", code))
    assert "mul.wide.u32" in code or "mad.wide.u32" in code


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.usefixtures("_absent_gpu")
@pytest.mark.parametrize(("dtype", "num_parts"), [("float32", 2), ("bfloat16", 2), ("float64", 3)])
def test_running_sums_read_and_write_parts_16_bytes_at_a_time_and_contract_nothing(dtype, num_parts):
    memory, numbers = (ANY_ADDRESS,) * 3, (2, 3, 4096, 7)
    constants = TYPES[dtype], dtype == "bfloat16", num_parts, SUM_BLOCK
    options = {"grid": (1,), "num_warps": SUM_WARPS, "enable_fp_fusion": False}
    code = add_arrays.warmup(*memory, *numbers, *constants, **options).asm["ptx"]
    assert re.search(r"ld\.global\.v2\.b64", code)
    assert re.search(r"st\.global\.v2\.b64", code)
    assert not re.search(r"\bfma\.|\.ftz", code)
