"""What every group owes, whatever its engine: each law is run by all ranks, and raises where it is broken."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.protocol import Message

Law = Callable[[ProcessGroup, Callable[[], ProcessGroup]], None]


def everyone_gets_every_record_in_order(group, form_another):
    with group.call("gather", b"records") as call:
        records = call.all_gather(b"from %03d" % group.rank)
    assert records == [b"from %03d" % rank for rank in range(group.size)]


def records_may_differ_in_length_and_be_empty(group, form_another):
    with group.call("gather", b"uneven") as call:
        records = call.all_gather_uneven(b"x" * (3 * group.rank))
    assert records == [b"x" * (3 * rank) for rank in range(group.size)]


def several_messages_of_a_pair_arrive_in_order(group, form_another):
    with group.call("exchange", b"several") as call:
        sent = [np.full(5 + k, 10 * group.rank + k, np.int64) for k in range(4)]
        got = {rank: [np.zeros(5 + k, np.int64) for k in range(4)] for rank in call.others()}
        call.exchange(
            [Message(rank, array) for array in sent for rank in call.others()],
            [Message(rank, array) for rank, arrays in got.items() for array in arrays],
        )
    for rank, arrays in got.items():
        assert [array.tolist() for array in arrays] == [[10 * rank + k] * (5 + k) for k in range(4)]


def several_exchanges_of_a_call_do_not_mix(group, form_another):
    with group.call("exchange", b"phases") as call:
        for phase in range(20):
            assert around(group, call, np.float32([phase, group.rank])).tolist() == [
                phase,
                (group.rank - 1) % group.size,
            ]


def nothing_at_all_may_be_sent(group, form_another):
    with group.call("exchange", b"nothing") as call:
        assert around(group, call, np.zeros((0, 3), np.float64)).shape == (0, 3)
        assert call.all_gather(b"") == [b""] * group.size
        call.exchange([], [])


def what_is_sent_may_be_read_only(group, form_another):
    values = np.arange(100.0)
    values.flags.writeable = False
    with group.call("exchange", b"read-only") as call:
        assert around(group, call, values).tolist() == values.tolist()


def a_message_of_64_mib_arrives_whole(group, form_another):
    pattern = np.arange(1 << 16, dtype=np.uint32)
    with group.call("exchange", b"large") as call:
        got = around(group, call, np.tile(pattern + group.rank, 256)).reshape(256, -1)
    assert (got == pattern + (group.rank - 1) % group.size).all()


def a_thousand_calls_stay_in_step(group, form_another):
    for number in range(1000):
        with group.call("gather", b"kind %d" % (number % 3)) as call:
            records = call.all_gather(b"%04d %d" % (number, group.rank))
        assert records == [b"%04d %d" % (number, rank) for rank in range(group.size)]


def two_groups_do_not_hear_each_other(group, form_another):
    with form_another() as other:
        for number in range(10):
            with group.call("gather", b"twice") as call, other.call("gather", b"twice") as other_call:
                ours = call.all_gather(b"ours %d" % number)
                theirs = other_call.all_gather(b"theirs %d" % number)
            assert set(ours) == {b"ours %d" % number}
            assert set(theirs) == {b"theirs %d" % number}


def members_are_named_by_host_and_process(group, form_another):
    assert group.members[group.rank].endswith(f", process {os.getpid()})")
    with group.call("gather", b"members") as call:
        names = call.all_gather_uneven("; ".join(group.members).encode())
    assert len(set(names)) == 1


def a_closed_group_can_be_formed_again(group, form_another):
    for _ in range(3):
        with form_another() as other, other.call("gather", b"again") as call:
            assert len(call.all_gather(b"here")) == group.size


def around(group, call, array):
    """Everyone hands an array to the next rank, and gets that of the rank before."""
    got = np.empty_like(array)
    if group.size == 1:
        return array
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    call.exchange([Message(after, array)], [Message(before, got)])
    return got


GROUP_LAWS: dict[str, Law] = {
    law.__name__: law
    for law in (
        everyone_gets_every_record_in_order,
        records_may_differ_in_length_and_be_empty,
        several_messages_of_a_pair_arrive_in_order,
        several_exchanges_of_a_call_do_not_mix,
        nothing_at_all_may_be_sent,
        what_is_sent_may_be_read_only,
        a_message_of_64_mib_arrives_whole,
        a_thousand_calls_stay_in_step,
        two_groups_do_not_hear_each_other,
        members_are_named_by_host_and_process,
        a_closed_group_can_be_formed_again,
    )
}
