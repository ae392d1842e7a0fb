"""One random file that was damaged, as data: readers take it, or refuse it by an error of ours."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import crossdevice as cd
from crossdevice.combining.files.formats import open_model
from crossdevice.combining.files.model_file import opened
from crossdevice.errors import CrossDeviceError
from fuzz.inputs import BACKENDS

FILE_FIELDS: dict[str, tuple[Any, ...]] = {
    "ending": (".npy", ".npz", ".safetensors", ".index.json", "compressed", "accumulator", ".pt"),
    "damage": ("bits", "bytes", "truncated", "longer", "number", "repeated", "nested"),
    "times": (1, 2, 5),
}
CHECKSUMMED = (".npz", "compressed", "accumulator", ".pt")
"""Where a change that is not refused has changed nothing that counts."""

NUMBERS = (b"-1", b"0", b"1e999", b"99999999999999999999", b"1/0", b"1.5", b"[[]]", b"null", b"4294967295")


@dataclasses.dataclass(frozen=True)
class FileCase:
    """A file of some format, and how often it is damaged; the seed decides where."""

    ending: str
    damage: str
    times: int
    seed: int

    @property
    def is_possible(self) -> bool:
        """Whether the format can be written here."""
        return self.ending != ".pt" or "torch" in BACKENDS


def random_file_cases(choose: random.Random) -> Iterator[FileCase]:
    """Cases that are possible."""
    while True:
        drawn = {name: choose.choice(options) for name, options in FILE_FIELDS.items()}
        case = FileCase(**drawn, seed=choose.randrange(1 << 31))
        if case.is_possible:
            yield case


def file_failure_of(case: FileCase) -> str | None:
    """Says what readers raised that is no error of ours, or took for numbers; None if they did not."""
    choose = random.Random(case.seed)
    with tempfile.TemporaryDirectory() as folder:
        path = _written(case.ending, Path(folder))
        data = path.read_bytes()
        right = _read(path, case.ending) if case.ending in CHECKSUMMED else None
        for _ in range(case.times):
            data = _damaged(data, case.damage, choose)
        path.write_bytes(data)
        try:
            found = _read(path, case.ending)
        except CrossDeviceError:
            return None
        except BaseException as error:
            return f"{type(error).__name__}: {error}"
    if right is not None and found != right:
        return f"{found} instead of {right}"
    return None


def _read(path: Path, ending: str) -> dict[str, bytes]:
    """The bits of what is made of a file, by name."""
    if ending == "accumulator":
        total = cd.Accumulator.load(path)
        return {name: np.asarray(array).tobytes() for name, array in total.mean().items()}
    mean = path.with_name(f"mean{''.join(path.suffixes)}")
    cd.average_files([path, path], mean)
    with opened(open_model(mean)) as model:
        return {
            name: model.elements(name, 0, spec.num_elements).tobytes() for name, spec in model.tensors.items()
        }


def _written(ending: str, folder: Path) -> Path:
    arrays = {"a": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.array([1, 2**40]), "c": np.ones(())}
    if ending == "accumulator":
        total = cd.Accumulator("exact")
        for weight in (0.1, 1e30):
            total.add({name: array * 1e20 for name, array in arrays.items()}, weight)
        total.save(folder / "total.npz")
        return folder / "total.npz"
    np.savez(folder / "all.npz", **arrays)
    match ending:
        case ".npy":
            np.save(folder / "model.npy", arrays["a"])
        case ".npz":
            return folder / "all.npz"
        case "compressed":
            np.savez_compressed(folder / "model.npz", **arrays)
            return folder / "model.npz"
        case ".index.json":
            cd.average_files([folder / "all.npz"], folder / "one.safetensors")
            weights = dict.fromkeys(arrays, "one.safetensors")
            (folder / "model.index.json").write_text(
                json.dumps({"metadata": {"x": 1}, "weight_map": weights})
            )
        case ".pt":
            import torch

            tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
            torch.save({"model": tensors, "epoch": 3}, folder / "model.pt")
        case _:
            cd.average_files([folder / "all.npz"], folder / f"model{ending}")
    return folder / f"model{ending}"


def _damaged(data: bytes, damage: str, choose: random.Random) -> bytes:
    at = choose.randrange(len(data)) if data else 0
    if damage == "truncated" or not data:
        return data[:at]
    if damage == "longer":
        return data + choose.randbytes(choose.randrange(1, 100))
    if damage == "bits":
        return data[:at] + bytes([data[at] ^ 1 << choose.randrange(8)]) + data[at + 1 :]
    if damage == "number":
        numbers = [each.span() for each in itertools.islice(re.finditer(rb"[0-9]+", data), 1000)]
        if numbers:
            start, stop = choose.choice(numbers)
            return data[:start] + choose.choice(NUMBERS) + data[stop:]
    length = choose.randrange(1, 40)
    if damage == "repeated":
        return data[: at + length] + data[at:]
    if damage == "nested":
        opening = choose.choice([b"[", b'{"a":', b"("])
        return data[:at] + opening * choose.choice([1, 2000]) + data[at:]
    return data[:at] + choose.randbytes(length) + data[at + length :]
