"""A worker that trains a small transformer, once for each cell of a matrix, and reports its digests."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from multiprocess.launching import report

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from small_transformer import train


def main(ways, bucket_sizes, folder, steps, kill_at):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for way in ways.split(","):
        for bucket_bytes in map(int, bucket_sizes.split(",")):
            checkpoint = Path(folder) / f"{bucket_bytes}.pt" if folder else None
            training = train(
                way, bucket_bytes, checkpoint, steps=int(steps), kill_at=int(kill_at) if kill_at else None
            )
            found[f"{way} {bucket_bytes}"] = training.digest
    report(int(os.environ["RANK"]), found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
