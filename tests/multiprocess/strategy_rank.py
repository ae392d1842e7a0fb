"""One rank that runs the laws of strategies, with the replicas it is given: `strategy_rank.py 3,1,4`."""

import hashlib
import sys

import numpy as np

import crossdevice as cd
from multiprocess.launching import report
from multiprocess.strategy_laws import LAWS, bits


def main(grid):
    here = cd.cluster_from_env()
    devices = [f"cpu:{index}" for index in range(int(grid.split(",")[here.rank]))]
    strategy = cd.MultiWorkerMirroredStrategy(here, devices=devices)
    with np.errstate(over="ignore"):
        digests = {name: digest(law(strategy)) for name, law in LAWS.items()}
    report(here.rank, {"explained": strategy.explain(), "digests": digests, "told": told(strategy)})


def digest(arrays):
    """A few letters that stand for all bits."""
    return hashlib.sha256(repr(bits(arrays)).encode()).hexdigest()


def told(strategy):
    """What a process hears of another one whose replica function raises."""

    def step():
        if cd.get_replica_context().replica_id_in_sync_group == 0:
            raise ZeroDivisionError("no mean of nothing")
        return cd.get_replica_context().all_reduce("sum", np.ones(2))

    try:
        strategy.run(step)
    except (ZeroDivisionError, cd.errors.ProcessGroupError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


if __name__ == "__main__":
    main(*sys.argv[1:])
