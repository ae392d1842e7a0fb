"""Digests of arrays and trees: equal for equal dtypes, shapes and bits in any library, on any device."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from crossdevice.backends.protocol import Array, Backend
from crossdevice.backends.registry import BACKENDS
from crossdevice.errors import BitsMismatchError, ConversionError, DtypeError
from crossdevice.execution.reading.values import backend_of, is_leaf, replica_at
from crossdevice.execution.signature_cache import SignatureCache
from crossdevice.kernels.cuda.driver import gpu_unavailable, kernels_unavailable
from crossdevice.kernels.host.fingerprint_pass import (
    COPIED_BYTES,
    PIECE_BYTES,
    Piece,
    in_order,
    is_compiled,
    pieces_at,
    pieces_of,
    sums_of,
)
from crossdevice.kernels.host.work_list import address_of
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.values.delegation import PlacedArray
from crossdevice.values.device import device_of
from crossdevice.values.disagreement import differing_leaves
from crossdevice.values.distributed import DistributedValues, IndexedSlices, as_distributed
from crossdevice.values.dtypes import ITEM_BYTES
from crossdevice.values.nesting import flatten, is_number, leaf_paths
from crossdevice.values.quantities import kind_text

DIGEST_BYTES = 16

ROOT = "value"
"""How paths of leaves begin."""


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """A digest of an array or tree, and one of each leaf; equal if the digests are.

    Args:
        digest: 32 hexadecimal digits for the whole tree.
        leaves: the digest of each leaf, by its path.

    >>> import numpy as np, crossdevice as cd
    >>> before = cd.fingerprint({"w": np.zeros(3), "b": np.ones(1)})
    >>> after = cd.fingerprint({"w": np.float64([0, -0.0, 0]), "b": np.ones(1)})
    >>> before == after, before.differing_leaves(after)
    (False, ["value['w']"])
    """

    digest: str
    """32 hexadecimal digits."""
    leaves: Mapping[str, str] = dataclasses.field(compare=False, repr=False)
    """The digest of each leaf, by the path to it."""

    def __str__(self) -> str:
        return self.digest

    def differing_leaves(self, other: Fingerprint) -> list[str]:
        """Lists the paths of leaves that differ, or that only one of the two has.

        Args:
            other: another fingerprint.

        Returns:
            The paths, such as `value['w']`; an empty list if the two are equal.
        """
        paths = dict.fromkeys((*self.leaves, *other.leaves))
        return [path for path in paths if self.leaves.get(path) != other.leaves.get(path)]


def fingerprint(tree: Any) -> Fingerprint:
    """Digests an array, or a structure of arrays, at about the speed at which memory is read.

    Arrays have the same digest if and only if they have the same dtype, shape and bits (NaN payloads and the
    sign of zero count), in any library, on any device, in any order of axes in memory, with any number of
    threads, in any version of crossdevice. By accident two that differ have the same digest with a chance of
    about 2**-64 at most, and of 2**-128 if they have nothing to do with each other. It is no protection
    against somebody who looks for such a pair.

    Sparse rows count as they are stored. Plain numbers are float64, int64 or complex128. Each component of
    distributed values counts.

    Args:
        tree: an array, a structure of arrays, or a distributed value.

    Returns:
        A Fingerprint; `str()` of it is the digest.

    Raises:
        ConversionError: something cannot be read as an array.

    >>> import numpy as np, crossdevice as cd
    >>> print(cd.fingerprint(np.arange(4, dtype=np.float32)))
    4e19b1b4f90316e51e3b43eb178d9fbe
    >>> cd.fingerprint(np.zeros((2, 3))) == cd.fingerprint(np.zeros((2, 3), order="F"))
    True
    """
    items = _items(tree, ROOT)
    leaves = dict(zip((item.path for item in items), _digests(items), strict=True))
    if len(items) == 1 and items[0].path == ROOT:
        (digest,) = leaves.values()
        return Fingerprint(digest, leaves)
    # Sorted: containers that mean the same may keep their items in another order.
    text = "".join(f"{path}\n{leaf}\n" for path, leaf in sorted(leaves.items()))
    return Fingerprint(hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).hexdigest(), leaves)


def digests_of_arrays(arrays: Mapping[str, Array]) -> dict[str, str]:
    """The digests of arrays whose paths are known; those of sparse ones have two paths each."""
    items = [item for path, array in arrays.items() for item in _array_items(array, path)]
    return dict(zip((item.path for item in items), _digests(items), strict=True))


def replica_fingerprints(value: Any) -> list[Fingerprint]:
    """The fingerprint of each component of a distributed value; of any other value its own."""
    value = as_distributed(value)
    if isinstance(value, DistributedValues):
        return list(map(fingerprint, value.values))
    return [fingerprint(value)]


def check_same(value: Any) -> None:
    """Raises BitsMismatchError unless all replicas of a value hold the same bits.

    The message names the replicas in the minority and the leaves in which they differ.
    """
    value = as_distributed(value)
    if not isinstance(value, DistributedValues):
        raise ConversionError(
            f"check_same compares the replicas of a distributed value; got {kind_text(value)}"
        )
    names = [replica_at(replica, device) for replica, device in enumerate(value.devices)]
    found = differing_leaves([each.leaves for each in replica_fingerprints(value)], names)
    if found is not None:
        raise BitsMismatchError(found)


def check_same_in_group(group: ProcessGroup, value: Any) -> None:
    """Raises BitsMismatchError on all ranks unless the replicas of all ranks hold the same bits."""
    own = [dict(each.leaves) for each in replica_fingerprints(value)]
    record = json.dumps(own, sort_keys=True).encode()
    digest = hashlib.blake2b(record, digest_size=DIGEST_BYTES).digest()
    found = None
    with group.call("check_same", b"check_same") as call:
        # One replica that is as all others is the usual case: then nothing but digests travels.
        if len(set(call.all_gather(digest + len(own).to_bytes(4, "little")))) > 1 or len(own) > 1:
            answers = [json.loads(text) for text in call.all_gather_uneven(record)]
            names = [
                member if len(replicas) == 1 else f"replica {replica} of {member}"
                for member, replicas in zip(group.members, answers, strict=True)
                for replica in range(len(replicas))
            ]
            found = differing_leaves(list(itertools.chain.from_iterable(answers)), names)
    if found is not None:
        error = BitsMismatchError(found)
        error.is_on_all_ranks = True
        raise error


class _Item(NamedTuple):
    """One array of a tree, and what else counts of it."""

    path: str
    array: Any
    note: str = ""


def _items(tree: Any, path: str) -> list[_Item]:
    tree = as_distributed(tree)
    if isinstance(tree, PlacedArray):
        tree = tree.operand()
    if isinstance(tree, DistributedValues):
        parts = [_items(each, f"{path}.values[{number}]") for number, each in enumerate(tree.values)]
        return list(itertools.chain.from_iterable(parts))
    if isinstance(tree, IndexedSlices):
        return _rows(tree, path)
    if is_leaf(tree):
        return _array_items(tree, path)
    leaves, structure = flatten(tree, is_leaf)
    if len(leaves) == 1 and leaves[0] is tree:
        has_state = " (its state_dict() is one)" if hasattr(tree, "state_dict") else ""
        raise ConversionError(
            f"{path} is {kind_text(tree)}; expected an array of {', '.join(BACKENDS)}, a number, or a "
            f"tree of them{has_state}"
        )
    paths = leaf_paths(structure, path)
    return [item for leaf, place in zip(leaves, paths, strict=True) for item in _items(leaf, place)]


def _rows(rows: IndexedSlices, path: str) -> list[_Item]:
    note = f" of {rows.dense_shape}"
    return [_Item(f"{path}.values", rows.values, note), _Item(f"{path}.indices", rows.indices)]


def _array_items(array: Any, path: str) -> list[_Item]:
    if is_number(array) or isinstance(array, (list, tuple)):
        try:
            return [_Item(path, np.asarray(array))]
        except ValueError:
            raise ConversionError(
                f"{path} is {kind_text(array)} of lists of several lengths; expected those of one array"
            ) from None
    slices = backend_of(array, 0, path).as_indexed_slices(array)
    return [_Item(path, array)] if slices is None else _rows(slices, path)


def _digests(items: Sequence[_Item]) -> list[str]:
    """The digest of each; all that are in host memory are read in one pass."""
    headers: list[str] = []
    pieces: list[Piece] = []
    on_gpu: dict[int, Array] = {}
    for number, (path, array, note) in enumerate(items):
        backend = backend_of(array, 0, path)
        plain = array if backend.autograd is None else backend.autograd.unrecorded(array)
        signature = _signature(backend, plain)
        known = _known.get(signature)
        if known is not None and backend.are_flat((plain,)):
            address = _address(backend.pointers_to((plain,)))
            if address:
                headers.append(known.header + note)
                pieces += pieces_at(number, address, known.num_bytes)
                continue
        backend.check_array(plain, path)
        header = f"{backend.dtype_of(plain)} {backend.shape_of(plain)}"
        headers.append(header + note)
        if _is_on_host(plain):
            pieces += _pieces(number, backend, plain, path)
            if signature is not None and known is None:
                _keep(signature, header, backend, plain)
        elif _is_read_on_gpu(backend, plain):
            on_gpu[number] = plain
        else:
            pieces += pieces_of(number, backend.to_host(plain))
    sums = sums_of(pieces, len(items))
    if on_gpu:
        from crossdevice.kernels.cuda.gpu_fingerprint import sums_on_gpu

        sums[list(on_gpu)] = sums_on_gpu(list(on_gpu.values()))
    return [
        hashlib.blake2b(header.encode() + line.astype("<u8").tobytes(), digest_size=DIGEST_BYTES).hexdigest()
        for header, line in zip(headers, sums, strict=True)
    ]


class _Known(NamedTuple):
    """Facts common to arrays of one signature, which kernels read where they are."""

    header: str
    num_bytes: int


_known: SignatureCache[_Known] = SignatureCache()


def _signature(backend: Backend, array: Array) -> Hashable:
    """Returns the signature of an array that a compiled kernel may read; None if none does."""
    if not is_compiled():
        return None
    try:
        return backend.name, backend.signature(array)
    except (AttributeError, RuntimeError):
        return None


def _keep(signature: Hashable, header: str, backend: Backend, array: Array) -> None:
    """Remembers that arrays of this signature, which has passed all checks, are read where they are."""
    if backend.are_flat((array,)) and backend.is_contiguous(array):
        view, address = backend.host_view(array), _address(backend.pointers_to((array,)))
        if address and address == address_of(view):
            _known[signature] = _Known(header, view.nbytes)


def _address(pointers: Sequence[Any] | None) -> int:
    """Returns where the only array is; 0 if that is not known."""
    if not pointers:
        return 0
    (pointer,) = pointers
    return pointer if isinstance(pointer, int) else address_of(pointer)


def _is_on_host(array: Array) -> bool:
    device = device_of(array)
    return device is None or device.is_host


def _is_read_on_gpu(backend: Backend, array: Array) -> bool:
    device = device_of(array)
    return (
        device is not None
        and device.type == "cuda"
        and backend.shares_gpu_arrays
        and kernels_unavailable() is None
        and gpu_unavailable(device.index) is None
    )


def _pieces(number: int, backend: Backend, array: Array, path: str) -> Iterator[Piece]:
    """An array in host memory: as it is, or in copies that are no larger than a cache."""
    item_bytes = ITEM_BYTES.get(backend.dtype_of(array), 0)
    num_bytes = math.prod(backend.shape_of(array)) * item_bytes
    if num_bytes > PIECE_BYTES and not backend.is_contiguous(array):
        yield from _copied_pieces(number, backend, array, 0, num_bytes)
        return
    flat = backend.host_view(array)
    if flat.dtype.hasobject:
        raise DtypeError(
            f"{path} has dtype {flat.dtype}, whose elements are Python objects; expected numbers, "
            "booleans or strings of one length: a fingerprint is of bits"
        )
    yield from pieces_of(number, flat)


def _in_order(backend: Backend, part: Array) -> NDArray[Any]:
    """A part of an array, its elements in order."""
    is_plain = type(part) is np.ndarray and part.dtype.isnative
    return in_order(part) if is_plain else backend.host_view(part)


def _copied_pieces(
    number: int, backend: Backend, array: Array, offset: int, num_bytes: int
) -> Iterator[Piece]:
    """Ranges along the first axis, or along the next one where an element of it is large."""
    length = backend.shape_of(array)[0]
    row_bytes = num_bytes // length
    if row_bytes > COPIED_BYTES:
        for index in range(length):
            yield from _copied_pieces(number, backend, array[index], offset + index * row_bytes, row_bytes)
        return
    step = COPIED_BYTES // row_bytes
    for start in range(0, length, step):
        part = array[start : start + step]
        size = min(step, length - start) * row_bytes
        yield Piece(
            number,
            offset + start * row_bytes,
            size,
            lambda part=part: _in_order(backend, part),  # type: ignore[misc]
        )
