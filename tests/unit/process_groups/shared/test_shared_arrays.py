"""Arrays in files without names: whose they are, where others find them, and when they are gone."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import numpy as np
import pytest

from crossdevice import runtime
from crossdevice.errors import OptionError
from crossdevice.process_groups.engines.thread_engine import run_ranks
from crossdevice.process_groups.shared import shared_memory
from crossdevice.process_groups.shared.shared_arrays import NOWHERE, SharedArrays, empty_array, empty_tree
from crossdevice.process_groups.shared.shared_steps import has_ended, start_time_of

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="files without names are those of Linux")


@pytest.fixture
def arrays():
    return SharedArrays([(os.getpid(), start_time_of(os.getpid()))] * 2)


@needs_linux
def test_another_rank_finds_an_array_by_its_place(arrays):
    mine = empty_array(arrays, (3, 4), np.int16)
    mine[:] = np.arange(12).reshape(3, 4)
    part = mine.reshape(-1)[4:8]
    theirs = arrays.array_at(1, arrays.place_of(part), part)
    assert theirs.tolist() == [4, 5, 6, 7]
    theirs[:] = 9
    assert mine[1].tolist() == [9, 9, 9, 9]
    assert arrays.place_of(np.zeros(3)) == NOWHERE


@needs_linux
def test_what_is_freed_is_closed_and_let_go_of(arrays):
    mine = empty_array(arrays, 1000, np.float32)
    place = arrays.place_of(mine)
    path = f"/proc/self/fd/{place.descriptor}"
    arrays.array_at(1, place, mine)
    assert "crossdevice-" in os.readlink(path)
    arrays.note_freed(1, 0)
    assert len(arrays._mapped) == 1
    del mine
    gc.collect()
    assert not os.path.exists(path) or "crossdevice-" not in os.readlink(path)
    arrays.note_freed(1, arrays.num_freed)
    assert (arrays.num_freed, arrays._mapped) == (1, {})
    with pytest.raises(ConnectionError, match="the memory of rank 1 is not where it said"):
        arrays.array_at(1, place, np.zeros(1000, np.float32))


@needs_linux
@pytest.mark.parametrize("is_shared", [True, False])
def test_a_structure_is_made_in_one_piece_of_memory(is_shared, arrays):
    like = {"w": np.zeros((2, 3), np.float32), "none": np.zeros((0, 2)), "b": [np.int64(3)]}
    made = empty_tree(arrays if is_shared else None, like)
    assert made["w"].shape == (2, 3)
    assert made["none"].shape == (0, 2)
    assert made["b"][0].dtype == np.int64
    places = [arrays.place_of(leaf) for leaf in (made["w"], made["b"][0])]
    assert len({place.number for place in places}) == 1
    assert (places[0] != NOWHERE) is is_shared
    assert {place.offset for place in places} == ({0, 64} if is_shared else {0})


@needs_linux
def test_a_process_is_known_by_when_it_was_born():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        born = start_time_of(process.pid)
        assert born is not None
        assert start_time_of(process.pid) == born
    assert start_time_of(process.pid) is None or start_time_of(process.pid) != born
    assert not has_ended(os.getpid(), start_time_of(os.getpid()))
    assert has_ended(os.getpid(), 0)


def test_threads_of_one_process_do_without_and_get_ordinary_arrays():
    def program(group):
        return group.shared is None, group.not_shared_reason, type(group.empty(3)), group.empty((2, 3)).shape

    assert (
        run_ranks(2, program) == [(True, "several ranks are threads of one process", np.ndarray, (2, 3))] * 2
    )


def test_the_variable_and_the_argument_decide(monkeypatch):
    assert shared_memory.is_wanted(None)
    monkeypatch.setenv(runtime.SHARED_MEMORY.variable, "0")
    assert not shared_memory.is_wanted(None)
    assert shared_memory.is_wanted(True)
    monkeypatch.setenv(runtime.SHARED_MEMORY.variable, "no")
    with pytest.raises(OptionError, match="CROSSDEVICE_SHARED_MEMORY must be 0 or 1; got 'no'"):
        shared_memory.is_wanted(None)


def test_other_systems_say_so(monkeypatch):
    monkeypatch.setattr(shared_memory.sys, "platform", "darwin")
    assert shared_memory.shared_memory_unavailable() == "it is implemented for Linux, and this is darwin"
