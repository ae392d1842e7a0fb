"""One replica on one device behaves as the calls of every other strategy do."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

import crossdevice as cd
from crossdevice.errors import DeviceError


def test_it_has_one_replica_on_its_device():
    strategy = cd.OneDeviceStrategy("/cpu:3")
    assert strategy.extended.worker_devices == (cd.Device("cpu", 3),)
    assert strategy.run(lambda x: x + 1, args=(2,)) == 3
    with strategy.scope():
        variable = cd.Variable([1.0])
    assert [str(device) for device in variable.devices] == ["cpu:3"]
    assert strategy.reduce("sum", np.float32([2]), axis=None).tolist() == [2]
    assert repr(pickle.loads(pickle.dumps(strategy))) == "OneDeviceStrategy('cpu:3')"
    with pytest.raises(DeviceError):
        cd.OneDeviceStrategy("nowhere")
