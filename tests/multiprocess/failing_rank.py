"""One rank of a group that breaks: `failing_rank.py SCENARIO torch|local|mpi SECONDS [ODD_RANK]`."""

import importlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

from crossdevice import runtime
from crossdevice.errors import CrossDeviceError
from crossdevice.process_groups import cluster
from crossdevice.process_groups.protocol import Message
from multiprocess.launching import FOLDER, report

ODD_RANK = 2
STALL_SECONDS = 20.0
FORMING_SECONDS = 240.0
"""Starting takes long where others compute, too."""
HANG_SECONDS = 250.0
"""For whom the others do not wait: they end the whole job."""


def main(scenario, engine, seconds, odd_rank=None):
    global ODD_RANK
    ODD_RANK = ODD_RANK if odd_rank is None else int(odd_rank)
    here = cluster.cluster_from_env()
    if "HOSTS_OF_TWO" in os.environ:
        os.environ[runtime.HOST.variable] = f"host {here.rank // 2}"
    if scenario == "absent":
        report(here.rank, absent(here, engine, float(seconds)))
        return
    group = here.form_group(engine, timeout_seconds=FORMING_SECONDS)
    group.timeout_seconds = float(seconds)
    facts = {"members": group.members}
    start = time.monotonic()
    try:
        for _ in range(20):
            once(group, "reduce")
            once(group, "gather")
        start = time.monotonic()
        SCENARIOS[scenario](group)
    except CrossDeviceError as error:
        facts |= described(error)
        facts |= {"seconds": time.monotonic() - start, "is_broken": group.is_broken}
        facts["later"] = refusal(group)
    if engine in ("torch", "local"):
        group.close()
        facts["again"] = None if odd_rank else formed_again(scenario, here, engine)
    elif scenario in ("differ", "leave"):
        with here.form_group(engine, timeout_seconds=240.0) as group, group.call("gather", b"again") as call:
            facts["again"] = [record.decode() for record in call.all_gather(b"%d" % here.rank)]
    report(here.rank, facts)
    if scenario == "stall" and engine == "torch":
        wait_for(f"rank {ODD_RANK}.json")  # rank 0 keeps the store in which that one reads who gave up


def absent(here, engine, seconds):
    """One rank does not come where the group is formed."""
    if here.rank == ODD_RANK:
        importlib.import_module("mpi4py.MPI")  # MPI itself starts only when all ranks do, and cannot be asked
        time.sleep(HANG_SECONDS)
        return None
    start = time.monotonic()
    try:
        here.form_group(engine, timeout_seconds=seconds)
    except CrossDeviceError as error:
        return {**described(error), "seconds": time.monotonic() - start}


def described(error):
    return {"error": type(error).__name__, "text": str(error), "at": time.time()}


def kill(group):
    if group.rank == ODD_RANK:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    while True:
        once(group, "reduce", bytes(1 << 23))


def break_off(group):
    """In the middle of a message, most likely: all have begun to read it, and wait for its end."""
    if group.rank == ODD_RANK:
        threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    while True:  # a fast machine is done with the first before the time has come
        once(group, "reduce", bytes(1 << 27))


def stall(group):
    if group.rank == ODD_RANK:
        time.sleep(STALL_SECONDS)
    once(group, "reduce")


def hang(group):
    if group.rank == ODD_RANK:
        time.sleep(HANG_SECONDS)
    once(group, "reduce")


def leave(group):
    if group.rank == ODD_RANK:
        group.close()
    once(group, "reduce")


def differ(group):
    once(group, "gather" if group.rank == ODD_RANK else "reduce")


def relay(group):
    """On each of two hosts one rank waits for the other; between hosts one rank waits for one that lives.

    So nobody but rank 1 can see that rank 0 is gone, and the board has gone with it.
    """
    mail, number = [np.zeros(1, np.uint8) for _ in range(2)], group.rank
    if number == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        with group.call("relay", b"relay") as call:
            call.exchange(
                [Message(2, mail[0])] if number == 3 else [],
                [Message({1: 0, 2: 3}[number], mail[0])] if number in (1, 2) else [],
            )
            call.exchange(
                [Message(3, mail[1])] if number == 1 else [], [Message(1, mail[1])] if number == 3 else []
            )
    finally:
        if number != 3:  # whoever leaves hangs up, which would be news
            wait_for("rank 3.json")


def cut(group):
    """Until somebody pulls the cable."""
    for _ in range(100):
        once(group, "reduce", bytes(1 << 15))
    (Path(os.environ[FOLDER]) / f"busy {group.rank}").touch()
    while True:
        once(group, "reduce", bytes(1 << 15))


SCENARIOS = {
    "kill": kill,
    "break_off": break_off,
    "stall": stall,
    "hang": hang,
    "leave": leave,
    "differ": differ,
    "relay": relay,
    "cut": cut,
}


def once(group, what, record=b"small"):
    with group.call(what, what.encode()) as call:
        call.all_gather(record)


def wait_for(name):
    end = time.monotonic() + 240.0
    while not (Path(os.environ[FOLDER]) / name).exists() and time.monotonic() < end:
        time.sleep(0.1)


def refusal(group):
    """What a broken group says to the next call."""
    try:
        once(group, "reduce")
    except CrossDeviceError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def formed_again(scenario, here, engine):
    """Those who are left form a group in the same place, while a stalled rank is still away."""
    left = [rank for rank in range(here.size) if scenario == "differ" or rank != ODD_RANK]
    if here.rank not in left or scenario == "cut":
        return None
    rank, size = left.index(here.rank), len(left)
    if engine == "local":
        group = cluster.Cluster(**{**vars(here), "rank": rank, "size": size}).form_group("local")
    else:
        from crossdevice.process_groups.engines.torch_engine import form_group, store_at

        store = store_at(here.address, here.port, is_keeper=False, timeout_seconds=240.0)
        group = form_group(rank, size, store=store, timeout_seconds=240.0)
    with group, group.call("gather", b"again") as call:
        return [record.decode() for record in call.all_gather(b"%d" % here.rank)]


if __name__ == "__main__":
    main(*sys.argv[1:])
