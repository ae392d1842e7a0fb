"""A small transformer that trains to the same bits on any number of workers.

    torchrun --nproc-per-node 3 examples/any_number_of_workers.py [CHECKPOINT [STOP_AT_STEP]]

A step has 12 micro-batches, and each worker runs its share of them. With a checkpoint, a run that was stopped
goes on, on as many workers as there are then. The digest is that of all parameters and of Adam's state.
"""

import os
import sys

import torch
import torch.distributed as dist

import crossdevice as cd
from crossdevice.integrations.torch import ExactGradients, clip_grad_norm_, seeded_micro_batch

checkpoint = sys.argv[1] if len(sys.argv) > 1 else ""
num_steps = int(sys.argv[2]) if len(sys.argv) > 2 else 50
torch.set_num_threads(1)  # bits of matrix products depend on the number of threads
if "RANK" in os.environ:  # set by torchrun; without it this is the only worker
    dist.init_process_group("gloo")
rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

torch.manual_seed(0)
words, mask = torch.nn.Embedding(32, 32), torch.nn.Transformer.generate_square_subsequent_mask(15)
layer, out = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), torch.nn.Linear(32, 32)
model = torch.nn.ModuleList([words, layer, out])
texts = (torch.randint(32, (480, 1)) + torch.arange(16) * torch.randint(1, 4, (480, 1))) % 32
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
first_step = 0
if os.path.exists(checkpoint):
    saved = torch.load(checkpoint)
    first_step = saved["step"]
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])

batches = cd.MicroBatches(len(texts), size=4, per_step=12, rank=rank, num_workers=size)
exact = ExactGradients(model.named_parameters())
for step in range(first_step, num_steps):
    for number in batches.of_step(step):
        text = texts[batches.indices(step, number)]
        with seeded_micro_batch(0, step, number):  # for dropout
            scores = out(layer(words(text[:, :-1]), src_mask=mask, is_causal=True))
            torch.nn.functional.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten()).backward()
        exact.add(weight=len(text))
    exact.finish()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()

if rank == 0:
    everything = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if checkpoint:
        torch.save({"step": num_steps, **everything}, checkpoint)
    print(f"{num_steps} steps: fingerprint {cd.fingerprint(everything).digest[:16]}")
if dist.is_initialized():
    dist.destroy_process_group()
