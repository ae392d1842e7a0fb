"""One process of the demo; rank 0 writes the trainings: `rank.py BACKEND DEVICES EPOCHS TRAININGS.npz`."""

from __future__ import annotations

import sys
from pathlib import Path

from crossdevice.cli.demo.training import EXACT, PLAIN, load_digits, strategy_in, train, write_trainings
from crossdevice.process_groups.cluster import cluster_from_env


def main(backend: str, num_devices: str, num_epochs: str, path: str) -> None:
    """Trains with the other processes, by each kind of sum."""
    digits, cluster = load_digits(), cluster_from_env()
    strategy = strategy_in(cluster, int(num_devices))
    trainings = {
        precision: train(digits, backend, int(num_epochs), strategy, precision)
        for precision in (EXACT, PLAIN)
    }
    if cluster.rank == 0:
        write_trainings(Path(path), trainings)


if __name__ == "__main__":
    main(*sys.argv[1:])
