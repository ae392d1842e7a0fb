"""Training that loses a process and goes on from the last checkpoint.

    torchrun --nproc-per-node 2 --max-restarts 1 examples/restart_after_failure.py FILE

A number after FILE is the step at which rank 1 kills itself. All processes are then
started again, and the result has the bits of an undisturbed run.
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

zeros = np.zeros(8, np.float32)
state = {"steps": np.int64(0), "weights": zeros, "velocity": zeros}
if strategy.is_chief and checkpoint and os.path.exists(checkpoint):
    state = dict(np.load(checkpoint))
# Variables start as those of rank 0 do, so no other process needs the file.
variables = {name: strategy.create_variable(state[name], name) for name in state}
steps, weights, velocity = variables.values()


def train(x, y):
    error = x @ weights.value() - y
    gradient = 2 * x.T @ error / np.float32(64)
    gradient = cd.get_replica_context().all_reduce("sum", gradient)
    velocity.assign(np.float32(0.9) * velocity.value() - np.float32(0.01) * gradient)
    weights.assign_add(velocity.value())


for step in range(int(steps.read_value()), NUM_STEPS):
    if step == kill_at_step and cluster.rank == 1 and cluster.restart == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    rows = np.random.default_rng(step).integers(0, NUM_EXAMPLES, 64)
    (batch,) = strategy.experimental_distribute_dataset([(inputs[rows], targets[rows])])
    strategy.run(train, args=batch)
    steps.assign_add(1)
    if strategy.is_chief and checkpoint and (step + 1) % STEPS_PER_CHECKPOINT == 0:
        now = {name: variable.read_value() for name, variable in variables.items()}
        np.savez(f"{checkpoint}.part.npz", **now)
        os.replace(f"{checkpoint}.part.npz", checkpoint)  # whole or not at all

if strategy.is_chief:
    digest = hashlib.sha256(np.asarray(weights).tobytes()).hexdigest()
    print(f"start {cluster.restart + 1}, {NUM_STEPS} steps: sha256 {digest[:16]}")
