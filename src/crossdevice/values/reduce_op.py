"""How values are combined, and how variables are aggregated and kept in step."""

from __future__ import annotations

import enum

from crossdevice.errors import ReduceOpError


class ReduceOp(enum.Enum):
    """How the values of all replicas become one.

    Strings in any case are accepted wherever an operation is:

    >>> ReduceOp("mean") is ReduceOp.MEAN
    True
    """

    SUM = "SUM"
    MEAN = "MEAN"
    MIN = "MIN"
    MAX = "MAX"
    PROD = "PROD"

    @classmethod
    def _missing_(cls, value: object) -> ReduceOp:
        if isinstance(value, str) and value.upper() in cls.__members__:
            return cls[value.upper()]
        known = ", ".join(cls.__members__)
        raise ReduceOpError(f"{value!r} is not a reduce operation; expected one of {known}")

    @classmethod
    def from_variable_aggregation(cls, aggregation: object) -> ReduceOp:
        """The operation for a variable's aggregation; only SUM and MEAN have one."""
        if aggregation is VariableAggregation.SUM:
            return cls.SUM
        if aggregation is VariableAggregation.MEAN:
            return cls.MEAN
        raise ReduceOpError(
            f"{aggregation!r} stands for no reduce operation; expected VariableAggregation.SUM or .MEAN"
        )


class VariableAggregation(enum.Enum):
    """What a variable does with the different values that replicas assign to it.

    >>> from crossdevice import MirroredStrategy, VariableAggregation
    >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
    >>> strategy.create_variable(0.0, aggregation=VariableAggregation.MEAN).aggregation.name
    'MEAN'
    """

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3


class VariableSynchronization(enum.Enum):
    """When the copies of a variable are synchronized.

    >>> from crossdevice import MirroredStrategy, VariableSynchronization
    >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
    >>> type(strategy.create_variable(0.0, synchronization=VariableSynchronization.ON_READ)).__name__
    'SyncOnReadVariable'
    """

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3
