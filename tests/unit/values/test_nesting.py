import numpy as np
import pytest

import crossdevice as cd
from crossdevice.errors import ConversionError
from crossdevice.values.nesting import first_leaf, flatten, is_number_list, leaf_paths, unflatten


def test_a_list_of_numbers_is_one_array_and_a_list_of_arrays_is_a_structure():
    assert is_number_list([1, 2.5, [3, True]])
    assert not is_number_list([])
    assert not is_number_list([np.zeros(1)])
    leaves, structure = flatten({"a": [1, 2], "b": [np.zeros(1), 3.0]})
    assert leaves == [[1, 2], np.zeros(1), 3.0]
    assert leaf_paths(structure, "value") == ["value['a']", "value['b'][0]", "value['b'][1]"]
    assert unflatten(structure, ["x", "y", "z"]) == {"a": "x", "b": ["y", "z"]}


def test_none_is_structure():
    leaves, structure = flatten({"a": None, "b": 1.0})
    assert leaves == [1.0]
    assert unflatten(structure, [2.0]) == {"a": None, "b": 2.0}


def test_the_first_leaf_is_found_however_deep():
    array = np.zeros(1)
    assert first_leaf(array) is array
    assert first_leaf([{"a": (array,)}]) is array
    assert first_leaf({}) is None


def test_what_contains_itself_or_is_nested_too_deeply_is_refused():
    itself = {"w": np.zeros(1)}
    itself["again"] = itself
    deep = [np.zeros(1)]
    for _ in range(10_000):
        deep = [deep]
    for value in (itself, deep):
        with pytest.raises(ConversionError, match=rf"a {type(value).__name__} contains itself, or is nested"):
            cd.all_reduce([value, value])
