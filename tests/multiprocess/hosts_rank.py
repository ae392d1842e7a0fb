"""One rank of a group on several hosts, until somebody pulls a cable: `hosts_rank.py SECONDS`."""

import sys

import numpy as np

import crossdevice as cd
from crossdevice.errors import CrossDeviceError
from crossdevice.process_groups import cluster
from multiprocess import failing_rank
from multiprocess.launching import report


def main(seconds):
    here = cluster.cluster_from_env()
    group = here.form_group("torch", timeout_seconds=seconds)
    facts = {"hosts": None if group.hosts is None else group.hosts.ranks}
    facts["explained"] = cd.CollectiveAllReduce(group=group).explain(np.ones(4, np.float32), "cpu:0")
    with here.form_group("torch", timeout_seconds=60.0, shared_memory=False) as flat:
        facts["same"] = [bits(group, *case) == bits(flat, *case) for case in cases()]
    try:
        failing_rank.cut(group)
    except CrossDeviceError as error:
        facts |= failing_rank.described(error)
    group.close()
    report(here.rank, facts)


def cases():
    for precision in ("fast", "accurate", "exact"):
        for size in (100, 300_000):
            yield precision, size


def bits(group, precision, size):
    array = np.random.default_rng(group.rank).standard_normal(size, np.float32)
    options = cd.CommunicationOptions(precision=precision)
    return cd.CollectiveAllReduce(group=group).reduce("mean", array, "cpu:0", options).tobytes()


if __name__ == "__main__":
    main(float(sys.argv[1]))
