"""One of several processes on a GPU, of which one is killed in each round: `killed_peer_rank.py PORT...`."""

import os
import sys
import time
from pathlib import Path

import torch

import crossdevice as cd
from crossdevice.process_groups.engines.torch_engine import form_group
from multiprocess.launching import FOLDER, report

SIZES = (1, 1 << 14, 1 << 22, 1 << 25)


def reduce_until_killed(group, alive, me, ready):
    """Reduces over and over; what the error says that ends it, and whether the GPU is still usable."""
    ops = cd.CollectiveAllReduce(group=group)
    pairs = [
        (torch.full((size,), float(me + 1), device="cuda"), torch.empty(size, device="cuda"))
        for size in SIZES
    ]
    rights = torch.tensor(alive, device="cuda")[:, None] + 1
    expected, calls = float(sum(alive) + len(alive)), 0
    while True:
        for tensor, out in pairs:
            out.fill_(-1.0)
            started = time.monotonic()
            try:
                ops.reduce("sum", tensor, "cuda:0", out=out)
                gathered = ops.all_gather(pairs[1][0]).reshape(len(alive), -1)
            except Exception as error:
                return {
                    "error": type(error).__name__,
                    "text": str(error),
                    "seconds": time.monotonic() - started,
                    "calls": calls,
                    "is_input_whole": all(bool((each == me + 1).all()) for each, _ in pairs),
                }
            if not bool((out == expected).all()):
                return {"error": "a number is wrong", "text": str(out.unique())}
            if not bool((gathered == rights).all()):
                return {"error": "a gathered number is wrong", "text": str(gathered.unique())}
            calls += 1
        if calls == len(SIZES):
            part = ready.with_name(f"part of {ready.name}")
            part.write_text(str(os.getpid()))
            part.rename(ready)


def main(*ports):
    me, size, folder = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(os.environ[FOLDER])
    torch.cuda.set_device(0)
    alive, facts = list(range(size)), []
    for number, port in enumerate(ports):
        with form_group(alive.index(me), len(alive), "127.0.0.1", int(port), timeout_seconds=60.0) as group:
            facts.append(reduce_until_killed(group, alive, me, folder / f"ready {number} {me}"))
        told = folder / f"killed {number}"
        while not told.exists():
            time.sleep(0.01)
        alive.remove(int(told.read_text()))
    report(me, facts)


if __name__ == "__main__":
    main(*sys.argv[1:])
