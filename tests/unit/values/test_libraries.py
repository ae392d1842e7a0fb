"""Missing libraries, asked for in an interpreter that lacks them."""

import subprocess
import sys
from pathlib import Path

import pytest

from crossdevice.values.libraries import INSTALLED_BY

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"


@pytest.mark.parametrize("library", ["torch", "tensorflow"])
def test_an_integration_says_what_to_install(library):
    program = f"import sys; sys.modules['{library}'] = None; import crossdevice.integrations.{library}"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.stderr.splitlines()[-1] == (
        f"ModuleNotFoundError: crossdevice.integrations.{library} needs {library}: "
        f"pip install 'crossdevice[{library}]'"
    )
    assert "During handling" not in ended.stderr


def test_the_extras_exist():
    text = PYPROJECT.read_text()
    for library, install in INSTALLED_BY.items():
        if "crossdevice" in install:
            extra = install.removeprefix("'crossdevice[").removesuffix("]'")
            assert f'\n{extra} = ["{library}>=' in text
