"""The settings of an algorithm, which may change between calls."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

from crossdevice.plans.packing import Packing
from crossdevice.values.options import DEFAULT_OPTIONS


class Settings:
    """Public attributes as settings; cached properties are cleared when a setting changes."""

    packing: Packing = Packing()

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets the attribute and clears cached properties."""
        object.__setattr__(self, name, value)
        self._forget(name)

    def __delattr__(self, name: str) -> None:
        """Deletes it, so that the class's default counts again."""
        object.__delattr__(self, name)
        self._forget(name)

    def __repr__(self) -> str:
        """Returns its class with the settings that are not the defaults."""
        settings = [
            f"{name}={value!r}"
            for name, parameter in inspect.signature(type(self)).parameters.items()
            if (value := getattr(self, name, parameter.default)) is not DEFAULT_OPTIONS
            and repr(value) != repr(parameter.default)
        ]
        return f"{type(self).__name__}({', '.join(settings)})"

    @property
    def num_packs(self) -> int:
        """The number of packs into which a batch is split; 0 if something else decides."""
        return self.packing.num_packs

    @num_packs.setter
    def num_packs(self, num_packs: int) -> None:
        self.packing = dataclasses.replace(self.packing, num_packs=num_packs)

    def __getstate__(self) -> dict[str, Any]:
        """Returns its settings; cached properties are computed again."""
        return {name: value for name, value in self.__dict__.items() if not self._is_prepared(name)}

    def _forget(self, changed: str) -> None:
        if not changed.startswith("_"):
            for name in [*filter(self._is_prepared, self.__dict__)]:
                self.__dict__.pop(name, None)

    def _is_prepared(self, name: str) -> bool:
        """Tells an attribute that was prepared from the settings from a setting."""
        return isinstance(getattr(type(self), name, None), functools.cached_property)
