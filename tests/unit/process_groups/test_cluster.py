"""Forming a group: which engine, and what is refused."""

import importlib.util
import sys

import pytest

from crossdevice.errors import OptionError
from crossdevice.process_groups import cluster

ALONE = cluster.Cluster()
APART = cluster.Cluster(rank=0, size=2, launcher="by hand", variables=("RANK",))


def test_one_process_is_a_group_of_one():
    with ALONE.form_group() as group, group.call("gather", b"") as call:
        assert (group.rank, group.size) == (0, 1)
        assert call.all_gather(b"me") == [b"me"]


def test_threads_reach_no_other_process():
    with pytest.raises(OptionError, match="threads reach no other processes"):
        APART.form_group("threads")


def test_an_unknown_engine_is_refused_with_the_known_ones():
    with pytest.raises(OptionError, match=r"'carrier pigeon'.*torch, mpi"):
        APART.form_group("carrier pigeon")


def test_an_engine_whose_library_is_missing_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "crossdevice.process_groups.engines.mpi_engine", raising=False)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(OptionError, match=r"pip install 'crossdevice\[mpi\]'"):
        APART.form_group("mpi")


@pytest.mark.parametrize("other_lack", [None, "torch"])
def test_under_mpirun_without_mpi4py_the_advice_is_to_install_it(other_lack, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    if other_lack is not None:
        monkeypatch.delitem(sys.modules, "crossdevice.process_groups.engines.torch_engine", raising=False)
        monkeypatch.setitem(sys.modules, other_lack, None)
    launched = cluster.cluster_from_env({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"})
    with pytest.raises(OptionError, match=r"Open MPI .* mpi4py: pip install 'crossdevice\[mpi\]'"):
        launched.form_group()


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no torch")
def test_torch_needs_an_address():
    with pytest.raises(OptionError, match="MASTER_ADDR and MASTER_PORT; recognised by hand: rank 0 of 2"):
        APART.form_group()
