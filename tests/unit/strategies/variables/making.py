"""How variables are made and read here: of which library, with which aggregation, copy by copy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import crossdevice as cd

LIBRARIES = {"numpy": np.array, "torch": torch.tensor}

each_library = pytest.mark.parametrize("make", LIBRARIES.values(), ids=LIBRARIES)
each_aggregation = pytest.mark.parametrize("aggregation", cd.VariableAggregation, ids=lambda a: a.name)


def own_replica():
    return cd.get_replica_context().replica_id_in_sync_group


def copies(variable):
    return [copy.value().tolist() for copy in variable.values]


def on_read(strategy, value, aggregation, **more):
    return strategy.create_variable(
        value, synchronization=cd.VariableSynchronization.ON_READ, aggregation=aggregation, **more
    )
