"""Replicas have settings of their caller and a device of their own, and no library is started for it."""

from __future__ import annotations

import numpy as np
import pytest

import crossdevice as cd
from conformance import array_libraries
from crossdevice.backends import registry
from crossdevice.strategies.running.rendezvous import thread_state

pytestmark = pytest.mark.more("JAX and TensorFlow")

DEVICES = (cd.Device("cpu:1"), cd.Device("cpu:0"))


@pytest.fixture
def strategy():
    return cd.MirroredStrategy(DEVICES)


def jax_ones(_=None):
    jax = pytest.importorskip("jax")
    array_libraries.jax_devices()
    return jax.numpy.ones(2, "float32")


def tensorflow_ones(_=None):
    tf = pytest.importorskip("tensorflow")
    array_libraries.tensorflow_devices()
    return tf.ones(2)


@pytest.mark.parametrize("ones", [jax_ones, tensorflow_ones], ids=["jax", "tensorflow"])
def test_what_a_replica_makes_is_on_its_device(strategy, ones):
    made = strategy.run(ones, args=(ones(),))
    assert made.devices == DEVICES
    total = strategy.run(lambda: cd.get_replica_context().all_reduce("sum", ones()))
    assert total.devices == DEVICES
    assert [np.asarray(array).tolist() for array in total.values] == [[2, 2], [2, 2]]
    assert cd.PerReplica([ones()]).devices == (cd.Device("cpu:0"),)  # the caller's is as it was


@pytest.mark.parametrize("ones", [jax_ones, tensorflow_ones], ids=["jax", "tensorflow"])
def test_devices_that_nobody_named_or_some_of_which_are_not_there_are_left_to_the_library(monkeypatch, ones):
    monkeypatch.setattr("crossdevice.strategies.mirrored.default_devices", lambda: DEVICES)
    for strategy in (cd.MirroredStrategy(), cd.MirroredStrategy(["cpu:1", "cpu:99"])):
        assert set(strategy.run(ones, args=(ones(),)).devices) == {cd.Device("cpu:0")}


def test_settings_of_jax_are_those_of_the_caller(strategy):
    jax = pytest.importorskip("jax")
    given = jax_ones()

    def settings(_):
        return f"{jax.numpy.ones(1).dtype}, {jax.config.jax_default_matmul_precision}"

    before = settings(given)
    with jax.enable_x64(not jax.config.jax_enable_x64), jax.default_matmul_precision("highest"):
        assert settings(given) != before
        assert strategy.run(settings, args=(given,)).values == (settings(given),) * 2
    assert strategy.run(settings, args=(given,)).values == (before,) * 2


def test_a_library_is_asked_once_arrays_of_it_were_handed_over(monkeypatch):
    monkeypatch.setattr(registry, "_by_name", {})
    monkeypatch.setattr(registry, "_by_type", {})
    assert thread_state(DEVICES, True, ((np.ones(1), cd.PerReplica([]), "text", None), {})) is None
    assert [backend.name for backend in registry.loaded_backends()] == ["numpy"]
    arguments = (cd.PerReplica([jax_ones(), jax_ones()]),), {"x": {"y": tensorflow_ones()}}
    assert thread_state(DEVICES, True, arguments) is not None
    assert [backend.name for backend in registry.loaded_backends()] == ["numpy", "jax", "tensorflow"]
