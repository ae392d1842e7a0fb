"""NCCL from one process: its bindings, and which reductions use it."""

from __future__ import annotations

import abc
import contextlib
import functools
import threading
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from crossdevice import runtime
from crossdevice.backends.protocol import Array, Backend
from crossdevice.errors import EngineError
from crossdevice.values.device import Device, device_of
from crossdevice.values.dtypes import COMPLEXES, FLOATS, INTEGERS, PARTS, SHORT_FLOATS
from crossdevice.values.reduce_op import ReduceOp

_DTYPES = "int8 uint8 int32 uint32 int64 uint64 float16 float32 float64 bfloat16"
NUMBERS = {dtype: number for number, dtype in enumerate(_DTYPES.split())}
"""Codes of `ncclDataType_t`, which has no 16-bit integers and no complex numbers."""

OPERATIONS = {ReduceOp.SUM: 0, ReduceOp.PROD: 1, ReduceOp.MAX: 2, ReduceOp.MIN: 3, ReduceOp.MEAN: 4}
"""Codes of `ncclRedOp_t`."""

WIDER = {"int16": "int32", "uint16": "int32", "uint32": "int64", "uint64": "int64"}
"""Wider dtypes for integers that a binding lacks: sums and products wrap to the same bits."""


class Share(NamedTuple):
    """One device's part in a collective: equally long arrays to read and to write, and the stream for it."""

    source: Array
    target: Array
    device: Device
    stream: int
    source_address: int
    target_address: int
    num_elements: int


class NcclEngine(abc.ABC):
    """One binding of NCCL; the constructor raises ImportError if it is missing."""

    name: ClassVar[str]
    libraries: ClassVar[tuple[str, ...]]
    """Array libraries that it accepts."""

    dtypes: ClassVar[frozenset[str]] = frozenset(NUMBERS)
    """The dtypes it reduces without a conversion."""

    @abc.abstractmethod
    def version(self) -> str:
        """Returns NCCL's version."""

    @abc.abstractmethod
    def all_reduce(self, shares: Sequence[Share], dtype: str, op: ReduceOp) -> None:
        """Enqueues one group of calls, one for each device."""

    def forget(self, devices: tuple[int, ...]) -> None:  # noqa: B027 - nothing to do is an answer
        """Discards failed communicators: the next collective on these devices creates new ones."""


class CommunicatorsEngine(NcclEngine):
    """A binding with communicators that we create and keep: one clique for each tuple of devices."""

    def __init__(self) -> None:
        self._cliques: dict[tuple[int, ...], Sequence[Any]] = {}
        runtime.end_with_process(self._free)

    @abc.abstractmethod
    def connect(self, devices: tuple[int, ...]) -> Sequence[Any]:
        """Creates a communicator for each device."""

    def clique(self, shares: Sequence[Share]) -> Sequence[Any]:
        """Returns the communicators of these devices, in their order."""
        devices = tuple(share.device.index for share in shares)
        if devices not in self._cliques:
            self._cliques[devices] = self.connect(devices)
        return self._cliques[devices]

    def forget(self, devices: tuple[int, ...]) -> None:
        """Aborts their communicators."""
        for communicator in self._cliques.pop(devices, ()):
            with contextlib.suppress(Exception):  # the failure that led here is the one to report
                communicator.abort()

    def _free(self) -> None:
        while self._cliques:
            _, clique = self._cliques.popitem()
            for communicator in clique:
                with contextlib.suppress(Exception):  # the process ends in any case
                    communicator.destroy()


class Nccl4pyEngine(CommunicatorsEngine):
    """NVIDIA's own binding, nccl4py: takes arrays of any library."""

    name = "nccl4py"
    libraries = ("torch", "cupy")

    def __init__(self) -> None:
        import nccl.core

        if nccl.core.get_version().libnccl is None:
            raise ImportError("nccl4py finds no libnccl (pip install nvidia-nccl-cu13, or -cu12)")
        super().__init__()
        self._nccl = nccl.core

    def version(self) -> str:
        """Returns the version of the library it has loaded."""
        return str(self._nccl.get_version().libnccl.version)

    def connect(self, devices: tuple[int, ...]) -> Sequence[Any]:
        """Calls ncclCommInitAll."""
        return self._nccl.Communicator.init_all(list(devices))

    def all_reduce(self, shares: Sequence[Share], dtype: str, op: ReduceOp) -> None:  # noqa: ARG002
        """Enqueues the calls; the binding reads the dtypes from the arrays."""
        clique = self.clique(shares)
        operation = self._nccl.NcclRedOp(OPERATIONS[op])
        with self._nccl.group():
            for communicator, share in zip(clique, shares, strict=True):
                communicator.allreduce(share.source, share.target, operation, stream=share.stream)


class TorchNcclEngine(NcclEngine):
    """PyTorch's binding for one process, which keeps communicators itself and works on current streams."""

    name = "torch.cuda.nccl"
    libraries = ("torch",)
    dtypes = frozenset(NUMBERS) - {"uint32", "uint64"}

    def __init__(self) -> None:
        import torch.cuda.nccl

        if not hasattr(torch._C, "_nccl_all_reduce"):
            raise ImportError("this PyTorch was built without NCCL")
        self._nccl = torch.cuda.nccl

    def version(self) -> str:
        """Returns the version of the library PyTorch was built with."""
        return ".".join(map(str, self._nccl.version()))

    def all_reduce(self, shares: Sequence[Share], dtype: str, op: ReduceOp) -> None:  # noqa: ARG002
        """Calls PyTorch once, which groups the calls."""
        sources, targets = [share.source for share in shares], [share.target for share in shares]
        self._nccl.all_reduce(sources, targets, OPERATIONS[op])


class CupyNcclEngine(CommunicatorsEngine):
    """CuPy's binding, which takes addresses."""

    name = "cupy.cuda.nccl"
    libraries = ("cupy", "torch")

    def __init__(self) -> None:
        from cupy.cuda import nccl

        if not nccl.available:
            raise ImportError("this CuPy finds no NCCL")
        super().__init__()
        self._nccl = nccl

    def version(self) -> str:
        """Formats a number such as 22703."""
        number = self._nccl.get_version()
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}"

    def connect(self, devices: tuple[int, ...]) -> Sequence[Any]:
        """Calls ncclCommInitAll."""
        return self._nccl.NcclCommunicator.initAll(list(devices))

    def all_reduce(self, shares: Sequence[Share], dtype: str, op: ReduceOp) -> None:
        """Enqueues the calls by address and number of elements."""
        clique = self.clique(shares)
        self._nccl.groupStart()
        try:
            for communicator, share in zip(clique, shares, strict=True):
                where = share.source_address, share.target_address, share.num_elements
                communicator.allReduce(*where, NUMBERS[dtype], OPERATIONS[op], share.stream)
        finally:
            self._nccl.groupEnd()


NCCL_ENGINES: dict[str, type[NcclEngine]] = {
    engine.name: engine for engine in (Nccl4pyEngine, TorchNcclEngine, CupyNcclEngine)
}
"""Bindings by name; the first available one that takes an array is used."""

_group_lock = threading.Lock()
"""Serializes collectives: two groups on the same GPUs, enqueued in different orders, would deadlock."""


@functools.cache
def engine_named(name: str) -> NcclEngine | str:
    """Returns the engine, or the reason it cannot be used here."""
    try:
        return NCCL_ENGINES[name]()
    except ImportError as missing:
        return str(missing)
    except Exception as failure:  # a binding that is there but broken must not break what works without it
        return f"{type(failure).__name__}: {failure}"


def engine_for(library: str) -> NcclEngine | None:
    """Returns the first engine that takes this library's arrays."""
    found = (engine_named(name) for name, engine in NCCL_ENGINES.items() if library in engine.libraries)
    return next((engine for engine in found if isinstance(engine, NcclEngine)), None)


def name_of_engine(library: str) -> str | None:
    """Describes the engine and its version."""
    engine = engine_for(library)
    return None if engine is None else f"NCCL {engine.version()} through {engine.name}"


class NcclBackend(Backend):
    """A library with arrays that NCCL reduces, from this one process."""

    @abc.abstractmethod
    def share_of(self, source: Array, device: Device) -> Share:
        """Prepares one device's part in a collective, with new memory for its result."""

    def engine_name(self) -> str | None:
        """Names NCCL and its binding."""
        return name_of_engine(self.name)

    def engine_unavailable(self, dtype: str, op: ReduceOp, num_devices: int) -> str | None:
        """Returns the reason NCCL cannot do this with the same bits; None if it can."""
        engine = engine_for(self.name)
        if engine is None:
            takes = ", ".join(name for name, kind in NCCL_ENGINES.items() if self.name in kind.libraries)
            return f"none of NCCL's bindings for {self.name} arrays is here ({takes})"
        if op.is_order_statistic:
            return "NCCL sorts nothing"
        if dtype in SHORT_FLOATS:
            return "NCCL's bindings have no floats of 8 bits"
        if op in (ReduceOp.MIN, ReduceOp.MAX):
            if dtype in FLOATS:
                return "NCCL's minimum and maximum lose NaN"
            if dtype == "uint64" and dtype not in engine.dtypes:
                return f"{engine.name} has no uint64"
        if op is ReduceOp.PROD and dtype in COMPLEXES:
            return "NCCL cannot multiply complex numbers"
        if op is ReduceOp.MEAN and (dtype in INTEGERS or num_devices.bit_count() != 1):
            return "NCCL's average multiplies by 1/n first, which has other bits unless n is a power of two"
        return None

    def engine_all_reduce(self, arrays: Sequence[Array], op: ReduceOp) -> list[Array]:
        """Runs one group of calls; dtypes that NCCL lacks are converted to others and back."""
        dtype = self.dtype_of(arrays[0])
        devices = [device_of(array) or Device("cpu") for array in arrays]
        engine = engine_for(self.name)
        if engine is None:
            raise EngineError(self.engine_unavailable(dtype, op, len(arrays)))
        travels_as = PARTS.get(dtype) or (dtype if dtype in engine.dtypes else WIDER[dtype])
        shares: list[Share] = []
        for array, device in zip(arrays, devices, strict=True):
            with self.working_on(device):
                shares.append(self.share_of(self._converted(array, dtype, travels_as), device))
        try:
            with _group_lock:
                engine.all_reduce(shares, travels_as, op)
        except Exception as failure:
            engine.forget(tuple(device.index for device in devices))
            raise EngineError(
                f"NCCL {engine.version()} through {engine.name} failed to all-reduce {op.name} of "
                f"{shares[0].num_elements} {travels_as} on {', '.join(map(str, devices))}: {failure} "
                "(NCCL_DEBUG=INFO in the environment makes NCCL say why)"
            ) from failure
        results: list[Array] = []
        for share in shares:
            with self.working_on(share.device):
                results.append(self._converted(share.target, travels_as, dtype))
        return results

    def _converted(self, array: Array, given: str, wanted: str) -> Array:
        """Converts a flat array to a dtype that NCCL has, or back; complex numbers become their parts."""
        if given in PARTS:
            return self.parts_of(array)
        if wanted in PARTS:
            return self.from_parts(array)
        return array if given == wanted else self.cast(array, wanted)
