"""A tf.distribute loop, ported: the TensorFlow lines stand above ours.

The values are NumPy arrays here; PyTorch tensors work in the same lines.
"""

import numpy as np

# import tensorflow as tf
import crossdevice as cd

# strategy = tf.distribute.MirroredStrategy(
#     ["cpu:0", "cpu:1", "cpu:2"],
#     cross_device_ops=tf.distribute.HierarchicalCopyAllReduce(num_packs=2),
# )
strategy = cd.MirroredStrategy(
    ["cpu:0", "cpu:1", "cpu:2"],
    cross_device_ops=cd.HierarchicalCopyAllReduce(num_packs=2),
)

# with strategy.scope():
#     weight = tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN)
with strategy.scope():
    weight = cd.Variable(0.0, aggregation=cd.VariableAggregation.MEAN)

# batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(30)
# dataset = strategy.experimental_distribute_dataset(batches)
x = np.linspace(-1, 1, 90, dtype=np.float32)
dataset = strategy.experimental_distribute_dataset((x, 3 * x), batch_size=30)


# @tf.function
def replica_step(inputs, targets):
    """The body is the same but for the array library."""
    error = weight.read_value() * inputs - targets
    # gradient = tf.reduce_mean(error * inputs)
    gradient = np.mean(error * inputs)
    # gradient = tf.distribute.get_replica_context().all_reduce("MEAN", gradient)
    gradient = cd.get_replica_context().all_reduce("MEAN", gradient)
    weight.assign_sub(np.float32(2.0) * gradient)  # the mean of equal updates
    # return tf.reduce_mean(error ** 2)
    return np.mean(error**2)


for _ in range(20):
    for inputs, targets in dataset:
        losses = strategy.run(replica_step, args=(inputs, targets))
# print(strategy.reduce(tf.distribute.ReduceOp.MEAN, losses, axis=None))
print(f"loss {float(strategy.reduce(cd.ReduceOp.MEAN, losses, axis=None)):.1e}")
print(f"weight {float(weight.read_value()):.4f} (the truth is 3)")
