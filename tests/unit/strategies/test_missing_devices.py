"""Strategies on devices that a library has not made."""

from __future__ import annotations

import numpy as np
import pytest

import crossdevice as cd
from conformance import array_libraries
from crossdevice.errors import DeviceError

pytestmark = pytest.mark.more("JAX or TensorFlow")

ARRAYS = {"jax": array_libraries.jax_array, "tensorflow": array_libraries.tensorflow_tensor}


@pytest.mark.parametrize("library", ARRAYS)
def test_variables_and_input_are_refused_by_the_name_of_the_device(library):
    pytest.importorskip(library)
    strategy = cd.MirroredStrategy(["cpu:0", "cpu:99"])
    array = ARRAYS[library](np.zeros(4, np.float32), 0)
    with pytest.raises(DeviceError, match=f"cpu:99 does not exist for {library}"):
        strategy.create_variable(array)
    with pytest.raises(DeviceError, match=f"cpu:99 does not exist for {library}"):
        next(iter(strategy.experimental_distribute_dataset(array, batch_size=4)))
