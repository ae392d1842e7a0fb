"""A custom training loop in NumPy: linear regression on 3 logical devices."""

import numpy as np

import crossdevice as cd

strategy = cd.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
generator = np.random.default_rng(0)
truth = np.float32([2.0, -3.0, 0.5])
inputs = generator.normal(size=(1000, 3)).astype(np.float32)
targets = inputs @ truth

weights = strategy.create_variable(np.zeros(3, np.float32), name="weights")


def step(x, y, batch_size):
    """Applies the gradient of all replicas' shares to each replica's own copy."""
    context = cd.get_replica_context()
    error = x @ weights.read_value() - y
    gradient = context.all_reduce("sum", x.T @ error / np.float32(batch_size))
    weights.assign_sub(np.float32(0.5) * gradient)
    return error**2


dataset = strategy.experimental_distribute_dataset((inputs, targets), batch_size=128)
for epoch in range(5):
    for x, y in dataset:
        batch_size = sum(len(part) for part in strategy.experimental_local_results(y))
        squares = strategy.run(step, args=(x, y, batch_size))
    loss = strategy.reduce("mean", squares, axis=0)
    print(f"epoch {epoch}: loss of the last batch {float(loss):.2e}")

print(
    "weights on each device:",
    *(copy.value().tolist() for copy in strategy.experimental_local_results(weights)),
)
