"""Nested structures (dicts, lists, tuples, whatever optree knows) of values.

A list of plain numbers is one array, as it is for NumPy; a list that holds arrays is a structure.
None inside a structure is part of the structure, not a value.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import optree

from crossdevice.errors import ConversionError

NUMBERS = (bool, int, float, complex)


def is_number(node: object) -> bool:
    """Returns True for a plain Python number; NumPy's scalars count as arrays, since they have a dtype."""
    return isinstance(node, NUMBERS) and not hasattr(node, "dtype")


def is_number_list(node: object) -> bool:
    """Returns True if a list or tuple, at any depth, holds only plain numbers."""
    if not isinstance(node, (list, tuple)) or not node or hasattr(node, "_fields"):
        return False
    return all(is_number(child) or is_number_list(child) for child in node)


def flatten(tree: Any, is_leaf: Callable[[Any], bool] = is_number_list) -> tuple[list[Any], Any]:
    """Returns the leaves of a structure and what is needed to build it again."""
    try:
        leaves, structure = optree.tree_flatten(tree, is_leaf=is_leaf)
    except RecursionError:
        kind = type(tree).__name__
        raise ConversionError(f"a {kind} contains itself, or is nested too deeply for a structure") from None
    return leaves, structure


def unflatten(structure: Any, leaves: list[Any]) -> Any:
    """Rebuilds the structure with other leaves."""
    return optree.tree_unflatten(structure, leaves)


def spelled_structure(structure: Any) -> str:
    """Formats a structure for messages, with a star for each value.

    >>> spelled_structure(flatten({"w": [1.0, 2.0], "b": (None, "x")})[1])
    "{'b': (None, *), 'w': *}"
    """
    return re.sub(r"(, NoneIsLeaf)?(, namespace='[^']*')?\)$", "", str(structure).removeprefix("PyTreeSpec("))


def leaf_paths(structure: Any, root: str = "value") -> list[str]:
    """Returns the Python expression of each leaf: `value['dense']['kernel']`."""
    return [accessor.codify(root) for accessor in optree.treespec_accessors(structure)]


def first_leaf(tree: Any) -> Any:
    """Returns the first leaf of a structure; None if it has none."""
    if hasattr(tree, "dtype"):
        return tree
    return next(iter(flatten(tree)[0]), None)
