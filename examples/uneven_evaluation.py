"""Evaluation with batches that do not divide: every example counts exactly once."""

import numpy as np

import crossdevice as cd

strategy = cd.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2", "cpu:3"])
generator = np.random.default_rng(0)
scores = generator.normal(size=(1003, 5)).astype(
    np.float32
)  # 1003 = 10 batches of 96 and one of 43
labels = scores.argmax(axis=1)
labels[::4] = (labels[::4] + 1) % 5


def evaluate(batch_scores, batch_labels):
    """Returns 1 or 0 per example of this replica's share, which may be empty."""
    return (batch_scores.argmax(axis=1) == batch_labels).astype(np.float32)


num_right, num_seen, gathered = 0.0, 0, []
for batch in strategy.experimental_distribute_dataset((scores, labels), batch_size=96):
    right = strategy.run(evaluate, args=batch)
    num_right += float(strategy.reduce("sum", right, axis=0))
    everyone = strategy.gather(right, axis=0)
    num_seen += len(everyone)
    gathered.append(everyone)

expected = np.mean(scores.argmax(axis=1) == labels)
found = num_right / num_seen
print(f"{num_seen} examples, accuracy {found:.4f}; on one device {expected:.4f}")
assert num_seen == 1003
assert np.concatenate(gathered).mean() == np.float32(expected)
