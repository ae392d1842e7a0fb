"""Which program of a launch does what."""

from __future__ import annotations

import numpy as np

from crossdevice.kernels.cuda.families import AddressOffset, Arithmetic, KernelTask, block_elements, rows_of


def test_rows_cover_every_element_of_every_task_once():
    arithmetic = Arithmetic("wide", "SUM", "bfloat16", "bfloat16")
    block = block_elements(arithmetic)
    sizes = (1, block, block + 1, 5 * block - 1)
    tasks = [KernelTask(arithmetic, (AddressOffset(0),), (AddressOffset(1),), size) for size in sizes]
    covered = [np.zeros(size, int) for size in sizes]
    for task, number, size in rows_of(tasks).tolist():
        assert size == sizes[task]
        assert number * block < size
        covered[task][number * block : (number + 1) * block] += 1
    assert all((counts == 1).all() for counts in covered)


def test_places_move_by_bytes():
    assert AddressOffset(3, 8).moved(16) == AddressOffset(3, 24)
