"""Random numbers of a micro-batch that depend neither on its worker nor on earlier ones."""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from collections.abc import Iterator

import numpy as np
import torch

from crossdevice.values.options import whole_number


def micro_batch_seed(seed: int, step: int, micro_batch: int) -> int:
    """Derives the seed of one micro-batch, a whole number below 2**63.

    Args:
        seed: the seed of the run.
        step: the number of the training step.
        micro_batch: the number of the micro-batch in the step, over all workers.

    Returns:
        A number for generators of any library.

    Raises:
        OptionError: an argument is not a whole number.

    >>> micro_batch_seed(7, step=0, micro_batch=3) == micro_batch_seed(7, step=3, micro_batch=0)
    False
    """
    given = {"seed": seed, "step": step, "micro_batch": micro_batch}
    # 1.0 and tensor([1]) are written differently from 1, and would seed other numbers after a resume.
    text = " ".join(str(whole_number(name, value, -sys.maxsize)) for name, value in given.items()).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


@contextlib.contextmanager
def seeded_micro_batch(seed: int, step: int, micro_batch: int) -> Iterator[None]:
    """Runs a block in which all global generators are seeded by the number of a micro-batch.

    These are PyTorch's of the host and of the current GPU, `random` and `np.random`. Afterwards they go on as
    if there had been no block. Dropout in it drops the same elements whichever worker runs the micro-batch.

    Args:
        seed: the seed of the run.
        step: the number of the training step.
        micro_batch: the number of the micro-batch in the step, over all workers.

    Returns:
        A context manager.

    Raises:
        OptionError: an argument is not a whole number.

    >>> def dropped(micro_batch):
    ...     with seeded_micro_batch(7, 0, micro_batch):
    ...         return torch.nn.functional.dropout(torch.ones(64))
    >>> first, _, again = dropped(0), dropped(1), dropped(0)
    >>> torch.equal(first, again)
    True
    """
    number = micro_batch_seed(seed, step, micro_batch)
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices):
        try:
            torch.random.default_generator.manual_seed(number)
            if devices:
                torch.cuda.manual_seed(number)
            random.seed(number)
            np.random.seed(number % (1 << 32))
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)
