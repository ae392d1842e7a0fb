"""Every exception of crossdevice, as one tree.

Each is ours (`except CrossDeviceError`) and a built-in at once (`except ValueError`), so code
written against TensorFlow's documented errors keeps working. All of them are raised before any
array is written, except for failures of what runs (`ReplicaError`, `DeadlineError`, `EngineError`,
`ProcessGroupError`), disks that fill up (`FileError`), and arrays on a GPU that have moved (`BoundError`).
"""


class CrossDeviceError(Exception):
    """The root: catches everything that crossdevice itself refuses."""


class DeviceError(CrossDeviceError, ValueError):
    """A device name that cannot be read, or a device that does not exist here."""


class DestinationError(CrossDeviceError, ValueError):
    """Destinations that are not a device string, an array, a variable or a distributed value."""


class ReduceOpError(CrossDeviceError, ValueError):
    """An operation that is unknown, or not defined for these values."""


class OptionError(CrossDeviceError, ValueError):
    """An option or constructor argument outside its range."""


class ConversionError(CrossDeviceError, ValueError):
    """A value that cannot be read as arrays, or pairs that are not (value, destinations)."""


class DtypeError(CrossDeviceError, TypeError):
    """A dtype on which the operation has no meaning."""


class MismatchError(CrossDeviceError, ValueError):
    """Replicas that should agree and do not; the message names the odd one out."""

    is_on_all_ranks: bool = False
    """True if every process of a group has raised it, so that none waits for this one."""


class ShapeMismatchError(MismatchError):
    """Replicas with different shapes."""


class DtypeMismatchError(MismatchError):
    """Replicas with different dtypes."""


class StructureMismatchError(MismatchError):
    """Replicas with different nested structures, or different numbers of components."""


class DeviceMismatchError(MismatchError):
    """An array or a variable that is not on its replica's device."""


class LibraryMismatchError(MismatchError):
    """Arrays of several libraries in one value."""


class BitsMismatchError(MismatchError):
    """Replicas or ranks that should hold the same bits and do not."""


class CorruptionError(BitsMismatchError):
    """Bits that changed on their way, or in a result; the message says where, and on which ranks."""


class OutError(CrossDeviceError, ValueError):
    """`out=` that does not fit the results: structure, shape, dtype, device or memory."""


class BoundError(CrossDeviceError, RuntimeError):
    """A bound reduction with arrays that were moved or made read-only after it was bound."""


class ContextError(CrossDeviceError, RuntimeError):
    """A call in the wrong context, such as a reduction inside a replica function."""


class ReplicaError(CrossDeviceError, RuntimeError):
    """Replicas that do not meet: some wait at a call that others will never make."""


class DeadlineError(CrossDeviceError, TimeoutError):
    """A deadline that has passed; the message names the replicas that were missing."""


class ProcessGroupError(CrossDeviceError, ConnectionError):
    """A group of processes that lost a rank, or that an earlier error has left unusable."""


class EngineError(CrossDeviceError, RuntimeError):
    """A collective of a library such as NCCL that failed; the message names its devices."""


class FileError(CrossDeviceError, OSError):
    """A file that cannot be read or written as its format; the message names it."""


class TopologyError(CrossDeviceError, ValueError):
    """A topology that cannot be read, or lacks requested parts."""


class PlanError(CrossDeviceError, AssertionError):
    """A plan that is inconsistent: the algorithm that emitted it is wrong."""
