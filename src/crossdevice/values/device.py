"""Names of devices: every spelling TensorFlow and the array libraries use, read into one form."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, TypeAlias

from crossdevice.errors import DeviceError

_SHORT_TYPES = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "tpu": "tpu", "mps": "mps", "xpu": "xpu"}
_TENSORFLOW_TYPES = {"cuda": "GPU"}


@dataclasses.dataclass(frozen=True)
class Device:
    """A place where arrays live. `cpu:k`, a logical device of the host, exists for every k.

    JAX and TensorFlow are an exception: they have as many as they were started with.

    >>> Device.parse("/device:GPU:1")
    Device('cuda:1')
    >>> Device.parse("cpu:3").canonical
    '/job:localhost/replica:0/task:0/device:CPU:3'
    >>> Device.parse("CPU:3") == Device.parse("/job:localhost/device:CPU:3")
    True
    """

    type: str
    index: int = 0
    job: str = "localhost"
    replica: int = 0
    task: int = 0

    def __post_init__(self) -> None:
        # Devices are part of every cache key; hashing five fields each time would cost more than a small sum.
        object.__setattr__(self, "_hash", hash((self.type, self.index, self.job, self.replica, self.task)))

    def __hash__(self) -> int:
        known: int = self.__dict__["_hash"]
        return known

    def __reduce__(self) -> tuple[Any, ...]:
        """Hashes of strings differ from process to process, so a pickled device makes its own anew."""
        return Device, (self.type, self.index, self.job, self.replica, self.task)

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
        return f"Device({str(self)!r})"


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
    if said is None or said == "cpu":
        return None
    if callable(said):  # older JAX arrays
        said = said()
    if isinstance(said, (Device, str)):
        return Device.parse(said)
    return _from_library(said)


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
            if "type" in found:
                raise DeviceError(f"device {name!r} names two device types")
            found["type"], index = _type_and_index(key, rest, name)
            if index is not None:
                found["index"] = index
    return dataclasses.replace(default, **found)


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
