"""Flower: federated averaging in one pass over the clients' bytes, with the same bits in any order.

Replace `from flwr.serverapp.strategy import FedAvg` by `from crossdevice.integrations.flower import FedAvg`.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord
from flwr.serverapp import strategy
from numpy.typing import NDArray

from crossdevice.backends.protocol import dtype_named
from crossdevice.backends.registry import backend_named, backend_of_type
from crossdevice.combining.accumulator import Accumulator
from crossdevice.combining.files.numpy_files import npy_header
from crossdevice.combining.trees import Integers
from crossdevice.errors import ConversionError
from crossdevice.functions import reduce
from crossdevice.values.device import host_device
from crossdevice.values.dtypes import NARROW_FLOATS
from crossdevice.values.options import CommunicationOptions, Precision
from crossdevice.values.quantities import kind_text
from crossdevice.values.reduce_op import ReduceOp, trimmed_mean

NUMPY_BYTES = "numpy.ndarray"
"""Flower's word for bytes that are a .npy file."""


class _Combining:
    """Combination of the replies' arrays; everything else is Flower's."""

    def __init__(
        self, *arguments: Any, precision: Precision = "exact", integers: Integers = "mean", **keywords: Any
    ) -> None:
        super().__init__(*arguments, **keywords)
        Accumulator(precision, integers=integers)  # refuses what is wrong
        self.precision = precision
        self.integers = integers

    def aggregate_train(
        self: Any,
        server_round: int,  # noqa: ARG002 - Flower hands it over
        replies: Iterable[Message],
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Returns the combined arrays of all replies without errors, and their metrics as in Flower."""
        valid, _ = self._check_and_log_replies(replies, is_train=True)
        if not valid:
            return None, None
        contents = [message.content for message in valid]
        weights = [
            float(metrics[self.weighted_by_key])
            for content in contents
            for metrics in content.metric_records.values()
        ]
        models = [arrays_of(record) for content in contents for record in content.array_records.values()]
        whole = [name for name, array in models[0].items() if array.dtype.kind in "iub"]
        floats = [{name: model[name] for name in model if name not in whole} for model in models]
        result = self._combined(floats, weights)
        if whole:
            total = Accumulator(integers=self.integers)
            for model, weight in zip(models, weights, strict=True):
                total.add({name: model[name] for name in whole}, weight)
            result = {**result, **total.mean()}
        arrays = record_of({name: result[name] for name in models[0]})
        return arrays, self.train_metrics_aggr_fn(contents, self.weighted_by_key)


class FedAvg(_Combining, strategy.FedAvg):
    """Flower's FedAvg, with weighted means that are rounded once.

    It takes all arguments of `flwr.serverapp.strategy.FedAvg`, and is used in its place. Arrays are read
    where they are in the clients' messages; bfloat16 ones too (`record_of` makes records of them).

    Args:
        precision: under `"exact"` the true mean is rounded once, whatever the order in which clients answer;
            `"accurate"` adds in float64, in the order of the replies.
        integers: what becomes of integer arrays: `"mean"` is rounded to nearest even, `"first"`, or `"max"`.
            Flower makes float64 of them.
    """

    def _combined(self, models: list[dict[str, Any]], weights: list[float]) -> Any:
        options = CommunicationOptions(precision=self.precision)
        return reduce(models, ReduceOp.MEAN, weights=weights, options=options)


class FedMedian(_Combining, strategy.FedMedian):
    """Flower's FedMedian: the median of each element, in one pass; otherwise like our `FedAvg`."""

    def _combined(self, models: list[dict[str, Any]], weights: list[float]) -> Any:  # noqa: ARG002
        return reduce(models, ReduceOp.MEDIAN)


class FedTrimmedAvg(_Combining, strategy.FedTrimmedAvg):
    """Flower's FedTrimmedAvg: of each element the mean without `beta` of the clients at either end."""

    def _combined(self, models: list[dict[str, Any]], weights: list[float]) -> Any:  # noqa: ARG002
        cut = int(self.beta * len(models))
        options = CommunicationOptions(precision=self.precision)
        return reduce(models, trimmed_mean(cut) if cut else ReduceOp.MEAN, options=options)


def arrays_of(record: ArrayRecord) -> dict[str, NDArray[Any]]:
    """Returns a record's arrays as read-only views; bfloat16 and float8 as in ml_dtypes."""
    return {name: _view_of(array, name) for name, array in record.items()}


def record_of(arrays: Mapping[str, Any]) -> ArrayRecord:
    """Converts arrays of any library, such as a `state_dict`, to a record for Flower; bfloat16 included."""
    made = {}
    for name, array in arrays.items():
        backend = backend_of_type(type(array))
        if backend is None:
            raise ConversionError(f"{name!r} is {kind_text(array)}; expected an array")
        flat, shape = backend.to_host(array), backend.shape_of(array)
        made[name] = Array(flat.dtype.name, shape, NUMPY_BYTES, _npy_bytes(flat, shape))
    return ArrayRecord(made)


def state_dict_of(record: ArrayRecord) -> dict[str, Any]:
    """Returns a record's tensors in memory of their own, for `load_state_dict`; bfloat16 included."""
    backend = backend_named("torch")
    return {
        name: backend.from_host(array.reshape(-1).copy(), array.shape, host_device(0))
        for name, array in arrays_of(record).items()
    }


def _npy_bytes(flat: NDArray[Any], shape: tuple[int, ...]) -> bytes:
    """Makes the bytes of `numpy.save` with one copy instead of three."""
    # NumPy's format has neither bfloat16 nor floats of 8 bits; the record says which they are.
    dtype = flat.dtype if flat.dtype.isbuiltin == 1 else np.dtype(f"V{flat.itemsize}")
    header = io.BytesIO()
    described = {"descr": dtype.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, described)
    return b"".join([header.getvalue(), flat.view(np.uint8).data])


def _view_of(array: Array, name: str) -> NDArray[Any]:
    if array.stype != NUMPY_BYTES:
        raise ConversionError(f"{name!r} is serialized as {array.stype!r}; expected {NUMPY_BYTES!r}")
    try:
        shape, is_fortran, dtype, start = _header_at_start_of(array.data)
        if dtype.kind == "V" and array.dtype in NARROW_FLOATS:
            dtype = dtype_named(array.dtype)
        flat = np.frombuffer(array.data, dtype, offset=start)
        return flat.reshape(shape, order="F" if is_fortran else "C")
    except ValueError as error:
        raise ConversionError(f"{name!r} is not an array in NumPy's format: {error}") from error


def _header_at_start_of(data: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Reads a `.npy` header and the offset of the elements."""
    length_bytes = 2 if data[6:7] == b"\x01" else 4  # the first version of the format has short headers only
    return _parsed_header(data[: 8 + length_bytes + int.from_bytes(data[8 : 8 + length_bytes], "little")])


@functools.lru_cache(maxsize=4096)
def _parsed_header(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Parses a header; cached, as Python takes 50 us to parse one, and all clients have the same."""
    return *npy_header(io.BytesIO(header)), len(header)
