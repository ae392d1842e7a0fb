"""What one rank makes of the notes it finds."""

from types import SimpleNamespace

from crossdevice.process_groups.notes import watch as watch_module
from crossdevice.process_groups.notes.board import Found, Note, Refused
from crossdevice.process_groups.notes.watch import Watch


def test_a_rank_is_silent_once_it_has_said_nothing_new_for_long(monkeypatch):
    now = 100.0
    monkeypatch.setattr(watch_module, "time", SimpleNamespace(monotonic=lambda: now))
    notes = {}
    call = SimpleNamespace(number=3, num_exchanges=1, what="reduce", signature=b"same")
    watch = Watch(lambda mine: Found({0: mine, **notes}), call, ["rank 0", "rank 1", "rank 2"], 0, Refused())
    for beat in range(4):
        notes[1] = Note(3, 1, "reduce", "same", beat)
        notes[2] = Note(3, 1, "reduce", "same", 0)
        watch.look()
        assert watch.silent_ranks() == set()
        now += watch_module.SILENCE_SECONDS / 4
    now += watch_module.SILENCE_SECONDS / 4
    assert watch.silent_ranks() == {2}
