"""Kernels compiled for other processors have the same bits: for any x86-64, and for AVX2 without AVX-512."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")

TARGETS = {
    "x86-64": ("x86-64", ""),
    "AVX2": ("haswell", "+avx,+avx2,+bmi,+bmi2,+f16c,+fma,+lzcnt,+popcnt,+sse4.2"),
}
"""Names and features, as numba takes them."""

PROGRAM = """
import sys

import numpy as np
from crossdevice.kernels.host.fused_pass import fused_pass, prepared_for, select_kernels
from crossdevice.kernels.host.reference.numpy_pass import numpy_pass
from crossdevice.values.recipe import Recipe
from crossdevice.values.reduce_op import ReduceOp
from unit.kernels.host.adversarial import adversarial, dtype_named, same_bits, spread_out

select_kernels("numba")
random, compiled = np.random.default_rng(8), 0
for name in ("float16", "bfloat16", "float32", "float64"):
    dtype = dtype_named(name)
    for precision in sys.argv[1:]:
        for divisor in (None, 3, 4):
            recipe = Recipe(ReduceOp.SUM, precision, divisor)
            compiled += prepared_for(recipe, dtype, dtype) is not None
            for exponents in (0, 20, 60):
                inputs = [spread_out(random, dtype, 500, bits=24, exponents=exponents) for _ in range(9)]
                inputs[0][:200] = adversarial(random, dtype, 200)
                found, expected = np.empty(500, dtype), np.empty(500, dtype)
                fused_pass(inputs, [found], recipe)
                numpy_pass(inputs, [expected], recipe)
                assert same_bits(found, expected), (recipe, name, exponents)
print(compiled)
"""


@pytest.mark.parametrize(
    ("target", "precisions", "num_compiled"),
    [
        ("x86-64", ["exact"], 9),
        pytest.param("AVX2", ["accurate", "exact"], 24, marks=pytest.mark.more("a repetition")),
    ],
)
def test_kernels_for_other_processors_have_the_bits_of_numpy(target, precisions, num_compiled, tmp_path):
    """Without F16C there are none of float16, which NumPy sums then."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        pytest.skip("needs an x86-64 processor")
    if target == "AVX2" and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("needs AVX2")
    name, features = TARGETS[target]
    kept = {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features, "NUMBA_CACHE_DIR": str(tmp_path)}
    tests = Path(__file__).parents[4]
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, *precisions],
        env={**os.environ, **kept, "PYTHONPATH": os.pathsep.join([*sys.path, str(tests)])},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert int(run.stdout) == num_compiled
