"""Datasets split for replicas: every example goes to exactly one of them."""

from __future__ import annotations

import itertools
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from crossdevice.backends.numpy_backend import array_of_numbers
from crossdevice.backends.registry import backend_of_type
from crossdevice.errors import ConversionError, OptionError, ShapeMismatchError
from crossdevice.execution.reading.shards import part_lengths
from crossdevice.strategies.data.regrouping import regroup
from crossdevice.values.device import Device, misplaced
from crossdevice.values.nesting import NUMBERS, flatten, leaf_paths, unflatten
from crossdevice.values.options import whole_number
from crossdevice.values.quantities import kind_text


class InputContext(NamedTuple):
    """The replicas a dataset function makes batches for.

    Args:
        num_input_pipelines: the number of processes that make batches.
        input_pipeline_id: the number of this process among them.
        num_replicas_in_sync: the number of replicas of all processes.

    >>> InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(32)
    8
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Divides a global batch size by the number of replicas.

        Args:
            global_batch_size: the number of examples of all replicas together.

        Returns:
            The number of examples of one replica.

        Raises:
            OptionError: it cannot be shared equally.
        """
        size = whole_number("global_batch_size", global_batch_size)
        share, left = divmod(size, self.num_replicas_in_sync)
        if left:
            raise OptionError(
                f"a global batch of {global_batch_size} cannot be shared equally by "
                f"{self.num_replicas_in_sync} replicas"
            )
        return share


class ValueContext(NamedTuple):
    """The replica a value function makes a value for.

    Args:
        replica_id_in_sync_group: the number of the replica.
        num_replicas_in_sync: the number of replicas of all processes.

    >>> ValueContext(1, 4).replica_id_in_sync_group
    1
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1


class ReplicaPlacement(NamedTuple):
    """The devices of this process's replicas, and which of all replicas they are."""

    devices: tuple[Device, ...]
    first_replica: int
    num_replicas: int

    @property
    def numbers(self) -> range:
        """The numbers of this process's replicas among all."""
        return range(self.first_replica, self.first_replica + len(self.devices))


class DistributedDataset:
    """Global batches, each cut along its first axis into one part per replica.

    Parts differ in length by at most one, the first ones being longer; of a batch with fewer examples than
    replicas, the last parts are empty. Nothing is dropped, padded or given to two replicas, so
    a mean over examples is `strategy.reduce("mean", per_example, axis=0)`. Where there are several
    processes, each goes through the same batches and takes the parts of its own replicas.
    """

    def __init__(self, batches: Iterable[Any], placement: ReplicaPlacement) -> None:
        self._batches = batches
        self._placement = placement

    def __iter__(self) -> Iterator[Any]:
        placement = self._placement
        for number, batch in enumerate(map(_structure, self._batches)):
            if placement.num_replicas == 1:  # scalars too: there is nothing to cut
                yield _moved(_arrays(batch), placement.devices[0])
                continue
            yield regroup(_parts(batch, placement, number), placement.devices, among=placement.num_replicas)

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # without a length of its own: Python's TypeError


class DealtDataset:
    """Batches that are one replica's each already, dealt out in turn.

    If the last round has too few, the remaining replicas get empty arrays of the same kind; so does a
    process whose batches have come to an end before those of others.

    Args:
        of_all_processes: called with this process's number of batches before each round, gives those of all.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        placement: ReplicaPlacement,
        of_all_processes: Callable[[int], Sequence[int]] = lambda number: (number,),
    ) -> None:
        self._batches = batches
        self._placement = placement
        self._of_all_processes = of_all_processes

    def __iter__(self) -> Iterator[Any]:
        devices, batches = self._placement.devices, map(_structure, self._batches)
        own = list(itertools.islice(batches, len(devices)))
        numbers = self._of_all_processes(len(own))
        if any(numbers) and not all(numbers):
            raise ConversionError(
                f"the dataset of process {numbers.index(0)} is empty, and those of others are not; "
                "each needs at least one batch, which may have no examples"
            )
        first = own[0] if own else None
        while any(numbers):
            if len(own) < len(devices):
                own += [_rows(first, 0, 0)] * (len(devices) - len(own))
            parts = [_moved(_arrays(part), device) for part, device in zip(own, devices, strict=True)]
            yield regroup(parts, devices, among=self._placement.num_replicas)
            own = list(itertools.islice(batches, len(devices)))
            numbers = self._of_all_processes(len(own))


class ArrayBatches:
    """Arrays, or a structure of them, in batches along their first axis; the last may be shorter."""

    def __init__(self, arrays: Any, batch_size: int) -> None:
        self._arrays = _structure(arrays)
        self._batch_size = whole_number("batch_size", batch_size, least=1)
        self._num_examples = _num_examples(self._arrays, "dataset")

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, self._num_examples, self._batch_size):
            yield _rows(self._arrays, start, min(start + self._batch_size, self._num_examples))

    def __len__(self) -> int:
        return -(-self._num_examples // self._batch_size)


def check_input_options(options: Any) -> None:
    """Refuses options that change the batches; TensorFlow's other options only tune how data is read."""
    mode = getattr(getattr(options, "experimental_replication_mode", None), "name", "PER_WORKER")
    if mode != "PER_WORKER":
        raise OptionError(
            f"experimental_replication_mode is {mode}; expected PER_WORKER: a process deals its batches out "
            "to its replicas (for one dataset each: experimental_distribute_values_from_function)"
        )


def batches_of(dataset: Any, batch_size: int | None) -> Iterable[Any]:
    """Returns the batches of a dataset: itself, or with a batch size its arrays cut up."""
    if batch_size is not None:
        return ArrayBatches(dataset, batch_size)
    if hasattr(dataset, "dtype") or isinstance(dataset, (tuple, Mapping, str)):
        raise ConversionError(
            f"dataset is {kind_text(dataset)}; expected an iterable of batches, "
            "or arrays together with batch_size="
        )
    if not isinstance(dataset, Iterable) and not hasattr(dataset, "__getitem__"):
        raise ConversionError(f"dataset is {kind_text(dataset)}; expected an iterable of batches")
    return dataset  # type: ignore[no-any-return]


def _structure(batch: Any) -> Any:
    """Returns the dict in a `UserDict`, which tokenizers and collators of transformers return."""
    return dict(batch) if isinstance(batch, UserDict) else batch


def _parts(batch: Any, placement: ReplicaPlacement, number: int) -> list[Any]:
    lengths = part_lengths(_num_examples(batch, f"batch {number}"), placement.num_replicas)
    edges = [0, *itertools.accumulate(lengths)]
    return [
        _moved(_rows(batch, *edges[replica : replica + 2]), device)
        for replica, device in zip(placement.numbers, placement.devices, strict=True)
    ]


def _num_examples(batch: Any, name: str) -> int:
    """Returns the common length of the first axis of all arrays."""
    leaves, structure = flatten(batch)
    if not leaves:
        raise ConversionError(f"{name} holds no arrays")
    paths = leaf_paths(structure, name)
    length: Any = None
    for leaf, path in zip(leaves, paths, strict=True):
        shape = tuple(getattr(_array(leaf), "shape", ()))  # TensorFlow's shapes are true, whatever their rank
        if not shape:
            raise ConversionError(
                f"{path} is {kind_text(leaf)} without a first axis; expected arrays whose first axis "
                "counts the examples"
            )
        if not hasattr(leaf, "__getitem__"):
            raise ConversionError(f"{path} is {kind_text(leaf)}, which cannot be cut into parts")
        if length not in (None, shape[0]):
            raise ShapeMismatchError(f"{path} has {shape[0]} examples; {paths[0]} has {length}")
        length = shape[0]
    return int(length)


def _rows(batch: Any, start: int, stop: int) -> Any:
    leaves, structure = flatten(_arrays(batch))
    for leaf in leaves:
        if not hasattr(leaf, "__getitem__"):
            raise ConversionError(f"the dataset holds {kind_text(leaf)}, which cannot be cut into parts")
    if any(not getattr(leaf, "shape", (0,)) for leaf in leaves):
        raise ConversionError(
            "the dataset ended before every replica had its value of the last round, and scalars have no "
            "empty part for the others; give arrays of one element, or as many values as replicas can share"
        )
    return unflatten(structure, [leaf[start:stop] for leaf in leaves])


def _arrays(batch: Any) -> Any:
    leaves, structure = flatten(batch)
    return unflatten(structure, [_array(leaf) for leaf in leaves])


def _array(leaf: Any) -> Any:
    return array_of_numbers(leaf) if isinstance(leaf, (*NUMBERS, list, tuple)) else leaf


def _moved(part: Any, device: Device) -> Any:
    """Moves a part to its replica's device; host arrays stay views, and NumPy's stay on the host."""
    leaves, structure = flatten(part)
    return unflatten(structure, [_array_on(leaf, device) for leaf in leaves])


def _array_on(array: Any, device: Device) -> Any:
    backend = backend_of_type(type(array))
    if backend is None or isinstance(array, np.ndarray) or misplaced(array, device) is None:
        return array
    backend.check_device(device)
    return backend.copy(array, device)
