"""Builds sdist and wheel, installs the wheel into an empty environment, and uses it from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from documented_calls import PACKAGE, write_programs
from public_index import LOCK, ROOT, IndexUnreachableError, clean_environment, run_uv

BIN = "Scripts" if sys.platform == "win32" else "bin"


class CheckError(Exception):
    """The wheel is not as it should be."""


def built(folder: Path) -> Path:
    """The wheel, made from the sdist as pip would."""
    uv("build", "--out-dir", str(folder), "--build-constraint", str(LOCK))
    (wheel,) = folder.glob("*.whl")
    return wheel


def compare_files(wheel: Path) -> None:
    """Every file of the package is in the wheel: the TOML files, the HTML page and py.typed, too."""
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    there = {
        path.relative_to(PACKAGE.parent).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    } | {"crossdevice_torch_backend.py"}
    if packed != there:
        lacking, foreign = sorted(there - packed), sorted(packed - there)
        raise CheckError(f"{wheel.name} lacks {lacking} of src/crossdevice, and has {foreign} besides")


def check_links(wheel: Path) -> None:
    """The description that the index shows has no relative links, which would lead nowhere there."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        description = archive.read(metadata).decode()
    relative = re.findall(r"\]\((?!\w+:|#)([^)\s]+)", description)
    if relative or "](https:" not in description:
        raise CheckError(f"the description of {wheel.name} has relative links: {relative}")


def uv(*arguments: str) -> None:
    """Runs uv with the public index alone."""
    ended = run_uv(*arguments)
    if ended.returncode:
        raise CheckError(f"uv {' '.join(arguments)} failed:\n{ended.stderr}")


class Place:
    """A directory outside the source tree, with an environment that has the wheel and what it depends on."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self._folder = folder / "elsewhere"
        self._folder.mkdir()
        for source in (ROOT / "README.md", ROOT / "checks" / "user_program.py"):
            (self._folder / source.name).write_bytes(source.read_bytes())
        (self._folder / "documented").mkdir()
        write_programs(self._folder / "documented")
        self._bin = folder / "environment" / BIN
        self.python = str(self._bin / "python")
        uv("venv", "--python", sys.executable, str(self._bin.parent))
        uv("pip", "install", "--python", self.python, "--constraint", str(LOCK), str(wheel))

    def uninstall(self, *distributions: str) -> None:
        """Takes packages away again."""
        uv("pip", "uninstall", "--python", self.python, *distributions)

    def run(self, *command: str, **variables: str) -> str:
        """What a command prints there; it must succeed."""
        program = self._bin / command[0]
        ended = subprocess.run(
            [str(program) if program.exists() else command[0], *command[1:]],
            cwd=self._folder,
            env=clean_environment(str(self._folder), **variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if ended.returncode:
            raise CheckError(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stdout}")
        return ended.stdout


def use(place: Place) -> None:
    """The commands, README's examples and a user's program; then all but the commands without numba."""
    where = place.run("python", "-c", "import crossdevice; print(crossdevice.__file__)")
    if str(ROOT) in where:
        raise CheckError(f"not the wheel was imported, but {where}")
    place.run("crossdevice", "doctor")
    place.run("crossdevice", "explain", "--topology", "dgx1v", "--html", "plan.html")
    place.run("crossdevice", "bench", "-b", "4K", "-e", "64K")
    use_in_python(place)
    place.uninstall("numba", "llvmlite")
    use_in_python(place)
    if "unavailable without numba" not in place.run("crossdevice", "doctor"):
        raise CheckError("crossdevice doctor does not say that numba is missing")


def use_in_python(place: Place) -> None:
    """README's examples and a user's program."""
    place.run("python", "-m", "doctest", "README.md")
    place.run("python", "user_program.py")


def check_types(place: Place) -> None:
    """A user's program, by mypy and by pyright: basedpyright is the one that needs nothing but the index.

    mypy reads the examples of the documents, too.
    """
    checkers = Path(sys.prefix) / BIN
    programs = ("user_program.py", "documented")
    place.run(str(checkers / "mypy"), "--strict", "--python-executable", place.python, *programs)
    place.run(
        str(checkers / "basedpyright"), "--pythonpath", place.python, "--level", "error", "user_program.py"
    )


def main() -> int:
    """Returns 1 if something is wrong, 2 if nothing could be found out."""
    try:
        with tempfile.TemporaryDirectory(prefix="crossdevice-") as folder, ThreadPoolExecutor() as pool:
            wheel = built(Path(folder) / "dist")
            compare_files(wheel)
            check_links(wheel)
            place = Place(Path(folder), wheel)
            checks: list[Callable[[Place], None]] = [use, check_types]
            for running in [pool.submit(check, place) for check in checks]:
                running.result()
            print(f"{wheel.name} installs and works without any extra.")
    except IndexUnreachableError as error:
        print(f"The wheel was NOT checked: the public index cannot be reached.\n{error}", file=sys.stderr)
        return 2
    except CheckError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
