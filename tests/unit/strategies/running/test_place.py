"""Entering and leaving replicas."""

from __future__ import annotations

import crossdevice as cd
from crossdevice.strategies.running.place import current_context, outside_of_replicas
from crossdevice.values.replica_scope import current_replica


def test_the_replica_and_its_context_are_entered_and_left_together():
    strategy = cd.MirroredStrategy(["cpu:0", "cpu:1"])
    seen = {}

    def replica_fn():
        own = current_context().local_replica
        seen[own] = [(current_replica(), current_context().local_replica)]
        with outside_of_replicas(strategy):
            seen[own].append((current_replica(), current_context()))
        seen[own].append((current_replica(), current_context().local_replica))

    strategy.run(replica_fn)
    assert seen == {own: [(own, own), (None, None), (own, own)] for own in (0, 1)}
    assert (current_replica(), current_context()) == (None, None)
