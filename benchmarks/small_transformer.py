"""Training of a small transformer by several workers: 12 micro-batches of a step, whoever runs them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

import crossdevice as cd
from crossdevice.integrations.torch import ExactGradients, clip_grad_norm_, seeded_micro_batch

NUM_TEXTS, NUM_WORDS, LENGTH, WIDTH = 480, 32, 16, 32
PER_STEP, SIZE = 12, 4
NUM_STEPS = 50
LEARNING_RATE = 3e-3
STEPS_PER_CHECKPOINT = 10

Way = Literal["exact", "exact_ddp", "ddp"]
"""How gradients are added: by `ExactGradients`, alone or in a DistributedDataParallel that leaves them to it,
or by DistributedDataParallel itself."""


class Training(NamedTuple):
    """What a training came to on this worker."""

    digest: str
    """SHA-256 of all parameters and of Adam's state."""
    first_gradient: torch.Tensor | None
    """All elements of the first step's gradient; None if the training was resumed after it."""
    first_parameters: torch.Tensor | None
    """All parameters after the first step."""
    parameters: torch.Tensor


class Transformer(torch.nn.Module):
    """Predicts each word of a text from those before it."""

    def __init__(self, width: int = WIDTH, num_words: int = NUM_WORDS, length: int = LENGTH) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(num_words, width)
        self.places = torch.nn.Embedding(length, width)
        self.layer = torch.nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
        self.out = torch.nn.Linear(width, num_words)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        hidden = self.layer(self.words(text) + self.places.weight, src_mask=mask, is_causal=True)
        return torch.nn.functional.cross_entropy(
            self.out(hidden)[:, :-1].flatten(0, 1), text[:, 1:].flatten()
        )


def texts() -> torch.Tensor:
    """Texts in which each word follows from the two before it."""
    generator = torch.Generator().manual_seed(1)
    first = torch.randint(NUM_WORDS, (NUM_TEXTS, 1), generator=generator)
    apart = torch.randint(1, 4, (NUM_TEXTS, 1), generator=generator)
    return (first + apart * torch.arange(LENGTH)) % NUM_WORDS


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    """All elements, one after the other."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def digest_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """SHA-256 of all parameters and of all that the optimizer remembers."""
    hashed = hashlib.sha256()
    of_optimizer = optimizer.state_dict()["state"]
    for number, parameter in enumerate(model.parameters()):
        remembered = [of_optimizer[number][name] for name in sorted(of_optimizer[number])]
        for tensor in (parameter.detach(), *remembered):
            hashed.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def train(
    way: Way,
    bucket_bytes: int,
    checkpoint: Path | None = None,
    *,
    steps: int = NUM_STEPS,
    kill_at: int | None = None,
) -> Training:
    """Trains as one worker of torch.distributed's default group, from the checkpoint on if there is one.

    Args:
        kill_at: the step in which the last worker is killed, after it has added its first micro-batch.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data, model = texts(), Transformer()
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    state: dict[str, Any] = {"step": 0}
    if checkpoint is not None and checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    called: torch.nn.Module = model
    if way != "exact":
        called = DistributedDataParallel(model, bucket_cap_mb=bucket_bytes / 2**20)
    if way == "exact_ddp":
        called.register_comm_hook(None, noop_hook)
    exact = None if way == "ddp" else ExactGradients(model.named_parameters(), bucket_bytes=bucket_bytes)
    batches = cd.MicroBatches(NUM_TEXTS, SIZE, PER_STEP, rank=rank, num_workers=size)
    first_gradient = first_parameters = None
    for step in range(state["step"], steps):
        mine = batches.of_step(step)
        for number in mine:
            is_quiet = way == "ddp" and number != mine[-1]
            with (
                seeded_micro_batch(0, step, number),
                called.no_sync() if is_quiet else contextlib.nullcontext(),
            ):
                loss = called(data[batches.indices(step, number)])
                (loss if exact else loss / len(mine)).backward()
            if exact:
                exact.add(SIZE)
            if step == kill_at and rank == size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
        if exact:
            exact.finish()
            clip_grad_norm_(model.parameters(), 1.0)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if step == 0:
            first_gradient = flat([each.grad for each in model.parameters() if each.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            first_parameters = flat(list(model.parameters()))
        if checkpoint is not None and rank == 0 and (step + 1) % STEPS_PER_CHECKPOINT == 0:
            part = checkpoint.with_suffix(".part")
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({"step": step + 1, **saved}, part)
            part.replace(checkpoint)
    return Training(
        digest_of(model, optimizer), first_gradient, first_parameters, flat(list(model.parameters()))
    )
