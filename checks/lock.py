"""Renews `constraints.txt`, or with `--compare ENVIRONMENT` prints how that one's packages differ from it.

The file names one version of every package that any command of the Makefile installs, for all supported
Pythons and platforms, resolved from the public index alone. pip takes it as constraints: it installs what a
command asks for in these versions, and a machine that offers another build of one of them, such as PyTorch
without CUDA, may use that.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import sysconfig
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from public_index import LOCK, ROOT, run_uv
from resolution import locked_extras, supported_pythons

HEADER = """\
# The versions that the Makefile installs, written by `make lock`. What users get is in pyproject.toml.
"""

EDITABLE = "editables"
"""What hatchling asks for where a project is installed as its source tree."""


def renew() -> None:
    """Writes the newest versions that fit together."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    with tempfile.TemporaryDirectory() as folder:
        build = Path(folder) / "build.in"
        build.write_text("\n".join([*project["build-system"]["requires"], EDITABLE]))
        ended = run_uv(
            *("pip", "compile", "pyproject.toml", str(build), "--quiet", "--no-header", "--no-annotate"),
            *("--universal", "--python-version", supported_pythons()[0], "--python", sys.executable),
            *(f"--extra={extra}" for extra in locked_extras()),
            # What would have to be compiled does not count as available.
            *("--only-binary", ":all:"),
        )
    if ended.returncode:
        sys.exit(ended.stderr)
    LOCK.write_text(HEADER + ended.stdout)


def locked_versions() -> dict[str, str]:
    """Returns the locked versions by package, for this Python and platform."""
    rows = [Requirement(row) for row in LOCK.read_text().splitlines() if not row.startswith("#")]
    return {
        canonicalize_name(row.name): str(row.specifier).removeprefix("==")
        for row in rows
        if row.marker is None or row.marker.evaluate()
    }


def installed_versions(environment: Path) -> dict[str, str]:
    """Returns the versions in an environment of this Python, without the names of builds ("+cpu")."""
    base = {"base": str(environment), "platbase": str(environment)}
    folders = {sysconfig.get_path(name, "venv", base) for name in ("purelib", "platlib")}
    return {
        canonicalize_name(found.name): found.version.split("+")[0]
        for found in importlib.metadata.distributions(path=sorted(folders))
    }


def print_changes(environment: Path) -> None:
    """Prints the packages of an environment whose version is not the locked one."""
    locked, installed = locked_versions(), installed_versions(environment)
    changed = {
        name: version
        for name, version in sorted(installed.items())
        if name not in ("crossdevice", "pip") and locked.get(name) != version
    }
    for name, version in changed.items():
        print(f"{name:<30} {locked.get(name, 'not locked'):<15} -> {version}")
    print(f"{len(changed)} of {len(installed)} packages differ from {LOCK.name}.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compare", type=Path, metavar="ENVIRONMENT")
    environment = parser.parse_args().compare
    print_changes(environment) if environment else renew()
