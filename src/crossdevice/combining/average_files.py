"""The mean of models in files, in a few MiB of memory."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from crossdevice.backends.protocol import dtype_named
from crossdevice.combining.files.formats import check_output, new_model, open_model
from crossdevice.combining.files.model_file import ModelFile, TensorSpec, opened
from crossdevice.combining.leaf_total import INTEGERS, Integers
from crossdevice.errors import DtypeMismatchError, OptionError, ShapeMismatchError, StructureMismatchError
from crossdevice.execution.reading.values import few
from crossdevice.kernels.host.fused_pass import fused_pass
from crossdevice.kernels.host.running_sum import RunningSum
from crossdevice.kernels.recipe import Recipe
from crossdevice.values.disagreement import disagreement
from crossdevice.values.dtypes import FLOATS
from crossdevice.values.options import Precision
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.weights import Weights, factors_of, weights_for

Keys = Literal["strict", "union", "intersection"]
KEYS: tuple[Keys, ...] = ("strict", "union", "intersection")

RANGE_BYTES = 4 << 20
"""Of each file at a time."""

READ_AHEAD_BYTES = 64 << 20
"""Of all files together, asked for before they are needed."""

Progress = Callable[[int, int], None]
"""Called with the bytes that have been read so far, and those that will be."""


class _Tensor(NamedTuple):
    """A tensor of the result, and the files that have it."""

    name: str
    spec: TensorSpec
    files: list[ModelFile]
    weights: Weights


class _Range(NamedTuple):
    tensor: _Tensor
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Of all files together."""
        sizes = (dtype_named(file.tensors[self.tensor.name].dtype).itemsize for file in self.tensor.files)
        return (self.stop - self.start) * sum(sizes)


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
) -> None:
    """Writes the mean of all tensors of several models to a file, through a few MiB of memory.

    Formats go by the names of files: `.safetensors`, several of them with an index
    (`model.safetensors.index.json`, or the folder it is in), `.npz`, `.npy`, and PyTorch's `.pt`, `.pth` and
    `.bin`, of which no code is run. The output appears when it is complete; it has the metadata of the first.

    Args:
        weights: one for each file; None counts them all alike.
        precision: `"accurate"` adds wide and rounds once, `"exact"` rounds the true mean, whatever the order.
        dtype: of the floats in the output; needed where files have different ones.
        integers: what becomes of integers and booleans: `"mean"` is rounded to nearest even, `"first"` is
            that of the first file, `"max"` the largest.
        keys: `"strict"` refuses files with different tensors, `"union"` takes the mean of each tensor over
            the files that have it, `"intersection"` leaves out what not all have.
        progress: called with the number of bytes read so far and in all.

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
    _check_options(paths, precision, dtype, integers, keys)
    factors = factors_of([1] * len(paths) if weights is None else weights, ReduceOp.MEAN)
    if len(factors) != len(paths):
        raise OptionError(f"{len(factors)} weights for {len(paths)} files; expected one for each file")
    target = Path(output)
    check_output(target)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(opened(open_model(Path(path)))) for path in paths]
        tensors = list(_tensors(files, factors, dtype, keys))
        write = stack.enter_context(new_model(target, {each.name: each.spec for each in tensors}, files[0]))
        total, done = sum(part.num_bytes for part in _ranges(tensors)), 0
        for part in _read_ahead(_ranges(tensors)):
            write(part.tensor.name, _mean(part, precision, integers))
            for file in part.tensor.files:
                file.leave_behind(part.tensor.name, part.start, part.stop)
            done += part.num_bytes
            if progress is not None:
                progress(done, total)


def _check_options(paths: Any, precision: str, dtype: str | None, integers: str, keys: str) -> None:
    if isinstance(paths, (str, PathLike)) or not len(paths):
        raise OptionError(f"paths must be a list of at least one file; got {paths!r}")
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
    """What is in the result, in the order of the first file that has it; every check."""
    everything = dict.fromkeys(name for file in files for name in file.tensors)
    _check_names(files, everything, keys)
    for name in everything:
        having = [number for number, file in enumerate(files) if name in file.tensors]
        if keys == "intersection" and len(having) < len(files):
            continue
        specs = {number: files[number].tensors[name] for number in having}
        names = [f"file {number} ({file.path})" for number, file in enumerate(files)]
        odd = disagreement({n: s.shape for n, s in specs.items()}, names, "has shape", place=f" at {name!r}")
        if odd is not None:
            raise ShapeMismatchError(odd)
        first = specs[having[0]]
        if dtype is None or not all(spec.dtype in FLOATS for spec in specs.values()):
            odd = disagreement(
                {n: s.dtype for n, s in specs.items()}, names, "has dtype", place=f" at {name!r}"
            )
            if odd is not None:
                raise DtypeMismatchError(f"{odd}; of floats, dtype= says which the mean has")
        into = dtype if dtype is not None and first.dtype in FLOATS else first.dtype
        weights = weights_for(tuple(factors[number] for number in having), ReduceOp.MEAN)
        yield _Tensor(name, TensorSpec(into, first.shape), [files[number] for number in having], weights)


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


def _ranges(tensors: Sequence[_Tensor]) -> Iterator[_Range]:
    """All tensors, a few MiB of each file at a time; an empty one is one range."""
    for tensor in tensors:
        widest = max(dtype_named(file.tensors[tensor.name].dtype).itemsize for file in tensor.files)
        step = RANGE_BYTES // widest
        for start in range(0, max(tensor.spec.num_elements, 1), step):
            yield _Range(tensor, start, min(start + step, tensor.spec.num_elements))


def _read_ahead(ranges: Iterator[_Range]) -> Iterator[_Range]:
    """The ranges, those that follow being read from the disk meanwhile."""
    asked: deque[_Range] = deque()
    num_bytes = 0
    for part in ranges:
        for file in part.tensor.files:
            file.read_ahead(part.tensor.name, part.start, part.stop)
        asked.append(part)
        num_bytes += part.num_bytes
        while num_bytes > READ_AHEAD_BYTES:
            num_bytes -= asked[0].num_bytes
            yield asked.popleft()
    yield from asked


def _mean(part: _Range, precision: Precision, integers: Integers) -> NDArray[Any]:
    """The elements of a range of the result."""
    tensor, start, stop = part
    arrays = [file.elements(tensor.name, start, stop) for file in tensor.files]
    into = dtype_named(tensor.spec.dtype)
    if into.kind in "iub" and integers != "mean":
        return arrays[0] if integers == "first" else np.maximum.reduce(arrays)
    result = np.empty(stop - start, into)
    if into.kind not in "iub" and all(array.dtype == into for array in arrays):
        fused_pass(arrays, [result], Recipe(ReduceOp.SUM, precision, weights=tensor.weights))
        return result
    running = RunningSum(result.size, max((array.dtype for array in arrays), key=_width), precision)
    for array, factor in zip(arrays, tensor.weights.factors, strict=True):
        running.add([array], [factor])
    running.write(result, tensor.weights.exact_divisor)
    return result


def _width(dtype: np.dtype[Any]) -> int:
    return dtype.itemsize
