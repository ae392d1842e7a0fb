"""What `import crossdevice` offers: complete, documented, and without names that leaked in."""

from __future__ import annotations

import inspect
import types

import pytest

import crossdevice as cd

PROMISED = (
    "Strategy",
    "StrategyExtended",
    "ProcessGroup",
    "Cluster",
    "cluster_from_env",
    "choose_algorithm",
    "OneDeviceStrategy",
    "InputContext",
    "ValueContext",
    "experimental_set_strategy",
)


def test_all_names_every_class_and_function_of_ours_and_nothing_else():
    found = {
        name
        for name, thing in vars(cd).items()
        if not name.startswith("_")
        and not isinstance(thing, types.ModuleType)
        and getattr(thing, "__module__", "").startswith("crossdevice")
    }
    assert sorted(found) == cd.__all__
    assert set(PROMISED) <= found


def test_completion_offers_the_public_names_and_nothing_else():
    assert dir(cd) == sorted([*cd.__all__, "__version__", "errors"])


@pytest.mark.parametrize("name", cd.__all__)
def test_every_export_has_a_docstring_of_its_own(name):
    thing = getattr(cd, name)
    assert thing.__module__.startswith("crossdevice.")
    assert vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__


@pytest.mark.parametrize("name", PROMISED)
def test_what_was_promised_is_shown_by_example(name):
    assert ">>> " in getattr(cd, name).__doc__


def test_old_names_work_and_say_what_to_use_instead():
    with pytest.warns(DeprecationWarning, match="use choose_algorithm of crossdevice"):
        assert cd.choose(8, "hgx_h100", 1 << 30).name == "direct"
    with pytest.warns(DeprecationWarning, match="use cluster_from_env and Cluster of crossdevice"):
        assert cd.cluster.from_env({}).size == 1
    for name in ("choose", "cluster"):
        assert name not in cd.__all__


def test_names_that_never_were_are_no_attributes():
    with pytest.raises(AttributeError, match="'crossdevice' has no attribute 'chose'"):
        cd.chose  # noqa: B018
