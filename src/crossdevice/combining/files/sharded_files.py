"""Models in several safetensors files, with an index that says which tensor is in which."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from crossdevice.combining.files.model_file import (
    MAX_HEADER_BYTES,
    ModelFile,
    ModelWriter,
    TensorSpec,
    compare_digest,
    replaced,
    unreadable,
)
from crossdevice.combining.files.safetensors_files import SafetensorsFile, written_safetensors
from crossdevice.errors import FileError


class ShardedModel(ModelFile):
    """The files of an index, as one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            num_bytes = path.stat().st_size
            if num_bytes > MAX_HEADER_BYTES:
                raise unreadable(path, f"it has {num_bytes} bytes; expected at most {MAX_HEADER_BYTES}")
            text = path.read_bytes()
            self._digest = hashlib.sha256(text).hexdigest()
            self.index = json.loads(text)
            names = dict(self.index["weight_map"])
            dict(self.index.get("metadata") or {})
            files = sorted(set(names.values()))
        except FileError:
            raise
        except OSError as error:
            raise unreadable(path, error.strerror or error) from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, MemoryError) as error:
            raise unreadable(path, f"it is not an index of safetensors files: {error!r}") from error
        for file in files:
            # A model of the same shards is written elsewhere: a name must not lead out of its folder.
            if not isinstance(file, str) or not file.endswith(".safetensors") or Path(file).name != file:
                raise unreadable(
                    path,
                    f"it names the shard {file!r}; expected a .safetensors file of its own folder",
                )
        self.shards = {file: SafetensorsFile(path.parent / file) for file in files}
        self.shard_of = names
        self.tensors = {}
        for file, shard in self.shards.items():
            self.tensors.update(
                {name: spec for name, spec in shard.tensors.items() if names.get(name) == file}
            )
        for name, file in names.items():
            if name not in self.tensors:
                raise unreadable(path, f"tensor {name!r} should be in {file}, and is not")
        self.metadata = next(iter(self.shards.values())).metadata if files else None

    def elements(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Reads elements from their shard."""
        return self._shard(name).elements(name, start, stop)

    def read_ahead(self, name: str, start: int, stop: int) -> None:
        """Starts reading from the disk."""
        self._shard(name).read_ahead(name, start, stop)

    def is_before(self, name: str, other: str) -> bool:
        """Compares inside one shard."""
        return self.shard_of[name] == self.shard_of[other] and self._shard(name).is_before(name, other)

    def _shard(self, name: str) -> SafetensorsFile:
        return self.shards[self.shard_of[name]]

    def check_digest(self) -> None:
        """Compares the index with its SHA-256, and all shards with theirs."""
        compare_digest(self.path, self._digest)
        for shard in self.shards.values():
            shard.check_digest()

    def check_unchanged(self) -> None:
        """Checks all shards."""
        for shard in self.shards.values():
            shard.check_unchanged()

    def close(self) -> None:
        """Closes all shards."""
        for shard in self.shards.values():
            shard.close()


@contextlib.contextmanager
def written_shards(path: Path, tensors: Mapping[str, TensorSpec], like: ModelFile) -> Iterator[ModelWriter]:
    """Writes the same shards as another model has, then their index; new tensors go to the last shard."""
    if not isinstance(like, ShardedModel):
        raise FileError(
            f"{path} is an index of several files, but {like.path} is one file; expected an output that ends "
            "in .safetensors"
        )
    by_shard: dict[str, dict[str, TensorSpec]] = {file: {} for file in like.shards}
    last = list(like.shards)[-1]
    for name, spec in tensors.items():
        by_shard[like.shard_of.get(name, last)][name] = spec
    index = {**like.index, "weight_map": {name: file for file, named in by_shard.items() for name in named}}
    total = sum(spec.num_bytes for spec in tensors.values())
    index["metadata"] = {**(like.index.get("metadata") or {}), "total_size": total}
    with contextlib.ExitStack() as stack:
        # Renamed from the last one entered: the index, which makes them a model, at the very end.
        index_file = stack.enter_context(replaced(path))
        index_file.write(json.dumps(index, indent=2).encode())
        writers = {
            file: stack.enter_context(written_safetensors(path.parent / file, named, like))
            for file, named in by_shard.items()
            if named
        }
        writer_of = {name: writers[file] for file, named in by_shard.items() for name in named}
        yield ModelWriter(
            lambda name, start, elements: writer_of[name].write(name, start, elements),
            is_before=lambda name, other: (
                writer_of[name] is writer_of[other] and writer_of[name].is_before(name, other)
            ),
        )
