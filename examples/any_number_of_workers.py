"""A small transformer that trains to the same bits on any number of workers.

    torchrun --nproc-per-node 3 examples/any_number_of_workers.py [FILE [STEPS]]

A step has 12 micro-batches, and each worker runs its share of them. With a checkpoint
FILE, a run that stopped after STEPS goes on, on as many workers as there are then.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import crossdevice as cd
from crossdevice.integrations import torch as reproducible

checkpoint = sys.argv[1] if len(sys.argv) > 1 else ""
num_steps = int(sys.argv[2]) if len(sys.argv) > 2 else 50
torch.set_num_threads(1)  # bits of matrix products depend on the number of threads
launch = cd.cluster_from_env()
if launch.size > 1:  # started by torchrun
    dist.init_process_group("gloo")
rank, size = launch.rank, launch.size

torch.manual_seed(0)
words, mask = nn.Embedding(32, 32), nn.Transformer.generate_square_subsequent_mask(15)
layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
model = nn.ModuleList([words, layer, out := nn.Linear(32, 32)])
starts, strides = torch.randint(32, (480, 1)), torch.randint(1, 4, (480, 1))
texts = (starts + torch.arange(16) * strides) % 32
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
first_step = 0
if os.path.exists(checkpoint):
    saved = torch.load(checkpoint)
    first_step = saved["step"]
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
batches = cd.MicroBatches(len(texts), size=4, per_step=12, rank=rank, num_workers=size)
exact = reproducible.ExactGradients(model.named_parameters())
for step in range(first_step, num_steps):
    for number in batches.of_step(step):
        text = texts[batches.indices(step, number)]
        with reproducible.seeded_micro_batch(0, step, number):  # for dropout
            scores = out(layer(words(text[:, :-1]), src_mask=mask, is_causal=True))
            wanted = text[:, 1:].flatten()
            nn.functional.cross_entropy(scores.flatten(0, 1), wanted).backward()
        exact.add(weight=len(text))
    exact.finish()
    reproducible.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()

if rank == 0:
    everything = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if checkpoint:
        torch.save({"step": num_steps, **everything}, checkpoint)
    print(f"{num_steps} steps: fingerprint {cd.fingerprint(everything).digest[:16]}")
