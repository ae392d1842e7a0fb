"""Training that loses a process and goes on: all are started again, from the last checkpoint.

    torchrun --nproc-per-node 2 --max-restarts 1 examples/restart_after_failure.py CHECKPOINT [KILL_AT_STEP]

It ends with the bits of a run in which nothing happened.
"""

import hashlib
import os
import signal
import sys

import numpy as np

import crossdevice as cd

NUM_STEPS, STEPS_PER_CHECKPOINT, NUM_EXAMPLES = 50, 10, 512
generator = np.random.default_rng(1)
inputs = generator.normal(size=(NUM_EXAMPLES, 8)).astype(np.float32)
targets = inputs @ generator.normal(size=8).astype(np.float32)

checkpoint = sys.argv[1] if len(sys.argv) > 1 else None
kill_at_step = int(sys.argv[2]) if len(sys.argv) > 2 else None
cluster = cd.cluster_from_env()
strategy = cd.MultiWorkerMirroredStrategy(cluster, devices=["cpu:0", "cpu:1"])

state = {"steps": np.int64(0), "weights": np.zeros(8, np.float32), "velocity": np.zeros(8, np.float32)}
if strategy.is_chief and checkpoint and os.path.exists(checkpoint):
    state = dict(np.load(checkpoint))
# Variables start as those of rank 0 do, so no other process needs the file.
steps, weights, velocity = (strategy.create_variable(state[name], name) for name in state)


def train(x, y):
    error = x @ weights.value() - y
    gradient = cd.get_replica_context().all_reduce("sum", 2 * x.T @ error / np.float32(64))
    velocity.assign(np.float32(0.9) * velocity.value() - np.float32(0.01) * gradient)
    weights.assign_add(velocity.value())


for step in range(int(steps.read_value()), NUM_STEPS):
    if step == kill_at_step and cluster.rank == 1 and cluster.restart == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    rows = np.random.default_rng(step).integers(0, NUM_EXAMPLES, 64)
    for batch in strategy.experimental_distribute_dataset([(inputs[rows], targets[rows])]):
        strategy.run(train, args=batch)
    steps.assign_add(1)
    if strategy.is_chief and checkpoint and (step + 1) % STEPS_PER_CHECKPOINT == 0:
        np.savez(f"{checkpoint}.part.npz", **{v.name: v.read_value() for v in (steps, weights, velocity)})
        os.replace(f"{checkpoint}.part.npz", checkpoint)  # whole or not at all

if strategy.is_chief:
    digest = hashlib.sha256(np.asarray(weights).tobytes()).hexdigest()
    print(f"start {cluster.restart + 1}, {int(steps.read_value())} steps: sha256 {digest[:16]}")
