import numpy as np
import pytest

from crossdevice import AllReduceCrossDeviceOps
from crossdevice.algorithms.registry import ALGORITHMS
from crossdevice.errors import OptionError
from crossdevice.plans.packing import Packing
from crossdevice.values.device import host_device
from unit.algorithms.planning import planned


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_registered_algorithm_can_be_named(name):
    devices = [host_device(i) for i in range(5)]
    by_name = planned(AllReduceCrossDeviceOps(name), devices, devices)
    assert by_name == planned(ALGORITHMS.load(name)(), devices, devices)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(
        OptionError, match=r"'tpu' is not an all-reduce algorithm; expected one of .*hierarchical_copy"
    ):
        AllReduceCrossDeviceOps("tpu")


def test_the_defaults_are_tensorflows():
    ops = AllReduceCrossDeviceOps()
    assert ops.all_reduce_alg == "nccl"
    assert ops.packing == Packing(num_packs=1, small_max_bytes=0, small_max_group=10)


@pytest.mark.parametrize("name", [np.ones(2), ["ring"], {}, None], ids=type)
def test_a_name_that_is_no_string_is_refused(name):
    with pytest.raises(OptionError, match="is not an all-reduce algorithm; expected one of"):
        AllReduceCrossDeviceOps(name)
