"""What notes tell about ranks."""

from crossdevice.process_groups.notes.board import Note, odd_ones_out, roll_call

MEMBERS = [f"rank {rank} (host-{rank})" for rank in range(4)]


def test_notes_are_read_as_they_were_written():
    note = Note(7, 1, 'reduce "ä"', "0a", 3, "it lost contact", lost=(1, 2))
    assert Note.read(note.written()) == note


def test_ranks_at_other_calls_are_not_compared():
    notes = {0: Note(3, 1, "reduce", "a", 0), 1: Note(4, 1, "gather", "b", 0)}
    assert odd_ones_out(notes, 0, MEMBERS) is None


def test_calls_without_a_signature_do_not_differ():
    notes = {rank: Note(3, 1, "reduce", "", 0) for rank in range(2)}
    assert odd_ones_out(notes, 0, MEMBERS) is None
    assert roll_call(notes, {0: True, 1: True}, MEMBERS[:2], 3) == "ranks 0, 1 are there"


def test_the_smallest_party_is_named_first_and_a_single_rank_in_full():
    notes = {rank: Note(3, 1, "reduce", "a", 0) for rank in range(4)} | {2: Note(3, 1, "gather", "b", 0)}
    assert odd_ones_out(notes, 0, MEMBERS) == "rank 2 (host-2) calls gather; the other 3 call reduce"


def test_everyone_who_is_missing_is_named_with_the_reason():
    notes = {
        0: Note(5, 1, "reduce", "a", 1),
        1: Note(5, 1, "reduce", "a", 1),
        2: Note(6, 1, "gather", "b", 0),
    }
    assert roll_call(notes, {0: True}, MEMBERS, 5) == (
        "rank 1 (host-1) arrived, but is not heard from any more; "
        "rank 2 (host-2) is already at call 6 (gather); rank 3 (host-3) has not arrived; rank 0 is there"
    )


def test_a_rank_that_refuses_is_odd_even_where_most_do():
    notes = {rank: Note(3, 1, "nothing", "refused", 0, "", 3, f"reason {rank}") for rank in (0, 2)}
    notes[1] = Note(3, 1, "reduce", "a", 0)
    assert odd_ones_out(notes, 1, MEMBERS[:3]) == (
        "rank 0 (host-0) calls nothing (reason 0); rank 2 (host-2) calls nothing (reason 2); "
        "rank 1 (host-1) calls reduce"
    )


def test_only_the_rank_whose_connection_has_ended_is_blamed():
    notes = {1: Note(5, 1, "reduce", "a", 1, "it lost contact")}
    assert roll_call(notes, {1: True}, MEMBERS, 5, lost={0}, is_complete=False) == (
        "the connection to rank 0 (host-0) has ended; the board of notes cannot be reached; rank 1 is there"
    )


def test_only_the_rank_whose_message_has_not_come_is_named_where_notes_cannot_be_read():
    notes = {1: Note(5, 1, "reduce", "a", 1)}
    assert roll_call(notes, {1: True}, MEMBERS, 5, awaited={0}, is_complete=False) == (
        "nothing is known to have come from rank 0 (host-0); the board of notes cannot be reached; "
        "rank 1 is there"
    )
    assert "rank 3 (host-3) has not arrived" in roll_call(notes, {1: True}, MEMBERS, 5, is_complete=False)


def test_where_the_board_is_gone_its_keeper_is_named_and_who_hung_up_because_of_it_is_not_blamed():
    notes = {1: Note(5, 1, "reduce", "a", 1, "it lost contact")}
    assert roll_call(notes, {1: True}, MEMBERS, 5, lost={2}, is_complete=False, keeper=0) == (
        "rank 0 (host-0), which keeps the board of notes, cannot be reached; "
        "the connection to rank 2 (host-2) has ended, maybe only because of that; rank 1 is there"
    )
    assert roll_call(notes, {1: True}, MEMBERS, 5, awaited={0, 3}, is_complete=False, keeper=0) == (
        "rank 0 (host-0), which keeps the board of notes, cannot be reached; "
        "nothing is known to have come from rank 3 (host-3); rank 1 is there"
    )
    assert roll_call(notes, {1: True}, MEMBERS, 5, lost={0}, is_complete=False, keeper=0) == (
        "the connection to rank 0 (host-0) has ended; the board of notes cannot be reached; rank 1 is there"
    )
    assert "keeps" not in roll_call(notes, {1: True}, MEMBERS, 5, lost={2}, keeper=0)
    assert roll_call(notes, {1: True}, MEMBERS, 5, lost={0, 2, 3}, is_complete=False, keeper=2) == (
        "the connection to rank 2 (host-2) has ended; "
        "the connection to rank 0 (host-0) has ended, maybe only because of that; "
        "the connection to rank 3 (host-3) has ended, maybe only because of that; "
        "the board of notes cannot be reached; rank 1 is there"
    )


def test_a_keeper_that_gives_up_and_leaves_before_the_others_is_not_blamed():
    gave_up = "it lost contact to rank 2 (host-2)"
    notes = {rank: Note(5, 1, "reduce", "a", 1, gave_up, lost=(2,)) for rank in (0, 1, 3)}
    for is_complete in (True, False):
        assert roll_call(notes, {}, MEMBERS, 5, lost={2}, is_complete=is_complete, keeper=0) == (
            "the connection to rank 2 (host-2) has ended; ranks 0, 1, 3 are there"
        )


def test_a_rank_that_hung_up_because_of_another_says_of_which():
    notes = {
        1: Note(5, 1, "reduce", "a", 1, "it lost contact to rank 0"),
        2: Note(5, 1, "reduce", "a", 1, "so"),
    }
    assert roll_call(notes, {1: True, 2: True}, MEMBERS[:3], 5, lost={0, 1}) == (
        "the connection to rank 0 (host-0) has ended; "
        "rank 1 (host-1) gave up: it lost contact to rank 0; rank 2 is there"
    )


def test_whoever_only_waited_when_another_was_lost_may_be_gone_too_and_is_not_said_to_be_there():
    notes = {0: Note(5, 1, "reduce", "a", 1, "it lost contact"), 2: Note(5, 1, "reduce", "a", 1)}
    fresh = dict.fromkeys(range(4), True)
    assert roll_call(notes, fresh, MEMBERS, 5, lost={1}) == (
        "the connection to rank 1 (host-1) has ended; ranks 2, 3 have not answered; rank 0 is there"
    )
