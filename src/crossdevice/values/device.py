"""Names of devices: every spelling TensorFlow and the array libraries use, read into one form."""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any, TypeAlias

from crossdevice.errors import DeviceError

_SHORT_TYPES = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "tpu": "tpu", "mps": "mps", "xpu": "xpu"}
_KNOWN_TYPES = frozenset(_SHORT_TYPES.values())
_TENSORFLOW_TYPES = {"cuda": "GPU"}


def _counted(part: str, number: int) -> int:
    try:
        count = operator.index(number)  # takes NumPy's integers, refuses floats
    except TypeError:
        count = -1
    if count < 0 or isinstance(number, bool):
        raise DeviceError(f"the {part} of a device must be an integer of 0 or more; got {number!r}")
    return count


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Device:
    """A place where arrays live. `cpu:k`, a logical device of the host, exists for every k.

    JAX and TensorFlow are exceptions: they have as many as they were configured with.

    >>> Device("cuda:1") == Device("cuda", 1) == Device.parse("/device:GPU:1")
    True
    >>> Device("cpu:3").canonical
    '/job:localhost/replica:0/task:0/device:CPU:3'

    Args:
        type: the type alone ("cuda"), with the other parts beside it, or a whole name ("cuda:1").
    """

    type: str
    index: int
    job: str
    replica: int
    task: int

    def __init__(
        self,
        type: str,  # noqa: A002 - the name of the field
        index: int = 0,
        job: str = "localhost",
        replica: int = 0,
        task: int = 0,
    ) -> None:
        if not isinstance(type, str) or not type:
            raise DeviceError(
                f"{type!r} is not the name of a device; expected one such as 'cpu:0' or 'cuda:1' "
                "(Device.parse also reads the device objects of libraries)"
            )
        kind = _SHORT_TYPES.get(type.lower(), type.lower())
        if not kind.isidentifier():
            beside = (index, job, replica, task)
            if beside != (0, "localhost", 0, 0):
                raise DeviceError(f"{type!r} is a whole name; got more parts of a name beside it: {beside}")
            kind, index, job, replica, task = dataclasses.astuple(_parse(type, _HOST))
        if not isinstance(job, str) or not job or "/" in job:
            raise DeviceError(f"{job!r} is not the name of a job; expected one such as 'worker'")
        self._fill(kind, _counted("index", index), job, _counted("replica", replica), _counted("task", task))

    def _fill(self, kind: str, index: int, job: str, replica: int, task: int) -> None:
        # Devices are part of every cache key; hashing five fields each time would cost more than a small sum.
        known = hash((kind, index, job, replica, task))
        self.__dict__.update(type=kind, index=index, job=job, replica=replica, task=task, _hash=known)

    def __hash__(self) -> int:
        known: int = self.__dict__["_hash"]
        return known

    def __reduce__(self) -> tuple[Any, ...]:
        """Hashes of strings differ from process to process, so a pickled device makes its own anew."""
        return Device.parse, (self.canonical,)

    @staticmethod
    def parse(name: object, default: object = None) -> Device:
        """Reads a device name; parts it lacks come from `default`, then from `cpu:0` of this process.

        Also takes a Device and the device objects of PyTorch, JAX, CuPy and TensorFlow.
        """
        if isinstance(name, Device):
            return name
        fallback = _HOST if default is None else Device.parse(default)
        if name is None:
            return fallback
        if isinstance(name, str):
            return _parse(name, fallback)
        device = _from_library(name)
        if device is None and getattr(name, "type", None) == "cpu":
            return fallback  # PyTorch's host device, which has no number
        if device is None:
            raise DeviceError(f"{name!r} is not a device; expected a name such as 'cpu:0' or 'cuda:1'")
        return device

    @property
    def canonical(self) -> str:
        """The full TensorFlow name."""
        return f"/job:{self.job}/replica:{self.replica}/task:{self.task}/{self._last_part}"

    @property
    def canonical_without_job_and_task(self) -> str:
        """The TensorFlow name as seen from its own task."""
        return f"/replica:{self.replica}/{self._last_part}"

    @property
    def is_host(self) -> bool:
        """Whether its arrays lie in the host's memory."""
        return self.type == "cpu"

    @property
    def _last_part(self) -> str:
        return f"device:{_TENSORFLOW_TYPES.get(self.type, self.type.upper())}:{self.index}"

    def __str__(self) -> str:
        if (self.job, self.replica, self.task) == ("localhost", 0, 0):
            return f"{self.type}:{self.index}"
        return self.canonical

    def __repr__(self) -> str:
        if self.type in _KNOWN_TYPES and self.index >= 0:
            return f"Device({str(self)!r})"
        return f"Device.parse({self.canonical!r})"  # only a full name can spell such a device


Track: TypeAlias = "tuple[Device, Device]"
"""Where work is done in order: on the way from one device to another or, with the same twice, on a device."""

_HOST = Device("cpu")


@functools.cache
def host_device(index: int) -> Device:
    """The logical host device `cpu:index`."""
    return Device("cpu", index)


def device_of(value: object) -> Device | None:
    """The device an array says it is on; None for host memory, which has no device of its own."""
    if isinstance(value, Device):
        return value
    said: Any = getattr(value, "device", None)
    if said is None and is_of_keras(value):
        return device_of(value.value)  # type: ignore[attr-defined]
    if said is None or said == "cpu":
        return None
    if isinstance(said, (Device, str)):
        return Device.parse(said)
    return _from_library(said)


def is_of_keras(value: object) -> bool:
    """Whether this is a variable of Keras, which holds an array of TensorFlow, PyTorch or JAX."""
    return type(value).__module__.startswith("keras.") and hasattr(value, "value")


def misplaced(array: object, device: Device) -> str | None:
    """Where an array is, if that is not on this device; None if it is there, or on the host for any `cpu:k`.

    >>> misplaced([1.0], Device("cuda:1"))
    'the host'
    """
    own = device_of(array)
    if own is None:
        return None if device.is_host else "the host"
    return None if own == device else str(own)


def _from_library(device: Any) -> Device | None:
    """A PyTorch (type, index), JAX (platform, id), TensorFlow (name) or CuPy (id) device object."""
    kind = getattr(device, "type", None)
    if isinstance(kind, str):
        index = getattr(device, "index", None)
        return None if kind == "cpu" and index is None else _device(_SHORT_TYPES.get(kind, kind), index or 0)
    platform = getattr(device, "platform", None)
    if isinstance(platform, str):
        return _device(_SHORT_TYPES.get(platform, platform), int(device.id))
    name = getattr(device, "name", None)
    if isinstance(name, str):
        return _parse(name, _HOST)
    number = getattr(device, "id", None)
    return _device("cuda", number) if isinstance(number, int) else None


@functools.cache
def _device(kind: str, index: int) -> Device:
    """One object for each: the devices of a batch are compared by the thousand."""
    return Device(kind, index)


@functools.lru_cache(maxsize=4096)
def _parse(name: str, default: Device) -> Device:
    """What a name says, also of devices that nobody has: TensorFlow reads `/cpu:-1`, and so do we."""
    found: dict[str, Any] = {}
    for part in name.rstrip().split("/"):
        if not part:
            continue
        key, _, rest = part.partition(":")
        if key == "job":
            found["job"] = rest
        elif key in ("replica", "task"):
            found[key] = _number(rest, name)
        else:
            if "kind" in found:
                raise DeviceError(f"device {name!r} names two device types")
            found["kind"], index = _type_and_index(key, rest, name)
            if index is not None:
                found["index"] = index
    device = object.__new__(Device)
    kind, index, job, replica, task = dataclasses.astuple(default)
    device._fill(**{"kind": kind, "index": index, "job": job, "replica": replica, "task": task, **found})
    return device


def _type_and_index(key: str, rest: str, name: str) -> tuple[str, int | None]:
    if key == "device":
        word, colon, index = rest.partition(":")
        if not colon:
            raise DeviceError(f"device {name!r} has no index after 'device:{word}'")
        kind = _SHORT_TYPES.get(word.lower())
        if kind is None and word != word.upper():
            raise DeviceError(f"device {name!r}: the type after 'device:' must be in upper case")
        return kind or word.lower(), _index(index, name)
    kind = _SHORT_TYPES.get(key.lower())
    if kind is None:
        known = ", ".join(_SHORT_TYPES)
        raise DeviceError(f"device {name!r}: {key!r} is not a device type; expected one of {known}")
    return kind, _index(rest, name) if rest else None


def _index(text: str, name: str) -> int | None:
    return None if text == "*" else _number(text, name)


def _number(text: str, name: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise DeviceError(f"device {name!r}: {text!r} is not a number") from None
