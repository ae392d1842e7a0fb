"""One rank that runs all laws and reports what became of each: `laws_rank.py torch|mpi shared|private`."""

import sys
import traceback
import warnings

from crossdevice.process_groups import cluster
from multiprocess.launching import report
from multiprocess.laws import GROUP_LAWS
from multiprocess.laws_of_reductions import REDUCTION_LAWS
from multiprocess.laws_of_shards import SHARD_LAWS

LAWS = GROUP_LAWS | REDUCTION_LAWS | SHARD_LAWS


def main(engine, memory):
    warnings.simplefilter("error")
    here = cluster.cluster_from_env()

    def form():
        return here.form_group(engine, timeout_seconds=60.0, shared_memory=memory == "shared")

    with form() as group:
        fates = {name: fate(law, group, form) for name, law in LAWS.items()}
    facts = {"recognised": here.recognised, "engine": group.engine_name, "shares": group.shared is not None}
    report(here.rank, {**facts, **fates})


def fate(law, group, form):
    try:
        law(group, form)
    except Exception:
        return traceback.format_exc()
    return "kept"


if __name__ == "__main__":
    main(*sys.argv[1:])
