"""Keras under the real tf.distribute.MirroredStrategy, with our algorithms and its own.

TensorFlow's hierarchical copy leaves the last of 3 replicas out of every sum.
Needs tensorflow and scikit-learn.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import crossdevice as cd
from crossdevice.integrations.tensorflow import as_tensorflow

images, labels = load_digits(return_X_y=True)
split = train_test_split(images / 16, labels, test_size=360, random_state=0)
TRAIN_X, TEST_X, TRAIN_Y, TEST_Y = split
DEVICES = ["/cpu:0", "/cpu:1", "/cpu:2"]


def accuracy(strategy: tf.distribute.Strategy) -> float:
    """Trains a small network; returns the share of unseen digits it reads."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.layers.Dense(48, "relu"), keras.layers.Dense(10)]
        model = keras.Sequential([keras.Input((64,)), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss, jit_compile=False)
    data = tf.data.Dataset.from_tensor_slices((TRAIN_X, TRAIN_Y))
    shuffled = data.repeat(8).shuffle(len(TRAIN_X), seed=1)
    model.fit(shuffled.batch(96, drop_remainder=True), verbose=0, shuffle=False)
    return float((model(TEST_X).numpy().argmax(1) == TEST_Y).mean())


def one_two_four() -> tf.Tensor:
    context = tf.distribute.get_replica_context()
    mine = tf.gather([1.0, 2.0, 4.0], context.replica_id_in_sync_group)
    return context.all_reduce("sum", mine)


host = tf.config.list_physical_devices("CPU")[0]
logical = [tf.config.LogicalDeviceConfiguration()] * len(DEVICES)
tf.config.set_logical_device_configuration(host, logical)
names = "ReductionToOneDevice", "HierarchicalCopyAllReduce"
algorithms = {
    f"crossdevice {name}": as_tensorflow(getattr(cd, name)())
    for name in (*names, "RingAllReduce")
} | {f"TensorFlow {name}": getattr(tf.distribute, name)() for name in names}
print(f"{'3 replicas':37} unseen digits read  1 + 2 + 4")
for name, ops in algorithms.items():
    strategy = tf.distribute.MirroredStrategy(DEVICES, cross_device_ops=ops)
    total = float(strategy.run(one_two_four).values[0])
    print(f"{name:37} {accuracy(strategy):18.1%} {total:10}", flush=True)
