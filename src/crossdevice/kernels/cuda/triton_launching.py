"""Compiling kernels when work is prepared, so that launching them takes no search for the right one."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from triton.runtime.interpreter import InterpretedFunction

from crossdevice.kernels.cuda.driver import prepared_launch
from crossdevice.kernels.cuda.families import Arithmetic, Launch, Start, block_elements, exact_warps
from crossdevice.kernels.cuda.triton_arithmetic import kernel_spec
from crossdevice.kernels.cuda.triton_exact import exact_by_table
from crossdevice.kernels.cuda.triton_kernels import pass_by_arguments, pass_by_table

NUM_WARPS = 8
WARP_THREADS = 32

SPECIAL = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
"""Fields of a kernel's metadata that a plain launch does not support."""

ANY_ADDRESS = (1 << 44) + 1
"""Odd, so that nothing about alignment is compiled in."""

is_interpreted = isinstance(pass_by_arguments, InterpretedFunction)
"""True if Triton runs kernels in Python, on host memory (TRITON_INTERPRET=1)."""


def launch_by_arguments(
    arithmetic: Arithmetic, num_inputs: int, num_outputs: int, num_programs: int
) -> Launch:
    """Prepares `num_programs` programs for one array of every replica, compiled for the current device.

    It takes the addresses of inputs, those of outputs, and the number of elements.
    """

    def shaped(numbers: Sequence[int]) -> tuple[Any, ...]:
        return tuple(numbers[:num_inputs]), tuple(numbers[num_inputs:-1]), numbers[-1]

    constants = kernel_spec(arithmetic), block_elements(arithmetic)
    return _launch(pass_by_arguments, shaped, num_inputs + num_outputs + 1, constants, num_programs)


def launch_by_table(arithmetic: Arithmetic, num_inputs: int, num_outputs: int, num_programs: int) -> Launch:
    """Prepares `num_programs` programs for tasks in a table, compiled for the current device.

    It takes where the addresses are, and where the rows are.
    """
    spec, block = kernel_spec(arithmetic), block_elements(arithmetic)
    if arithmetic.family != "exact":
        return _launch(pass_by_table, tuple, 2, (num_inputs, num_outputs, spec, block), num_programs)
    # One kernel for any numbers of arrays.
    numbers, warps = (num_inputs, num_outputs, int(arithmetic.divisor or 1)), exact_warps(arithmetic)
    # Each thread looks at one element again, so that integers fit into registers.
    constants = spec, block, warps * WARP_THREADS
    launch = _launch(exact_by_table, tuple, 2 + len(numbers), constants, num_programs, warps)
    return lambda places: launch((*places, *numbers))


def _launch(
    kernel: Any,
    shaped: Callable[[Sequence[int]], tuple[Any, ...]],
    num_numbers: int,
    constants: tuple[Any, ...],
    num_programs: int,
    num_warps: int = NUM_WARPS,
) -> Launch:
    """Prepares a launch; `shaped` turns the numbers of the compiled kernel into Triton's arguments."""
    if is_interpreted:

        def interpreted(numbers: Sequence[int]) -> Start:
            return lambda stream: kernel[(num_programs,)](*shaped(numbers), *constants)  # noqa: ARG005

        return interpreted
    # No fused multiply-adds: they would round once where the host rounds twice.
    options = {"num_warps": num_warps, "enable_fp_fusion": False}
    with warnings.catch_warnings():
        # Triton 3.9 speaks of its default for what is said here.
        warnings.filterwarnings("ignore", "TRITON_DEFAULT_FP_FUSION", UserWarning)
        compiled = kernel.warmup(*shaped([ANY_ADDRESS] * num_numbers), *constants, grid=(1,), **options)
    run = compiled[num_programs, 1, 1]
    num_spare = spare_arguments(compiled, num_numbers)

    def launch(numbers: Sequence[int]) -> Start:
        if num_spare is None:
            arguments = shaped(numbers)
            return lambda stream: run(*arguments, *constants, stream=stream)
        num_threads, shared_bytes = num_warps * WARP_THREADS, compiled.metadata.shared
        return prepared_launch(
            compiled.function, num_programs, num_threads, shared_bytes, [*numbers, *[0] * num_spare]
        )

    return launch


def spare_arguments(compiled: Any, num_numbers: int) -> int | None:
    """Counts the arguments Triton leaves empty; None if only Triton can launch the kernel.

    By the driver a launch takes half as long as by Triton, which looks at every argument.
    """
    metadata = compiled.metadata
    if metadata.num_ctas != 1 or any(getattr(metadata, name, 0) for name in SPECIAL):
        return None
    entry = re.search(r"\.entry\s+\w+\(([^)]*)\)", compiled.asm["ptx"])
    kinds = re.findall(r"\.param\s+\.(\w+)", entry[1]) if entry else []
    are_numbers = len(kinds) >= num_numbers and set(kinds) <= {"u64", "b64"}
    return len(kinds) - num_numbers if are_numbers else None
