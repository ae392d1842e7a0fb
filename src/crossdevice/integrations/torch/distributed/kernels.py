"""Compiled kernels, loaded in the background: a program's first collectives do not wait for a compiler."""

from __future__ import annotations

import importlib.util
import sys

import numpy as np

from crossdevice import runtime
from crossdevice.kernels.host import fused_pass
from crossdevice.process_groups.background import BackgroundThread
from crossdevice.values.recipe import Recipe
from crossdevice.values.reduce_op import ReduceOp

LOADING_BYTES = 256 << 10
"""The smallest reduction that is worth the second of CPU time that loading takes."""

LOADING_CALLS = 64
"""Number of smaller reductions that make loading worthwhile."""


COMPILED = "crossdevice.kernels.host.llvm.numba_pass"
"""Module that is imported once kernels are loaded."""


class LateKernels:
    """NumPy fallback for small arrays, with the same bits, until kernels have been loaded.

    It changes nothing in a process where kernels were chosen or loaded before, or cannot be had.
    """

    def __init__(self) -> None:
        self._calls_left = LOADING_CALLS
        self._thread: BackgroundThread | None = None
        self.is_settled = True
        """True if the choice of kernels is final."""

    def postpone(self) -> None:
        """Chooses NumPy for now, in a process that has not used kernels yet."""
        chosen = fused_pass.are_kernels_selected() or runtime.KERNELS.read()
        if chosen or COMPILED in sys.modules or importlib.util.find_spec("numba") is None:
            return
        fused_pass.select_kernels("numpy")
        self.is_settled = False

    def note_reduction(self, num_bytes: int) -> None:
        """Begins to load once a reduction is large, or there were many."""
        self._calls_left -= 1
        if self._thread is None and (num_bytes >= LOADING_BYTES or self._calls_left < 0):
            self._thread = BackgroundThread("crossdevice kernels")
            self._thread.submit(self._load)

    def _load(self) -> None:
        try:
            fused_pass.load_kernels(Recipe(ReduceOp.SUM, "accurate"), np.dtype(np.float32))
        finally:
            fused_pass.select_kernels(None)
            self.is_settled = True


late_kernels = LateKernels()
"""The late kernels of this process."""
