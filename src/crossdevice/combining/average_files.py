"""The mean of models in files, in a few MiB of memory."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from crossdevice.backends.protocol import dtype_named
from crossdevice.combining.files.formats import check_output, new_model, open_model
from crossdevice.combining.files.model_file import ModelFile, ModelWriter, TensorSpec, opened
from crossdevice.combining.trees import INTEGERS, Integers
from crossdevice.errors import DtypeMismatchError, OptionError, ShapeMismatchError, StructureMismatchError
from crossdevice.execution.reading.values import few
from crossdevice.kernels.host.fused_pass import fused_pass
from crossdevice.kernels.host.resources.threads import num_threads, run_together
from crossdevice.kernels.host.running_sum import RunningSum
from crossdevice.values.disagreement import disagreement
from crossdevice.values.dtypes import FLOATS, SHORT_FLOATS
from crossdevice.values.options import Precision
from crossdevice.values.quantities import counted, kind_text
from crossdevice.values.recipe import Recipe
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.weights import Weights, factors_of, weights_for

Keys = Literal["strict", "union", "intersection"]
KEYS: tuple[Keys, ...] = ("strict", "union", "intersection")

_FLOATS = (*FLOATS, *SHORT_FLOATS)
"""Dtypes that `dtype` may replace; it cannot be one of 8 bits itself."""

RANGE_BYTES, SMALLEST_RANGE_BYTES = 8 << 20, 64 << 10
"""Bytes of all files together that one thread reads at a time, and at least of each file."""

MAX_READERS = 8
"""Number of threads; each reads, computes and writes, which saturates memory on large machines too."""

READ_AHEAD_BYTES = 128 << 20
"""Bytes of all files together that are requested ahead."""

Progress = Callable[[int, int], None]
"""Called with the bytes read so far, and their total."""


class _Tensor(NamedTuple):
    """A tensor of the result, and the files that have it."""

    name: str
    spec: TensorSpec
    files: list[ModelFile]
    weights: Weights
    all_bytes: int
    """Bytes of one element in all files together."""
    widest_bytes: int
    """Bytes of one element in the file, or the result, that has the widest."""


class _Range(NamedTuple):
    tensor: _Tensor
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the range in all files together."""
        return (self.stop - self.start) * self.tensor.all_bytes


def average_files(
    paths: Sequence[str | PathLike[str]],
    output: str | PathLike[str],
    weights: Sequence[float] | None = None,
    *,
    precision: Precision = "accurate",
    dtype: str | None = None,
    integers: Integers = "mean",
    keys: Keys = "strict",
    progress: Progress | None = None,
    verify: bool = False,
) -> None:
    """Writes the mean of all tensors of several models to a file, through a few MiB of memory.

    Formats go by the names of files: `.safetensors`, several of them with an index
    (`model.safetensors.index.json`, or the folder it is in), `.npz`, `.npy`, and PyTorch's `.pt`, `.pth` and
    `.bin`, without running their code. The output appears when complete, with the metadata of the first.

    Args:
        paths: the files, all of models with tensors of the same names and shapes.
        output: the file to write, in any of the formats.
        weights: one for each file; None counts them all alike.
        precision: `"accurate"` adds wide and rounds once, `"exact"` rounds the true mean, whatever the
            order.
        dtype: of the floats in the output; needed where files have different ones.
        integers: what becomes of integers and booleans: `"mean"` is rounded to nearest even, `"first"` is
            that of the first file, `"max"` the largest.
        keys: `"strict"` refuses files with different tensors, `"union"` takes the mean of each tensor over
            the files that have it, `"intersection"` leaves out what not all have.
        progress: called with the number of bytes read so far and in all, by any thread, one at a time.
        verify: compares each file, an index too, with the SHA-256 beside it (`sha256sum x > x.sha256`)
            before anything is averaged. Checksums in files, as in `.npz` and `.pt`, are compared in any case.

    Raises:
        FileError: a file does not exist, cannot be read or written, or fails its checksum; the message
            names it.
        MismatchError: files differ in tensors, shapes or dtypes; the message names the odd one out.
        OptionError: an argument is outside its range.
        DtypeError: a tensor has no numbers.

    >>> import numpy as np, os, tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> names = [os.path.join(folder.name, name) for name in ("a.npz", "b.npz", "mean.npz")]
    >>> for name, value in zip(names, (1, 5)):
    ...     np.savez(name, w=np.float32([value, 2 * value]))
    >>> average_files(names[:2], names[2], weights=[3, 1])
    >>> dict(np.load(names[2]))
    {'w': array([2., 4.], dtype=float32)}
    >>> folder.cleanup()
    """
    _check_options(precision, dtype, integers, keys)
    inputs, target = _paths_of(paths), _path_of(output, "output")
    factors = factors_of([1] * len(inputs) if weights is None else weights, ReduceOp.MEAN)
    if len(factors) != len(inputs):
        found = f"{counted(len(factors), 'weight')} for {counted(len(inputs), 'file')}"
        raise OptionError(f"{found}; expected one for each file")
    check_output(target)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(opened(open_model(path))) for path in inputs]
        if verify:
            for file in files:
                file.check_digest()
        tensors = list(_tensors(files, factors, dtype, keys))
        if not tensors:
            raise StructureMismatchError(
                f"there is nothing to average: no tensor is in {files[0].path} and in all other files"
            )
        writer = stack.enter_context(new_model(target, {each.name: each.spec for each in tensors}, files[0]))
        work = _Work(
            _joined(tensors, writer),
            lambda part, room: _mean(part, precision, integers, room),
            writer,
            progress,
        )
        run_together(work, min(num_threads(), MAX_READERS) if writer.in_any_order else 1)
        for file in files:
            file.check_unchanged()


class _Work:
    """All ranges of all tensors; each thread takes one after another."""

    def __init__(
        self,
        tensors: Sequence[_Tensor],
        mean_of: Callable[[_Range, NDArray[np.uint8]], NDArray[Any]],
        writer: ModelWriter,
        progress: Progress | None,
    ) -> None:
        most_files = max((len(tensor.files) for tensor in tensors), default=1)
        self._range_bytes, advice_bytes = (
            max(num_bytes // most_files, SMALLEST_RANGE_BYTES)
            for num_bytes in (RANGE_BYTES, READ_AHEAD_BYTES)
        )
        self._ranges = _read_ahead(tensors, self._range_bytes, advice_bytes)
        self._mean_of = mean_of
        self._writer = writer
        self._progress = progress
        self._lock = threading.Lock()
        self._done = 0
        self._total = sum(tensor.spec.num_elements * tensor.all_bytes for tensor in tensors)

    def __call__(self) -> None:
        """Reads, computes and writes until nothing is left, or something went wrong in any thread."""
        room = np.empty(self._range_bytes, np.uint8)
        try:
            while (part := self._taken()) is not None:
                self._writer.write(part.tensor.name, part.start, self._mean_of(part, room))
                self._tell(part)
        except BaseException:
            self._ranges = iter(())
            raise

    def _taken(self) -> _Range | None:
        with self._lock:
            return next(self._ranges, None)

    def _tell(self, part: _Range) -> None:
        if self._progress is not None:
            with self._lock:
                self._done += part.num_bytes
                self._progress(self._done, self._total)


def _paths_of(paths: Any) -> list[Path]:
    """Returns the inputs as a list; refuses sets and dicts, which have no order for weights."""
    if isinstance(paths, (str, bytes, PathLike, AbstractSet, Mapping)) or not isinstance(paths, Iterable):
        raise OptionError(f"paths must be a list of at least one file; got {paths!r}")
    found = [_path_of(path, f"paths[{number}]") for number, path in enumerate(paths)]
    if not found:
        raise OptionError("paths must be a list of at least one file; got none")
    return found


def _path_of(path: Any, name: str) -> Path:
    try:
        return Path(os.fsdecode(path))
    except TypeError:
        raise OptionError(f"{name} is {path!r}, {kind_text(path)}; expected a path") from None


def _check_options(precision: str, dtype: str | None, integers: str, keys: str) -> None:
    for name, given, known in (
        ("precision", precision, ("accurate", "exact")),
        ("dtype", dtype, (None, *FLOATS)),
        ("integers", integers, INTEGERS),
        ("keys", keys, KEYS),
    ):
        if given not in known:
            raise OptionError(f"{name} must be one of {', '.join(map(str, known))}; got {given!r}")


def _tensors(
    files: Sequence[ModelFile], factors: Sequence[float], dtype: str | None, keys: Keys
) -> Iterator[_Tensor]:
    """Lists the tensors of the result, in the order of the first file that has each; checks all of them."""
    if all(file.tensors == files[0].tensors for file in files[1:]):
        yield from _same_tensors(files, factors, dtype)
        return
    everything = dict.fromkeys(name for file in files for name in file.tensors)
    _check_names(files, everything, keys)
    names = [f"file {number} ({file.path})" for number, file in enumerate(files)]
    weights_of: dict[tuple[int, ...], Weights] = {}
    for name in everything:
        having = [number for number, file in enumerate(files) if name in file.tensors]
        if keys == "intersection" and len(having) < len(files):
            continue
        specs = {number: files[number].tensors[name] for number in having}
        odd = disagreement({n: s.shape for n, s in specs.items()}, names, "has shape", place=f" at {name!r}")
        if odd is not None:
            raise ShapeMismatchError(odd)
        first = specs[having[0]]
        if dtype is None or not all(spec.dtype in _FLOATS for spec in specs.values()):
            odd = disagreement(
                {n: s.dtype for n, s in specs.items()}, names, "has dtype", place=f" at {name!r}"
            )
            if odd is not None:
                raise DtypeMismatchError(f"{odd}; of floats, dtype= says which the mean has")
        into = dtype if dtype is not None and first.dtype in _FLOATS else first.dtype
        weights = weights_of.get(tuple(having))
        if weights is None:
            some = tuple(factors[number] for number in having)
            if not any(some):
                raise OptionError(
                    f"weights of the files that have {name!r} are all 0; expected a positive one"
                )
            weights = weights_for(some, ReduceOp.MEAN)
            weights_of[tuple(having)] = weights
        sizes = [dtype_named(spec.dtype).itemsize for spec in specs.values()]
        yield _Tensor(
            name,
            TensorSpec(into, first.shape),
            [files[number] for number in having],
            weights,
            sum(sizes),
            max(*sizes, dtype_named(into).itemsize),
        )


def _same_tensors(
    files: Sequence[ModelFile], factors: Sequence[float], dtype: str | None
) -> Iterator[_Tensor]:
    """Yields the tensors of models with equal layouts, without comparing each: there may be very many."""
    weights, all_files = weights_for(tuple(factors), ReduceOp.MEAN), list(files)
    of_dtype: dict[str, tuple[str, int, int]] = {}
    for name, spec in files[0].tensors.items():
        found = of_dtype.get(spec.dtype)
        if found is None:
            into = dtype if dtype is not None and spec.dtype in _FLOATS else spec.dtype
            size = dtype_named(spec.dtype).itemsize
            found = of_dtype[spec.dtype] = into, len(files) * size, max(size, dtype_named(into).itemsize)
        into, all_bytes, widest_bytes = found
        result = spec if into == spec.dtype else TensorSpec(into, spec.shape)
        yield _Tensor(name, result, all_files, weights, all_bytes, widest_bytes)


def _check_names(files: Sequence[ModelFile], everything: dict[str, None], keys: Keys) -> None:
    if keys != "strict":
        return
    for number, file in enumerate(files):
        lacking = [repr(name) for name in everything if name not in file.tensors]
        if lacking:
            # The odd one may be the file that has them.
            having = [n for n, other in enumerate(files) if any(repr(k) in lacking for k in other.tensors)]
            if len(having) == 1 and len(files) > 2:
                text = (
                    f"file {having[0]} ({files[having[0]].path}) has {few(lacking)}, which no other file has"
                )
            else:
                text = f"file {number} ({file.path}) lacks {few(lacking)}, which other files have"
            raise StructureMismatchError(
                f"{text}; keys= says what becomes of such tensors: {', '.join(KEYS)}"
            )


def _joined(tensors: Sequence[_Tensor], writer: ModelWriter) -> list[_Tensor]:
    """Merges tensors that are adjacent in all files and in the output."""
    joined: list[_Tensor] = []
    count, last = 0, ""
    asked: list[ModelFile] = []

    def finish() -> None:
        if joined and count != joined[-1].spec.num_elements:
            joined[-1] = joined[-1]._replace(spec=TensorSpec(joined[-1].spec.dtype, (count,)))

    for tensor in tensors:
        if (
            joined
            and joined[-1].spec.dtype == tensor.spec.dtype
            and joined[-1].weights is tensor.weights  # and so the files
            and all(file.is_before(last, tensor.name) for file in asked)
            and writer.is_before(last, tensor.name)
        ):
            count += tensor.spec.num_elements
        else:
            finish()
            joined.append(tensor)
            count = tensor.spec.num_elements
            asked = list({id(file.layout or file): file for file in tensor.files}.values())
        last = tensor.name
    finish()
    return joined


def _ranges(tensors: Sequence[_Tensor], num_bytes: int) -> Iterator[_Range]:
    """Yields ranges of all tensors, at most `num_bytes` of a file at a time; an empty tensor is one range."""
    for tensor in tensors:
        step = num_bytes // tensor.widest_bytes
        for start in range(0, max(tensor.spec.num_elements, 1), step):
            yield _Range(tensor, start, min(start + step, tensor.spec.num_elements))


def _read_ahead(tensors: Sequence[_Tensor], num_bytes: int, advice_bytes: int) -> Iterator[_Range]:
    """Yields the ranges and starts to read the following ones from disk."""
    following = _ranges(tensors, advice_bytes)
    asked_bytes = taken_bytes = 0
    for part in _ranges(tensors, num_bytes):
        while asked_bytes < taken_bytes + READ_AHEAD_BYTES and (ahead := next(following, None)) is not None:
            for file in ahead.tensor.files:
                file.read_ahead(ahead.tensor.name, ahead.start, ahead.stop)
            asked_bytes += ahead.num_bytes
        taken_bytes += part.num_bytes
        yield part


def _mean(part: _Range, precision: Precision, integers: Integers, room: NDArray[np.uint8]) -> NDArray[Any]:
    """Returns the elements of a range of the result, in `room` or in other memory."""
    tensor, start, stop = part
    arrays = [file.elements(tensor.name, start, stop) for file in tensor.files]
    into = dtype_named(tensor.spec.dtype)
    if into.kind in "iub" and integers != "mean":
        return arrays[0] if integers == "first" else np.maximum.reduce(arrays)
    result = room[: (stop - start) * into.itemsize].view(into)
    if into.kind not in "iub" and all(array.dtype == into for array in arrays):
        recipe = Recipe(ReduceOp.SUM, precision, weights=tensor.weights)
        if set(tensor.weights.factors) == {1.0}:  # the same bits, and there are faster kernels
            recipe = Recipe(ReduceOp.SUM, precision, len(arrays))
        fused_pass(arrays, [result], recipe)
        return result
    widest = max((array.dtype for array in arrays), key=lambda dtype: dtype.itemsize)
    running = RunningSum(result.size, widest, precision)
    for array, factor in zip(arrays, tensor.weights.factors, strict=True):
        running.add([array], [factor])
    running.write(result, tensor.weights.exact_divisor)
    return result
