"""One rank that runs all laws and reports what became of each: `laws_rank.py ENGINE shared|private|hosts`."""

import os
import sys
import traceback
import warnings

from crossdevice import runtime
from crossdevice.process_groups import cluster
from multiprocess.launching import report
from multiprocess.laws import GROUP_LAWS
from multiprocess.laws_of_reductions import REDUCTION_LAWS
from multiprocess.laws_of_shards import SHARD_LAWS

LAWS = GROUP_LAWS | REDUCTION_LAWS | SHARD_LAWS


def main(engine, memory):
    warnings.simplefilter("error")
    here = cluster.cluster_from_env()
    if memory == "hosts":  # of which the second has one rank
        os.environ[runtime.HOST.variable] = f"host {here.rank == 2}"

    def form():
        return here.form_group(engine, timeout_seconds=240.0, shared_memory=memory != "private")

    with form() as group:
        fates = {name: fate(law, group, form) for name, law in LAWS.items()}
    facts = {
        "recognised": here.recognised,
        "engine": group.engine_name,
        "shares": group.shared is not None,
        "hosts": None if group.hosts is None else group.hosts.ranks,
    }
    report(here.rank, {**facts, **fates})


def fate(law, group, form):
    try:
        law(group, form)
    except Exception:
        return traceback.format_exc()
    return "kept"


if __name__ == "__main__":
    main(*sys.argv[1:])
