"""Resolves all extras with the locked versions, for each supported Python and platform.

Only the public index is asked: an environment that also offers other builds of a library, or in which one is
installed already, hides requirements that contradict each other. And nobody has all platforms at hand.
"""

from __future__ import annotations

import itertools
import os
import sys
import tomllib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from public_index import LOCK, ROOT, IndexUnreachableError, run_uv

PLATFORMS = {
    "Linux x86-64": "x86_64-manylinux_2_28",
    "Linux aarch64": "aarch64-manylinux_2_28",
    "macOS 14 arm64": "aarch64-apple-darwin",
}


def supported_pythons() -> list[str]:
    """The versions that the classifiers name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = [name.removeprefix("Programming Language :: Python :: ") for name in project["classifiers"]]
    return [version for version in versions if version.startswith("3.")]


APART = {"flower": ("flower", "torch", "jax", "tensorflow", "mpi", "cli")}
"""Extras that contradict those of developers, and with what they are resolved: flwr needs an older uv."""


def locked_extras() -> list[str]:
    """Returns the extras whose packages are locked."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [name for name in project["optional-dependencies"] if name not in APART]


def conflict(python: str, platform: str) -> str | None:
    """Why all extras together cannot be installed there; None if they can."""
    reasons = [_conflict_of(locked_extras(), python, platform, LOCK)]
    reasons += [_conflict_of(extras, python, platform) for extras in APART.values()]
    return "\n".join(filter(None, reasons)) or None


def _conflict_of(extras: Iterable[str], python: str, platform: str, lock: Path | None = None) -> str | None:
    ended = run_uv(
        *("pip", "compile", "pyproject.toml", "--quiet", "--no-header", "--no-annotate"),
        *(f"--extra={extra}" for extra in extras),
        *("--python-version", python, "--python-platform", PLATFORMS[platform]),
        # Without it, uv asks every Python on the PATH for its version.
        *("--python", sys.executable),
        # What would have to be compiled does not count as available.
        *("--only-binary", ":all:"),
        *(("--constraint", str(lock)) if lock else ()),
        MACOSX_DEPLOYMENT_TARGET="14.0",
    )
    if ended.returncode:
        return ended.stderr.strip() or f"uv ended with {ended.returncode}"
    lacking = set(ended.stdout.split()) - set(lock.read_text().split()) if lock else set()
    return f"{LOCK.name} lacks {', '.join(sorted(lacking))}: run `make lock`" if lacking else None


def main() -> int:
    """Prints every conflict; returns 1 if there is one, 2 if nothing could be found out."""
    cells = list(itertools.product(supported_pythons(), PLATFORMS))
    try:
        with ThreadPoolExecutor(4 * (os.cpu_count() or 1)) as pool:
            conflicts = list(pool.map(conflict, *zip(*cells, strict=True)))
    except IndexUnreachableError as error:
        print(f"The extras were NOT checked: the public index cannot be reached.\n{error}", file=sys.stderr)
        return 2
    found = [(cell, why) for cell, why in zip(cells, conflicts, strict=True) if why]
    for (python, platform), why in found:
        print(
            f"All extras together cannot be installed for Python {python} on {platform}:\n{why}\n",
            file=sys.stderr,
        )
    print(f"Extras resolve for {len(cells) - len(found)} of {len(cells)} pairs of Python and platform.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
