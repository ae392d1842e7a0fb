from datetime import timedelta

import numpy as np
import pytest

from crossdevice import CommunicationImplementation, CommunicationOptions, ReduceOp, VariableAggregation
from crossdevice.errors import OptionError, ReduceOpError
from crossdevice.values.options import as_options


def test_options_have_tensorflows_defaults_and_compare_by_value():
    options = CommunicationOptions()
    assert (options.bytes_per_pack, options.timeout_seconds) == (0, None)
    assert options.implementation is CommunicationImplementation.AUTO
    assert (options.precision, options.lowering) == ("accurate", "auto")
    assert options == CommunicationOptions()
    assert isinstance(options, CommunicationOptions)


def test_fields_are_read_generously():
    options = CommunicationOptions(
        bytes_per_pack=8.0, timeout_seconds=timedelta(minutes=1), implementation="nccl"
    )
    assert options == CommunicationOptions(8, 60.0, CommunicationImplementation.NCCL)


@pytest.mark.parametrize(
    "wrong",
    [
        {"bytes_per_pack": -1},
        {"bytes_per_pack": "many"},
        {"bytes_per_pack": 1.7},
        {"bytes_per_pack": float("inf")},
        {"bytes_per_pack": True},
        {"timeout_seconds": -5},
        {"timeout_seconds": "soon"},
        {"implementation": "pigeon"},
        {"implementation": 3},
        {"precision": "good"},
        {"lowering": "on"},
        {"share_results": "yes"},
        {"share_results": 1},
        {"timeout_seconds": True},
        {"timeout_seconds": float("nan")},
    ],
)
def test_fields_out_of_range_are_refused_by_name(wrong):
    (name,) = wrong
    with pytest.raises(OptionError, match=name):
        CommunicationOptions(**wrong)


def test_numbers_may_be_those_of_numpy():
    options = CommunicationOptions(bytes_per_pack=np.int64(8), timeout_seconds=np.float32(1.5))
    assert options == CommunicationOptions(8, 1.5)
    assert (type(options.bytes_per_pack), type(options.timeout_seconds)) == (int, float)
    assert CommunicationOptions(timeout_seconds=np.int32(3)) == CommunicationOptions(timeout_seconds=3)


def test_merge_takes_what_differs_from_the_defaults():
    mine = CommunicationOptions(bytes_per_pack=10, timeout_seconds=5, precision="fast")
    merged = mine.merge(CommunicationOptions(timeout_seconds=2, implementation="RING"))
    assert merged == CommunicationOptions(10, 2, "RING", "fast")
    assert mine.merge(None) == mine
    assert mine.merge(merged) is mine.merge(merged)  # no work for the same two


def test_zero_seconds_are_no_deadline():
    for zero in (0, 0.0, timedelta(0)):
        assert CommunicationOptions(timeout_seconds=zero) == CommunicationOptions()


def test_anything_but_options_is_refused():
    assert as_options(None) == CommunicationOptions()
    with pytest.raises(OptionError, match="got str"):
        as_options("fast")


def test_operations_are_read_in_any_case():
    assert ReduceOp("sum") is ReduceOp.SUM
    assert ReduceOp("Prod") is ReduceOp.PROD
    for wrong in ("mode", None, 1, VariableAggregation.SUM):
        with pytest.raises(ReduceOpError, match="SUM, MEAN, MIN, MAX, PROD"):
            ReduceOp(wrong)


def test_only_sum_and_mean_aggregations_are_operations():
    assert ReduceOp.from_variable_aggregation(VariableAggregation.SUM) is ReduceOp.SUM
    assert ReduceOp.from_variable_aggregation(VariableAggregation.MEAN) is ReduceOp.MEAN
    for wrong in (VariableAggregation.NONE, VariableAggregation.ONLY_FIRST_REPLICA, "SUM", None):
        with pytest.raises(ReduceOpError):
            ReduceOp.from_variable_aggregation(wrong)
