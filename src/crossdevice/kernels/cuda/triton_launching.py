"""Compiling kernels when work is prepared, so that launching them takes no search for the right one."""

from __future__ import annotations

import warnings
from typing import Any

from triton.runtime.interpreter import InterpretedFunction

from crossdevice.kernels.cuda.families import Arithmetic, block_elements
from crossdevice.kernels.cuda.task import Launch
from crossdevice.kernels.cuda.triton_arithmetic import way_of
from crossdevice.kernels.cuda.triton_kernels import pass_by_arguments, pass_by_table

NUM_WARPS = 8

ANY_ADDRESS = (1 << 44) + 1
"""Odd, so that nothing about alignment is compiled in."""

is_interpreted = isinstance(pass_by_arguments, InterpretedFunction)
"""Whether Triton runs kernels in Python, on host memory (TRITON_INTERPRET=1)."""


def launch_by_arguments(
    arithmetic: Arithmetic, num_inputs: int, num_outputs: int, num_programs: int
) -> Launch:
    """So many programs of the kernel for one array of every replica, compiled for the current device."""
    examples = (ANY_ADDRESS,) * num_inputs, (ANY_ADDRESS,) * num_outputs, ANY_ADDRESS
    constants = way_of(arithmetic), block_elements(arithmetic)
    return _launch(pass_by_arguments, examples, constants, num_programs)


def launch_by_table(arithmetic: Arithmetic, num_inputs: int, num_outputs: int, num_programs: int) -> Launch:
    """So many programs of the kernel for tasks in a table, compiled for the current device."""
    constants = num_inputs, num_outputs, way_of(arithmetic), block_elements(arithmetic)
    return _launch(pass_by_table, (ANY_ADDRESS, ANY_ADDRESS), constants, num_programs)


def _launch(kernel: Any, examples: tuple[Any, ...], constants: tuple[Any, ...], num_programs: int) -> Launch:
    if is_interpreted:

        def interpret(stream: int, *arguments: Any) -> None:  # noqa: ARG001 - there is none
            kernel[(num_programs,)](*arguments, *constants)

        return interpret
    # No fused multiply-adds: they would round once where the host rounds twice.
    options = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
    with warnings.catch_warnings():
        # Triton 3.9 speaks of its default for what is said here.
        warnings.filterwarnings("ignore", "TRITON_DEFAULT_FP_FUSION", UserWarning)
        run = kernel.warmup(*examples, *constants, grid=(1,), **options)[num_programs, 1, 1]

    def launch(stream: int, *arguments: Any) -> None:
        run(*arguments, *constants, stream=stream)

    return launch
