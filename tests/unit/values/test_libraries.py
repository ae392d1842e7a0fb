"""Missing libraries, asked for in an interpreter that lacks them."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from crossdevice.values.registry import LIBRARIES

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
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    for name, library in LIBRARIES.items():
        if "crossdevice" in library.install:
            extra = library.install.removeprefix("'crossdevice[").removesuffix("]'")
            assert any(row.startswith(f"{name}>=") for row in extras[extra]), name
