"""Tables of names, with classes that are loaded on first use."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Iterator, Mapping
from typing import Any

from crossdevice.errors import OptionError
from crossdevice.values.libraries import missing_library


def loaded(target: str) -> Any:
    """Imports and returns what `module:attribute` names."""
    module, _, attribute = target.partition(":")
    found = importlib.import_module(module)
    if not hasattr(found, attribute):
        raise OptionError(f"{target!r} names nothing: module {module} has no {attribute}")
    return getattr(found, attribute)


class Registry(Mapping[str, str]):
    """A table `{name: "module:class"}`; third parties add rows through an entry point group."""

    def __init__(self, what: str, table: Mapping[str, str], entry_point_group: str) -> None:
        self._what = what
        self._table = dict(table)
        self._group = entry_point_group

    def load(self, name: str) -> Any:
        """Imports and returns the class of that name; refuses unknown names and missing libraries."""
        target = self.get(name) if isinstance(name, str) else None
        if target is None:
            raise OptionError(f"{name!r} is not {self._what}; expected one of {', '.join(self)}")
        try:
            return loaded(target)
        except ModuleNotFoundError as error:
            raise OptionError(f"{name!r}, {self._what}, needs {missing_library(error)}") from error

    def _rows(self) -> dict[str, str]:
        found = importlib.metadata.entry_points(group=self._group)
        return self._table | {entry.name: entry.value for entry in found if entry.name not in self._table}

    def __getitem__(self, name: str) -> str:
        # Installed packages are searched only for names that are not ours, which takes milliseconds.
        return self._table[name] if name in self._table else self._rows()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows())

    def __len__(self) -> int:
        return len(self._rows())
