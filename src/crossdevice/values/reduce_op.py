"""Reduction operations, and the aggregation and synchronization of variables."""

from __future__ import annotations

import enum
import re
import sys
from typing import Any, Self, TypeVar

from crossdevice.errors import OptionError, ReduceOpError
from crossdevice.values.quantities import there_are


class _LookUp(enum.EnumMeta):
    """A look-up by name that does not compare names with arrays, which answer element by element."""

    def __call__(cls, value: Any, *more: Any, **named: Any) -> Any:
        if hasattr(value, "shape") or type(value).__hash__ is None:
            return cls._missing_(value)  # type: ignore[attr-defined]  # of the one class that is made by this
        return super().__call__(value, *more, **named)


class ReduceOp(enum.Enum, metaclass=_LookUp):
    """The operation that makes one value of all replicas' values.

    Strings in any case are accepted wherever an operation is, as are the operations of PyTorch,
    TensorFlow and MPI:

    >>> ReduceOp("mean"), ReduceOp("avg")
    (<ReduceOp.MEAN: 'MEAN'>, <ReduceOp.MEAN: 'MEAN'>)

    MEDIAN, and the trimmed means that `trimmed_mean` makes, sort the values of all replicas, element by
    element, and take the mean of the middle.
    """

    SUM = "SUM"
    MEAN = "MEAN"
    MIN = "MIN"
    MAX = "MAX"
    PROD = "PROD"
    MEDIAN = "MEDIAN"

    @classmethod
    def _missing_(cls, value: object) -> ReduceOp:
        name = _name_among(value, "ReduceOp", "RedOpType", "Op").upper()
        name = _SYNONYMS.get(name, name)
        if name in cls.__members__:
            return cls[name]
        trimmed = _TRIMMED_MEAN.fullmatch(name)
        if trimmed is not None:
            return cls._trimmed_mean(int(trimmed[1]))
        known = ", ".join((*cls.__members__, "TRIMMED_MEAN(k)"))
        found = f"an array of shape {value.shape}" if hasattr(value, "shape") else repr(value)
        raise ReduceOpError(f"{found} is not a reduce operation; expected one of {known}")

    @classmethod
    def _trimmed_mean(cls, k: int) -> ReduceOp:
        """Returns an unlisted member, one for each k, made like those of a `Flag`."""
        member = object.__new__(cls)
        member._name_ = member._value_ = f"TRIMMED_MEAN({k})"
        made: ReduceOp = cls._value2member_map_.setdefault(member._value_, member)  # type: ignore[assignment]
        return made

    @property
    def is_order_statistic(self) -> bool:
        """True if values are sorted and the middle ones averaged."""
        return self is ReduceOp.MEDIAN or self.name.startswith("TRIMMED_MEAN")

    def sorted_range(self, num_replicas: int) -> tuple[int, int]:
        """Returns the sorted values that count: the first position, and the one after the last."""
        if self is ReduceOp.MEDIAN:
            return (num_replicas - 1) // 2, num_replicas // 2 + 1
        trimmed = _TRIMMED_MEAN.fullmatch(self.name)
        assert trimmed is not None
        k = int(trimmed[1])
        if 2 * k >= num_replicas:
            raise ReduceOpError(
                f"{self.name} leaves out the {k} least and the {k} greatest values, and "
                f"{there_are(num_replicas, 'replica')}; expected at least {2 * k + 1}"
            )
        return k, num_replicas - k

    @classmethod
    def from_variable_aggregation(cls, aggregation: object) -> ReduceOp:
        """Returns the operation for a variable's aggregation, ours or TensorFlow's.

        Args:
            aggregation: SUM or MEAN.

        Returns:
            The operation.

        Raises:
            ReduceOpError: the aggregation is another one.
        """
        if isinstance(aggregation, VariableAggregation):
            name = aggregation.name
        elif not isinstance(aggregation, str):
            name = _name_among(aggregation, "VariableAggregation", "VariableAggregationV2")
        else:
            name = ""
        if name in ("SUM", "MEAN"):
            return cls[name]
        raise ReduceOpError(
            f"{aggregation!r} stands for no reduce operation; expected VariableAggregation.SUM or .MEAN"
        )


_SYNONYMS = {"AVG": "MEAN", "AVERAGE": "MEAN", "PRODUCT": "PROD", "MINIMUM": "MIN", "MAXIMUM": "MAX"}
"""Names that other libraries have for the same."""


_TRIMMED_MEAN = re.compile(r"TRIMMED_MEAN\((\d{1,9})\)")


def trimmed_mean(k: int) -> ReduceOp:
    """Makes an operation: the mean of all but the k least and the k greatest values of each element.

    It may be given as `"trimmed_mean(2)"` too.

    Args:
        k: how many values are dropped on each side.

    Returns:
        A ReduceOp.

    Raises:
        ReduceOpError: `k` is no whole number of 0 or more; in the reduction, if it leaves no value.

    >>> import crossdevice as cd
    >>> float(cd.reduce([1.0, 2.0, 3.0, 1e9], cd.trimmed_mean(1)))
    2.5
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 0:
        raise ReduceOpError(f"trimmed_mean takes a whole number, 0 or more; got {k!r}")
    return ReduceOp(f"TRIMMED_MEAN({k})")


class _VariableSetting(enum.Enum):
    """A setting of variables, by name or as TensorFlow's member of that name."""

    @classmethod
    def _missing_(cls, value: object) -> Self:
        name = _name_among(value, cls.__name__, f"{cls.__name__}V2").upper()
        if name in cls.__members__:
            return cls[name]
        noun = {"VariableAggregation": "an aggregation"}.get(cls.__name__, "a synchronization")
        known = ", ".join(cls.__members__)
        raise OptionError(f"{value!r} is not {noun} of variables; expected one of {known}")


class VariableAggregation(_VariableSetting):
    """Aggregation of the different values that replicas assign to a variable.

    >>> VariableAggregation("only_first_replica").name
    'ONLY_FIRST_REPLICA'
    """

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3


class VariableSynchronization(_VariableSetting):
    """Time at which the copies of a variable are synchronized.

    >>> VariableSynchronization("on_read").name
    'ON_READ'
    """

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


_Setting = TypeVar("_Setting", bound=_VariableSetting)


def as_setting(kind: type[_Setting], value: object) -> _Setting:
    """Returns a member, given as such or by name; refuses numbers, which enums would take."""
    member: _Setting = value if isinstance(value, kind) else kind._missing_(value)
    return member


def as_aggregation(value: object) -> VariableAggregation:
    """Returns an aggregation, given as such or by name; None is TensorFlow's other spelling of NONE."""
    return VariableAggregation.NONE if value is None else as_setting(VariableAggregation, value)


def _name_among(value: object, *kinds: str) -> str:
    """Returns the name of a string, or of a member of another library's type; empty for all else."""
    if isinstance(value, str):
        return value
    kind = type(value)
    library = kind.__module__.partition(".")[0]
    if library not in ("torch", "tensorflow", "mpi4py") or kind.__name__ not in kinds:
        return ""
    if kind.__name__ == "Op":  # which has no name of its own
        module = sys.modules[kind.__module__]
        return next((name for name in ReduceOp.__members__ if getattr(module, name, None) == value), "")
    return str(getattr(value, "name", ""))
