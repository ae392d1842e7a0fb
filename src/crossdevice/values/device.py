"""Names of devices: every spelling TensorFlow and the array libraries use, read into one form."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any, Self, TypeAlias

from crossdevice.errors import DeviceError, OptionError

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


class Device(str):
    """A place where arrays live. `cpu:k`, a logical device of the host, exists for every k.

    JAX and TensorFlow are exceptions: they have as many as they were configured with.

    A device is the string of its full TensorFlow name, so it goes wherever that goes, `tf.device` included.
    `str()` and formatting give the short one.

    Args:
        type: the type alone ("cuda"), with the other parts beside it, or a whole name ("cuda:1").
        index: the number of the device among those of its type.
        job: the name of the job, as in TensorFlow.
        replica: the number of the job's replica, as in TensorFlow.
        task: the number of the process in its job.

    Raises:
        DeviceError: a device name cannot be read, or there is no such device.

    >>> Device("cuda:1") == Device("cuda", 1) == Device.parse("/device:GPU:1")
    True
    >>> Device("cpu:3") == "/job:localhost/replica:0/task:0/device:CPU:3", f"{Device('cpu:3')}"
    (True, 'cpu:3')
    """

    __slots__ = ("type", "index", "job", "replica", "task")  # noqa: RUF023 - in the order of a name's parts

    type: str
    index: int  # type: ignore[assignment]  # in place of the method of strings
    job: str
    replica: int
    task: int

    def __new__(
        cls,
        type: str,  # noqa: A002 - the name of the field
        index: int = 0,
        job: str = "localhost",
        replica: int = 0,
        task: int = 0,
    ) -> Self:
        """Reads a whole name, or a type and the parts beside it."""
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
            kind, index, job, replica, task = Device.parse(type)._parts
        if not isinstance(job, str) or not job or "/" in job:
            raise DeviceError(f"{job!r} is not the name of a job; expected one such as 'worker'")
        return cls._of(
            kind, _counted("index", index), job, _counted("replica", replica), _counted("task", task)
        )

    @classmethod
    def _of(cls, type: str, index: int, job: str, replica: int, task: int) -> Self:  # noqa: A002
        word = _TENSORFLOW_TYPES.get(type, type.upper())
        device = super().__new__(cls, f"/job:{job}/replica:{replica}/task:{task}/device:{word}:{index}")
        for name, part in zip(Device.__slots__, (type, index, job, replica, task), strict=True):
            object.__setattr__(device, name, part)
        return device

    def __setattr__(self, name: str, value: object) -> None:
        """Refuses changes: devices are parts of keys."""
        raise AttributeError(f"the {name} of a device cannot be set")

    @property
    def _parts(self) -> tuple[str, int, str, int, int]:
        return self.type, self.index, self.job, self.replica, self.task

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles its full name, which is the whole state."""
        return Device.parse, (self.canonical,)

    @staticmethod
    def parse(name: object, default: object = None) -> Device:
        """Parses a device name; missing parts come from `default`, then from `cpu:0` of this process.

        Also takes a Device and the device objects of PyTorch, JAX, CuPy and TensorFlow.

        Args:
            name: a name such as `"cuda:1"` or `"/job:worker/task:1/device:GPU:0"`, a Device, or the device
                object of a library.
            default: the device that parts of the name come from which it lacks.

        Returns:
            The device.

        Raises:
            DeviceError: a device name cannot be read, or there is no such device.
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
        """The full TensorFlow name, as a plain string."""
        return "".join(self)

    @property
    def canonical_without_job_and_task(self) -> str:
        """The TensorFlow name as seen from its own task."""
        return f"/replica:{self.replica}/{self.rpartition('/')[2]}"

    @property
    def is_host(self) -> bool:
        """True if its arrays are in the host's memory."""
        return self.type == "cpu"

    def __str__(self) -> str:
        if (self.job, self.replica, self.task) == ("localhost", 0, 0):
            return f"{self.type}:{self.index}"
        return self.canonical

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    def __repr__(self) -> str:
        if self.type in _KNOWN_TYPES and self.index >= 0:
            return f"Device({str(self)!r})"
        return f"Device.parse({self.canonical!r})"  # only a full name can spell such a device


Track: TypeAlias = "tuple[Device, Device]"
"""Place of work in order: the way from one device to another or, with the same twice, a device."""

_HOST = Device("cpu")


@functools.cache
def host_device(index: int) -> Device:
    """Returns the logical host device `cpu:index`."""
    return Device("cpu", index)


def check_listed(devices: object) -> None:
    """Refuses devices that are not in a list, and an empty list."""
    if isinstance(devices, (str, bytes)) or not isinstance(devices, Sequence):
        raise DeviceError(f"devices must be a list of device names, got {devices!r}")
    if not devices:
        raise OptionError("devices is empty; expected at least one, or None for all that there are")


def device_of(value: object) -> Device | None:
    """Returns the device of an array; None for host memory, which has no device of its own."""
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
    """Returns True for a variable of Keras, which holds an array of TensorFlow, PyTorch or JAX."""
    return type(value).__module__.startswith("keras.") and hasattr(value, "value")


def misplaced(array: object, device: Device) -> str | None:
    """Returns an array's device if it is another; None if it is this one, or the host for any `cpu:k`.

    >>> misplaced([1.0], Device("cuda:1"))
    'the host'
    """
    own = device_of(array)
    if own is None:
        return None if device.is_host else "the host"
    return None if own == device else str(own)


def _from_library(device: Any) -> Device | None:
    """Converts a PyTorch (type, index), JAX (platform, id), TensorFlow (name) or CuPy (id) device."""
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
    """Returns one shared object per device: batches compare devices by the thousand."""
    return Device(kind, index)


@functools.lru_cache(maxsize=4096)
def _parse(name: str, default: Device) -> Device:
    """Parses a name, also of devices that do not exist: TensorFlow reads `/cpu:-1`, and so do we."""
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
    return Device._of(**{**dict(zip(Device.__slots__, default._parts, strict=True)), **found})


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
