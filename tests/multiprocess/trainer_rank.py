"""A rank of a Trainer of transformers, on the process group that it finds."""

import hashlib
import os
import tempfile

import torchvision_operators  # noqa: F401 (importing it declares them)

# isort: split
import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from multiprocess.launching import report

WORDS, LENGTH, EXAMPLES = 32, 8, 33


def examples():
    """Sequences that count upwards, each from a start of its own."""
    for start in range(EXAMPLES):
        sequence = (start + torch.arange(LENGTH)) % WORDS
        yield {"input_ids": sequence, "labels": sequence}


def main(rank):
    torch.set_num_threads(1)
    dist.init_process_group("crossdevice")
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": WORDS, "n_positions": LENGTH}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=1))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=2,
            num_train_epochs=3 * int(os.environ["WORLD_SIZE"]),  # as many steps on any number of ranks
            learning_rate=1e-2,
            use_cpu=True,
            report_to=[],
            logging_steps=4,
            save_steps=8,
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=list(examples()))
        trainer.train()
        dist.barrier()  # before rank 0 removes the folder of its checkpoints
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    trained = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    report(
        rank,
        {
            "backend": dist.get_backend(),
            "losses": losses,
            "parallel": type(trainer.model_wrapped).__name__,
            "digest": hashlib.sha256(trained.numpy().tobytes()).hexdigest(),
        },
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(os.environ["RANK"]))
