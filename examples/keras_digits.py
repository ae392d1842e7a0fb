"""Keras trains under the real tf.distribute.MirroredStrategy, with algorithms of ours and its own.

TensorFlow's hierarchical copy leaves the last of 3 replicas out of every sum; ours does not.
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
TRAIN_X, TEST_X, TRAIN_Y, TEST_Y = train_test_split(images / 16, labels, test_size=360, random_state=0)
BATCH = 96
DEVICES = ["/cpu:0", "/cpu:1", "/cpu:2"]


def accuracy(strategy: tf.distribute.Strategy) -> float:
    """Trains a small network on logical CPU devices, and counts how many unseen digits it reads."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.layers.Dense(48, "relu"), keras.layers.Dense(10)]
        model = keras.Sequential([keras.Input((64,)), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss, jit_compile=False)
    data = tf.data.Dataset.from_tensor_slices((TRAIN_X, TRAIN_Y))
    data = data.repeat(8).shuffle(len(TRAIN_X), seed=1).batch(BATCH, drop_remainder=True)
    model.fit(data, verbose=0, shuffle=False)
    return float((model(TEST_X).numpy().argmax(1) == TEST_Y).mean())


def one_two_four() -> tf.Tensor:
    context = tf.distribute.get_replica_context()
    return context.all_reduce("sum", tf.gather([1.0, 2.0, 4.0], context.replica_id_in_sync_group))


def main() -> None:
    host = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(host, [tf.config.LogicalDeviceConfiguration()] * len(DEVICES))
    ours = (cd.ReductionToOneDevice(), cd.HierarchicalCopyAllReduce(), cd.RingAllReduce())
    algorithms = {f"crossdevice {type(ops).__name__}": as_tensorflow(ops) for ops in ours}
    algorithms["TensorFlow ReductionToOneDevice"] = tf.distribute.ReductionToOneDevice()
    algorithms["TensorFlow HierarchicalCopyAllReduce"] = tf.distribute.HierarchicalCopyAllReduce()
    print(f"{'3 replicas':37} unseen digits read  1 + 2 + 4")
    for name, ops in algorithms.items():
        strategy = tf.distribute.MirroredStrategy(DEVICES, cross_device_ops=ops)
        total = float(strategy.experimental_local_results(strategy.run(one_two_four))[0])
        print(f"{name:37} {accuracy(strategy):18.1%} {total:10}", flush=True)


if __name__ == "__main__":
    main()
