"""Assignment of examples to the micro-batches of steps: the same on any number of workers."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from crossdevice.errors import OptionError
from crossdevice.kernels.position_keys import splitmix64
from crossdevice.values.options import whole_number
from crossdevice.values.quantities import counted


class MicroBatches:
    """Cuts a dataset into micro-batches that do not depend on how many workers run them.

    Micro-batch k of step s has the same examples on any number of workers, in any order of calls, and after a
    restart. Worker r of W runs the micro-batches r, r + W, r + 2 W, ... of every step. Iterated, it gives the
    examples of this worker's micro-batches from `step` on to the end of that epoch, so it is what PyTorch
    takes as `DataLoader(dataset, batch_sampler=MicroBatches(...))`; `indices` is for everybody else.

    Args:
        num_examples: the length of the dataset.
        size: examples in a micro-batch.
        per_step: micro-batches in a step, on all workers together.
        rank: the number of this worker.
        num_workers: how many workers there are.
        seed: of the order, which is another one in each epoch; None keeps the order of the dataset.
        drop_last: leaves out the examples at the end of an epoch that do not fill a step. Otherwise its last
            step has fewer micro-batches, and the last of these may be shorter.

    Raises:
        OptionError: an argument is outside its range, or an epoch would have no step.

    >>> one = MicroBatches(10, size=2, per_step=3)
    >>> one.indices(step=0, micro_batch=2).tolist() == MicroBatches(
    ...     10, size=2, per_step=3, rank=2, num_workers=4).indices(0, 2).tolist()
    True
    >>> one.num_steps, one.of_step(0), one.of_step(1)
    (2, [0, 1, 2], [0, 1])
    >>> MicroBatches(10, size=2, per_step=3, rank=1, num_workers=2).of_step(0)
    [1]
    """

    def __init__(
        self,
        num_examples: int,
        size: int,
        per_step: int,
        *,
        rank: int = 0,
        num_workers: int = 1,
        seed: int | None = 0,
        drop_last: bool = False,
    ) -> None:
        self.num_examples = whole_number("num_examples", num_examples, least=1)
        self.size = whole_number("size", size, least=1)
        self.per_step = whole_number("per_step", per_step, least=1)
        self.num_workers = whole_number("num_workers", num_workers, least=1)
        self.rank = whole_number("rank", rank, least=0)
        if self.rank >= self.num_workers:
            raise OptionError(f"rank must be below num_workers={num_workers}; got {rank}")
        self.seed = None if seed is None else whole_number("seed", seed, least=0)
        self.drop_last = drop_last
        whole, rest = divmod(self.num_examples, self.size * self.per_step)
        self.num_steps = whole + (bool(rest) and not drop_last)
        """The number of steps in an epoch."""
        if not self.num_steps:
            do = "does" if num_examples == 1 else "do"
            raise OptionError(
                f"{counted(num_examples, 'example')} {do} not fill one step of "
                f"{counted(per_step, 'micro-batch', 'micro-batches')} of {size}; "
                "expected more, or drop_last=False"
            )
        self.step = 0
        """The step with which the next iteration begins, counted from the first of the run."""

    def of_step(self, step: int) -> list[int]:
        """Lists the micro-batches of a step that are this worker's.

        Args:
            step: the number of the step, counted from the first of the run.

        Returns:
            Their numbers in the step. They may be none, where workers are many.

        Raises:
            OptionError: the step is not a whole number, 0 or more.
        """
        return [number for number in range(self.count(step)) if self.owner(number) == self.rank]

    def count(self, step: int) -> int:
        """Counts the micro-batches of a step on all workers: `per_step`, or fewer at the end of an epoch.

        Args:
            step: the number of the step.

        Returns:
            Their number.

        Raises:
            OptionError: the step is not a whole number, 0 or more.
        """
        step = whole_number("step", step, least=0) % self.num_steps
        left = self.num_examples - step * self.size * self.per_step
        return min(self.per_step, -(-left // self.size))

    def owner(self, micro_batch: int) -> int:
        """Tells which worker runs a micro-batch, in every step.

        Args:
            micro_batch: its number in the step.

        Returns:
            The rank of the worker.

        Raises:
            OptionError: there is no such micro-batch.
        """
        number = whole_number("micro_batch", micro_batch, least=0)
        if number >= self.per_step:
            raise OptionError(f"micro_batch must be below per_step={self.per_step}; got {number}")
        return number % self.num_workers

    def indices(self, step: int, micro_batch: int) -> NDArray[np.int64]:
        """Lists the examples of a micro-batch, of this worker or of any other.

        Args:
            step: the number of the step, counted from the first of the run.
            micro_batch: its number in the step.

        Returns:
            The positions of its examples in the dataset.

        Raises:
            OptionError: the step has no such micro-batch.
        """
        count, number = self.count(step), whole_number("micro_batch", micro_batch, least=0)
        if number >= count:
            raise OptionError(f"step {step} has {count} micro-batches; got micro_batch={number}")
        epoch, within = divmod(step, self.num_steps)
        start = (within * self.per_step + number) * self.size
        return _order(self.num_examples, self.seed, epoch)[start : start + self.size].copy()

    def resume(self, step: int) -> None:
        """Continues at a step: the next iteration begins there, whatever the number of workers was before.

        A data loader fetches ahead, so only the training loop knows which step comes next.

        Args:
            step: the number of the step, counted from the first of the run.

        Raises:
            OptionError: the step is not a whole number, 0 or more.
        """
        self.step = whole_number("step", step, least=0)

    def __iter__(self) -> Iterator[list[int]]:
        first = self.step
        self.step = first - first % self.num_steps + self.num_steps
        for step in range(first, self.step):
            for number in self.of_step(step):
                yield self.indices(step, number).tolist()

    def __len__(self) -> int:
        """Returns the number of this worker's micro-batches in the next iteration."""
        first = self.step % self.num_steps
        return sum(len(self.of_step(step)) for step in range(first, self.num_steps))


@functools.lru_cache(maxsize=4)  # ranks that are threads, and the next epoch while one ends
def _order(num_examples: int, seed: int | None, epoch: int) -> NDArray[np.int64]:
    """Returns the order of an epoch, by hashes, since NumPy's own shuffles may change with its version."""
    numbers = np.arange(num_examples, dtype=np.uint64)
    order = numbers.astype(np.int64)
    if seed is not None:
        of_run = splitmix64(np.array([seed & _WORD], np.uint64)) ^ np.uint64(seed >> 64 & _WORD)
        of_epoch = splitmix64(of_run + np.uint64(epoch))
        order = np.argsort(splitmix64(numbers ^ of_epoch), kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order


_WORD = (1 << 64) - 1
