"""Options of a reduction: packing, deadline, engine, precision, lowering."""

from __future__ import annotations

import dataclasses
import enum
import functools
import numbers
import operator
from datetime import timedelta
from typing import Any, Literal

from crossdevice.errors import OptionError

Precision = Literal["fast", "accurate", "exact"]
Lowering = Literal["auto", "off"]

Integers = Literal["mean", "max", "min"]

PRECISIONS: tuple[Precision, ...] = ("fast", "accurate", "exact")
LOWERINGS: tuple[Lowering, ...] = ("auto", "off")
INTEGER_POLICIES: tuple[Integers, ...] = ("mean", "max", "min")


class CommunicationImplementation(enum.Enum):
    """The engine of a collective between processes.

    >>> from crossdevice import CommunicationOptions
    >>> CommunicationOptions(implementation="ring").implementation is CommunicationImplementation.RING
    True
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclasses.dataclass(frozen=True)
class CommunicationOptions:
    """Options of a reduction; all have defaults.

    Args:
        bytes_per_pack: split a batch into packs of about this size; 0 leaves packing to the algorithm.
        timeout_seconds: a deadline, in seconds or as a timedelta; None or 0 waits for ever, between
            processes as long as their group says.
        implementation: the engine between processes, as a member or its name in any case.
        precision: `"fast"` adds in the arrays' own dtype in the order of the plan, `"accurate"` adds wide,
            in replica order, and rounds once, `"exact"` rounds the true sum, whatever the order.
        lowering: `"off"` runs a plan step by step even where all devices share one memory.
        share_results: destinations that share one memory may get the same array, read-only if the library
            supports it, instead of one each.
        integers: what MEAN, MEDIAN and weights make of integers, such as the counters of a model: floats
            (`"mean"`), or the `"max"` or `"min"` of all replicas, which stays an integer.
        widen_inputs: replicas may have different float dtypes, and are widened to the widest of them.
        verify: check collectives between processes from end to end: what is sent, what arrives and what
            comes out, on every rank. A flipped bit on the way or in a result raises CorruptionError, and the
            call can be repeated. They go through shared memory or messages, also from GPUs.

    Raises:
        OptionError: a field is outside its range; the message says what it may be.

    >>> CommunicationOptions(precision="fast").merge(CommunicationOptions(bytes_per_pack=64)).precision
    'fast'
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | timedelta | None = None
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO
    precision: Precision = "accurate"
    lowering: Lowering = "auto"
    share_results: bool = False
    integers: Integers = "mean"
    widen_inputs: bool = False
    verify: bool = False

    def __post_init__(self) -> None:
        given: Any = self.bytes_per_pack
        whole = int(given) if isinstance(given, float) and given.is_integer() else given  # 50e6
        object.__setattr__(self, "bytes_per_pack", whole_number("bytes_per_pack", whole))
        object.__setattr__(self, "timeout_seconds", _checked_seconds(self.timeout_seconds))
        object.__setattr__(self, "implementation", _checked_implementation(self.implementation))
        words = {"precision": PRECISIONS, "lowering": LOWERINGS, "integers": INTEGER_POLICIES}
        for name, known in words.items():
            if getattr(self, name) not in known:
                raise OptionError(f"{name} must be one of {', '.join(known)}; got {getattr(self, name)!r}")
        for name in ("share_results", "widen_inputs", "verify"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"{name} must be True or False, got {getattr(self, name)!r}")
        # Options are part of every cache key; hashing all fields each time would take longer than a look-up.
        object.__setattr__(self, "_hash", hash(dataclasses.astuple(self)))

    def __hash__(self) -> int:
        known: int = self.__dict__["_hash"]
        return known

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles only the fields: hashes of strings differ between processes."""
        return CommunicationOptions, dataclasses.astuple(self)

    def merge(self, other: CommunicationOptions | None) -> CommunicationOptions:
        """Combines two sets of options: fields of `other` that differ from their defaults take precedence.

        Args:
            other: options, or None.

        Returns:
            New options, or these if `other` is None.

        Raises:
            OptionError: the combination is outside its range.
        """
        return self if other is None else _merged(self, as_options(other))


class CollectiveHints(CommunicationOptions):
    """The older name of the options, with the two fields of that time, for the argument `experimental_hints`.

    Args:
        bytes_per_pack: as in CommunicationOptions.
        timeout_seconds: as in CommunicationOptions.

    Raises:
        OptionError: a field is outside its range.

    >>> CollectiveHints(bytes_per_pack=1024).bytes_per_pack
    1024
    """

    def __init__(self, bytes_per_pack: int = 0, timeout_seconds: float | timedelta | None = None) -> None:
        super().__init__(bytes_per_pack, timeout_seconds)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CommunicationOptions):
            return NotImplemented
        return dataclasses.astuple(self) == dataclasses.astuple(other)

    __hash__ = CommunicationOptions.__hash__

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the two fields."""
        return CollectiveHints, (self.bytes_per_pack, self.timeout_seconds)


def as_options(options: object) -> CommunicationOptions:
    """Returns the options, converted from TensorFlow's; defaults for None; refuses anything else."""
    if options is None:
        return DEFAULT_OPTIONS
    if isinstance(options, CommunicationOptions):
        return options
    if type(options).__module__ == "tensorflow.python.distribute.collective_util":
        given: Any = options
        return CommunicationOptions(given.bytes_per_pack, given.timeout_seconds, given.implementation.name)
    raise OptionError(f"options must be a CommunicationOptions or None, got {type(options).__name__}")


@functools.lru_cache(maxsize=256)  # every call between processes merges, most often the same two
def _merged(options: CommunicationOptions, other: CommunicationOptions) -> CommunicationOptions:
    fields = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    return CommunicationOptions(**{**fields, **differences(other)})


def differences(options: CommunicationOptions) -> dict[str, Any]:
    """Returns the options that are not the defaults."""
    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    return {name: value for name, value in given.items() if value != getattr(DEFAULT_OPTIONS, name)}


def either(options: Any, experimental_hints: Any) -> Any:
    """Returns the options of a call that takes them under their older name too."""
    if options is not None and experimental_hints is not None:
        raise OptionError("options and experimental_hints, its older name, were both given; give options")
    return experimental_hints if options is None else options


def whole_number(name: str, given: object, least: int = 0) -> int:
    """Returns a count of any integer type; OptionError with its name for anything else.

    >>> whole_number("num_packs", 3)
    3
    """
    try:
        number = operator.index(given)  # type: ignore[arg-type] # which is what is asked here
    except TypeError:
        number = None
    if number is None or isinstance(given, bool):
        raise OptionError(f"{name} must be a whole number, got {given!r}")
    if number < least:
        raise OptionError(f"{name} must be {least} or more, got {given}")
    return number


def _checked_seconds(given: object) -> float | None:
    if given is None:
        return None
    if isinstance(given, timedelta):
        given = given.total_seconds()
    if isinstance(given, bool) or not isinstance(given, numbers.Real) or not float(given) >= 0:
        raise OptionError(f"timeout_seconds must be None, seconds (0 or more) or a timedelta; got {given!r}")
    return float(given) or None


def _checked_implementation(given: object) -> CommunicationImplementation:
    if isinstance(given, CommunicationImplementation):
        return given
    if isinstance(given, str) and given.upper() in CommunicationImplementation.__members__:
        return CommunicationImplementation[given.upper()]
    known = ", ".join(CommunicationImplementation.__members__)
    raise OptionError(f"implementation must be one of {known}; got {given!r}")


DEFAULT_OPTIONS = CommunicationOptions()
