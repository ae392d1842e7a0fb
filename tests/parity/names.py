"""Every public name of the classes that TensorFlow's pages describe or name, beside ours.

Run as a program, it writes the table into `docs/coming_from_tensorflow.md`.
"""

from __future__ import annotations

import fnmatch
import inspect
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.distribute import values

import crossdevice as cd

PAGE = Path(__file__).parents[2] / "docs" / "coming_from_tensorflow.md"
BEGIN, END = "<!-- names: begin -->", "<!-- names: end -->"

_CLASSES = {
    tf.distribute: (
        "CrossDeviceOps",
        "ReductionToOneDevice",
        "HierarchicalCopyAllReduce",
        "NcclAllReduce",
        "ReduceOp",
        "DistributedValues",
        "Strategy",
        "MirroredStrategy",
        "OneDeviceStrategy",
        "MultiWorkerMirroredStrategy",
        "StrategyExtended",
        "ReplicaContext",
        "InputContext",
    ),
    tf.distribute.experimental: (
        "ValueContext",
        "CommunicationOptions",
        "CommunicationImplementation",
        "CollectiveHints",
    ),
    tf.compat.v1.distribute: ("StrategyExtended",),
    values: ("PerReplica", "Mirrored", "MirroredVariable", "SyncOnReadVariable"),
    tf: ("Variable", "IndexedSlices", "VariableAggregation", "VariableSynchronization"),
}
MODULES = {
    tf: "tf",
    tf.distribute: "tf.distribute",
    tf.distribute.experimental: "tf.distribute.experimental",
    tf.compat.v1.distribute: "tf.compat.v1.distribute",
    values: "values",
}
CLASSES = {
    f"{MODULES[module]}.{name}": (getattr(module, name), getattr(cd, name))
    for module, names in _CLASSES.items()
    for name in names
}

_GRAPHS = "of TensorFlow's graphs and of TensorFlow 1"
_CLUSTERS = "no such strategy or cluster here"
_SPARSE = "read or write rows with NumPy indexing, `scatter_*` and `assign`"
_DATA = "datasets are any iterables; of TensorFlow's own options those that change batches are refused"

MISSING = {
    "tf.distribute.DistributedDataset": _DATA,
    "tf.distribute.DistributedIterator": _DATA,
    "tf.distribute.InputOptions": _DATA,
    "tf.distribute.InputReplicationMode": _DATA,
    "tf.distribute.RunOptions": "`run` takes CommunicationOptions, for their `timeout_seconds`",
    "tf.distribute.Server": _CLUSTERS,
    "tf.distribute*.ParameterServerStrategy": _CLUSTERS,
    "tf.distribute*.TPUStrategy": _CLUSTERS,
    "tf.distribute.experimental.CentralStorageStrategy": _CLUSTERS,
    "tf.distribute.experimental.CollectiveCommunication": "the older name of CommunicationImplementation",
    "tf.distribute.experimental.Preemption*": _CLUSTERS,
    "tf.distribute.experimental.TerminationConfig": _CLUSTERS,
    "tf.compat.v1.distribute.*.experimental_*": _GRAPHS,
    "tf.distribute.*Strategy.colocate_vars_with": _GRAPHS,
    "tf.distribute.*Strategy.configure": _GRAPHS,
    "tf.distribute.*Strategy.experimental_run": _GRAPHS,
    "tf.distribute.*Strategy.group": _GRAPHS,
    "tf.distribute.*Strategy.make_*_iterator": _GRAPHS,
    "tf.distribute.*Strategy.unwrap": _GRAPHS,
    "tf.distribute.*Strategy.update_config_proto": _GRAPHS,
    "*Variable.batch_scatter_update": _SPARSE,
    "*Variable.gather_nd": _SPARSE,
    "*Variable.scatter_nd_*": _SPARSE,
    "*Variable.sparse_read": _SPARSE,
    "*Variable.constraint": _GRAPHS,
    "*Variable.initial_value": _GRAPHS,
    "*Variable.get_shape": "`shape`",
    "*Variable.set_shape": "shapes are always known",
    "*Variable.experimental_ref": "the older name of `ref`",
    "*Variable.SaveSliceInfo": _GRAPHS,
    "*Variable.count_up_to": _GRAPHS,
    "*Variable.eval": _GRAPHS,
    "*Variable.*_proto": _GRAPHS,
    "*Variable.graph": _GRAPHS,
    "*Variable.handle": _GRAPHS,
    "*Variable.initialize*": _GRAPHS,
    "*Variable.is_*": _GRAPHS,
    "*Variable.load": _GRAPHS,
    "*Variable.op": _GRAPHS,
    "tf.IndexedSlices.*": _GRAPHS,
}
"""Patterns of names that are not here, and why."""

ARGUMENTS = {
    "tf*.distribute.StrategyExtended": "strategies make it",
    "tf.distribute.ReplicaContext": "`run` makes it",
    "values.*Variable": "`Variable(...)` in a scope makes it",
    "tf.Variable": "an initial value is needed; the others are of TensorFlow's graphs",
}
"""Names of which not all arguments are here, and why."""

DIFFERENT = {
    "tf.distribute.CrossDeviceOps.reduce": "MEAN of integers is float for one replica too",
    "tf.distribute.CrossDeviceOps.batch_reduce": "no pairs give `[]`; packs mix dtypes",
    "tf.distribute.Strategy.run": "arrays and numbers that are one object in all replicas stay a PerReplica",
    "tf.distribute.Strategy.experimental_distribute_dataset": "parts differ by one example at most",
    "tf.distribute.Strategy.distribute_datasets_from_function": (
        "nothing is dropped at the end; scalars that do not go round are refused"
    ),
    "tf*.distribute.StrategyExtended.update": "a PerReplica is refused unless the variable is ON_READ",
    "tf*.distribute.StrategyExtended.worker_devices": "Device objects, which are strings of full names",
    "tf.distribute.ReplicaContext.all_reduce": "an object that all replicas share counts once for each",
    "tf.distribute.experimental.CommunicationOptions": "five more fields; equal options are equal",
    "*Variable.name": "without `:0`",
    "*Variable.shape": "a tuple",
    "*Variable.dtype": "the array library's dtype",
    "*Variable.device": "a Device, which is the string of its full name",
    "tf.compat.v1.distribute.StrategyExtended.should_*": "of the process with the first replica",
    "tf.IndexedSlices.shape": "a tuple, or None where `dense_shape` was not given",
}
"""Names that are here and do something else on purpose, and what."""


class Name(NamedTuple):
    """A public name of TensorFlow's: where, which, whether it is here, and what of its arguments is not."""

    owner: str
    name: str
    is_here: bool
    lacks: tuple[str, ...] = ()

    @property
    def full(self) -> str:
        return f"{self.owner}.{self.name}" if self.name else self.owner

    def remark(self, remarks: dict[str, str]) -> str | None:
        found = [reason for pattern, reason in remarks.items() if fnmatch.fnmatchcase(self.full, pattern)]
        return found[0] if found else None


def public_names(thing: Any) -> list[str]:
    return [name for name in dir(thing) if not name.startswith("_")]


def parameters(function: Any) -> dict[str, Any] | None:
    """What a function or class takes by name, in order, with defaults; None if that cannot be told."""
    for asked in (function.__init__, function.__new__) if inspect.isclass(function) else (function,):
        try:
            given = inspect.signature(asked).parameters.values()
        except (TypeError, ValueError):
            continue
        named = {
            p.name: p
            for p in given
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in ("self", "cls", "_cls")
        }
        if named or not inspect.isclass(function):
            return named
    return None


def lacking(theirs: Any, ours: Any) -> tuple[str, ...]:
    """Arguments of theirs that ours do not take under that name, in that place or with that default."""
    if not callable(theirs):
        return ()
    wanted, found = parameters(theirs), parameters(ours)
    if wanted is None or found is None:
        return ()
    in_place = [name for name, p in found.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    simple = (type(None), bool, int, float, str, tuple)
    return tuple(
        name
        for place, (name, p) in enumerate(wanted.items())
        if name not in found
        or (name in in_place and in_place[place : place + 1] != [name])
        or (isinstance(p.default, simple) and found[name].default != p.default)
    )


def compared() -> Iterator[Name]:
    """Every public name of theirs."""
    for module in (tf.distribute, tf.distribute.experimental):
        for name in public_names(module):
            full = f"{MODULES[module]}.{name}"
            if not isinstance(getattr(module, name), types.ModuleType) and full not in CLASSES:
                yield Name(MODULES[module], name, hasattr(cd, name))
    for full, (theirs, ours) in CLASSES.items():
        yield Name(full, "", True, lacking(theirs, ours))
        for name in public_names(theirs):
            is_here = hasattr(ours, name)
            lacks = lacking(getattr(theirs, name), getattr(ours, name)) if is_here else ()
            yield Name(full, name, is_here, lacks)


def table() -> str:
    """The table of the documentation: a line for each class and module."""
    owners: dict[str, tuple[list[str], dict[str, list[str]]]] = {}
    for row in compared():
        same, otherwise = owners.setdefault(row.owner, ([], {}))
        word = f"`{row.name or 'arguments'}`"
        if not row.is_here:
            otherwise.setdefault(f" missing ({row.remark(MISSING)})", []).append(word)
        elif row.lacks:
            lacks = ", ".join(f"`{name}`" for name in row.lacks)
            otherwise.setdefault(f" without {lacks} ({row.remark(ARGUMENTS)})", []).append(word)
        elif (reason := row.remark(DIFFERENT)) is not None:
            otherwise.setdefault(f": {reason}" if row.name else reason, []).append(word if row.name else "")
        elif row.name:
            same.append(word)
    lines = ["| TensorFlow | here, and the same | otherwise |", "| --- | --- | --- |"]
    for owner, (same, otherwise) in owners.items():
        notes = "; ".join(f"{', '.join(words)}{reason}" for reason, words in otherwise.items())
        lines.append(f"| `{owner}` | {', '.join(same)} | {notes} |")
    return "\n".join(lines)


def page_with_table(page: str) -> str:
    """A page whose part between the marks is the table of today."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page_with_table(PAGE.read_text()))
