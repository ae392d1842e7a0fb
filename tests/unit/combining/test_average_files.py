"""Means of models in files: right, in any format, and nothing is left of what went wrong."""

from __future__ import annotations

import io
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

import crossdevice as cd
from conformance.oracle import rounded
from crossdevice.combining import average_files as module
from crossdevice.combining.files.formats import new_model, open_model
from crossdevice.combining.files.model_file import ModelFile, TensorSpec, replaced
from crossdevice.combining.files.safetensors_files import SafetensorsFile
from crossdevice.errors import (
    DtypeMismatchError,
    FileError,
    MismatchError,
    OptionError,
    ShapeMismatchError,
    StructureMismatchError,
)

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
WEIGHTS = [3, 1, 0.5]


class Made(ModelFile):
    """What written files are made after."""

    def __init__(self, metadata=None):
        self.metadata = metadata

    def elements(self, name, start, stop): ...

    def check_digest(self): ...

    def close(self): ...


def write(path, arrays, metadata=None):
    tensors = {name: TensorSpec(array.dtype.name, array.shape) for name, array in arrays.items()}
    with new_model(path, tensors, Made(metadata)) as writer:
        for name, array in arrays.items():
            writer.write(name, 0, array.reshape(-1))
    return path


def read(path):
    model = open_model(path)
    arrays = {
        name: model.elements(name, 0, spec.num_elements).reshape(spec.shape).copy()
        for name, spec in model.tensors.items()
    }
    model.close()
    return arrays


def model(seed, **others):
    random = np.random.default_rng(seed)
    return {
        "wide": random.standard_normal((7, 5)),
        "weight": random.standard_normal((300, 11)).astype(np.float32),
        "half": random.standard_normal(33).astype(np.float16),
        "scalar": np.array(random.standard_normal(), np.float32),
        "empty": np.empty((0, 3), np.float32),
        "steps": random.integers(0, 100, 3),
        **others,
    }


def with_brain(seed):
    random = np.random.default_rng(seed + 100)
    return model(
        seed, brain=random.standard_normal((4, 9)).astype(BFLOAT16), mask=random.integers(0, 2, 5) == 1
    )


def true_mean(arrays, weights):
    dtype = arrays[0].dtype
    columns = zip(*(array.reshape(-1).tolist() for array in arrays), strict=True)
    divisor = sum(map(Fraction, weights))
    means = [
        sum(Fraction(w) * Fraction(x) for w, x in zip(weights, c, strict=True)) / divisor for c in columns
    ]
    if dtype.kind in "iub":
        return np.array([round(mean) for mean in means], dtype).reshape(arrays[0].shape)
    return np.array([rounded(mean, dtype.name) for mean in means]).astype(dtype).reshape(arrays[0].shape)


@pytest.mark.parametrize("ending", [".safetensors", ".npz", ".pt"])
def test_the_mean_of_files_is_the_mean_of_their_tensors(ending, tmp_path, monkeypatch):
    if ending == ".pt":
        pytest.importorskip("torch")
    monkeypatch.setattr(module, "RANGE_BYTES", 4096)
    monkeypatch.setattr(module, "SMALLEST_RANGE_BYTES", 1024)
    monkeypatch.setattr(module, "num_threads", lambda: 3)
    models = [(model if ending == ".npz" else with_brain)(seed) for seed in range(3)]
    paths = [write(tmp_path / f"{k}{ending}", arrays) for k, arrays in enumerate(models)]
    output, seen = tmp_path / f"mean{ending}", []
    cd.average_files(paths, output, WEIGHTS, precision="exact", progress=lambda *pair: seen.append(pair))
    found = read(output)
    assert found.keys() == models[0].keys()
    for name, array in found.items():
        right = true_mean([each[name] for each in models], WEIGHTS)
        assert array.dtype == right.dtype
        np.testing.assert_array_equal(array, right, err_msg=name)
    backwards = tmp_path / f"backwards{ending}"
    cd.average_files(paths[::-1], backwards, WEIGHTS[::-1], precision="exact")
    assert all(read(backwards)[name].tobytes() == array.tobytes() for name, array in found.items())
    for weights in (WEIGHTS, None):
        cd.average_files(paths, output, weights)
        total = cd.Accumulator()
        for arrays, weight in zip(models, weights or [1] * len(models), strict=True):
            total.add(arrays, weight)
        for name, array in read(output).items():
            assert array.tobytes() == total.mean()[name].tobytes(), name
    assert seen[-1][0] == seen[-1][1] == sum(array.nbytes for each in models for array in each.values())
    assert sorted(seen) == seen


@pytest.mark.more("safetensors")
def test_the_safetensors_library_reads_what_is_written_and_writes_what_is_read(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    models = [model(seed) for seed in range(2)]
    for number, arrays in enumerate(models):
        safetensors.save_file(
            arrays, tmp_path / f"{number}.safetensors", {"format": "pt", "who": str(number)}
        )
    output = tmp_path / "mean.safetensors"
    cd.average_files([tmp_path / "0.safetensors", tmp_path / "1.safetensors"], output, precision="exact")
    for name, array in safetensors.load_file(output).items():
        np.testing.assert_array_equal(array, true_mean([each[name] for each in models], [1, 1]))
    with pytest.importorskip("safetensors").safe_open(output, "np") as file:
        assert file.metadata() == {"format": "pt", "who": "0"}


def sharded(folder, seed):
    folder.mkdir()
    arrays = model(seed)
    names = {name: f"model-0000{1 + (name > 'f')}-of-00002.safetensors" for name in arrays}
    for file in set(names.values()):
        write(folder / file, {name: arrays[name] for name in arrays if names[name] == file})
    index = {"metadata": {"total_size": 1, "kept": True}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_sharded_models_are_read_as_one_and_written_as_the_first_is(tmp_path):
    folders = [sharded(tmp_path / str(seed), seed) for seed in range(3)]
    single = tmp_path / "mean.safetensors"
    cd.average_files([folders[0], folders[1] / "model.safetensors.index.json", folders[2]], single)
    (tmp_path / "out").mkdir()
    cd.average_files(folders, tmp_path / "out")
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert written == sorted(path.name for path in folders[0].iterdir())
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(a.nbytes for a in model(0).values()), "kept": True}
    one, many = read(single), read(tmp_path / "out")
    assert one.keys() == many.keys() == model(0).keys()
    assert all(one[name].tobytes() == many[name].tobytes() for name in one)
    with pytest.raises(FileError, match=r"is an index of several files, but .*mean.safetensors is one file"):
        cd.average_files([single], tmp_path / "model.safetensors.index.json")
    (folders[1] / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileError, match="model-00002-of-00002"):
        cd.average_files(folders, tmp_path / "out")


@pytest.mark.parametrize("shard", ["../victim.safetensors", "{}/victim.safetensors", "config.json", 3, ["x"]])
def test_an_index_cannot_name_files_outside_of_its_folder(shard, tmp_path):
    shard = shard.format(tmp_path) if isinstance(shard, str) else shard
    victim = write(tmp_path / "victim.safetensors", {"a": np.float32([1])})
    (tmp_path / "model").mkdir()
    (tmp_path / "out").mkdir()
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": shard}}))
    before = victim.stat()
    with pytest.raises(FileError, match=r"index.json cannot be read: it "):
        cd.average_files([index], tmp_path / "out")
    assert victim.stat() == before
    assert not list((tmp_path / "out").iterdir())


def test_numpy_files_may_be_compressed_or_in_another_order(tmp_path):
    arrays = [np.asfortranarray(np.arange(6.0).reshape(2, 3)) + k for k in range(2)]
    np.savez_compressed(tmp_path / "0.npz", a=arrays[0])
    np.savez(tmp_path / "1.npz", a=arrays[1].astype(">f8"))
    cd.average_files([tmp_path / "0.npz", tmp_path / "1.npz"], tmp_path / "mean.npz")
    np.testing.assert_array_equal(np.load(tmp_path / "mean.npz")["a"], arrays[0] + 0.5)
    for number, array in enumerate(arrays):
        np.save(tmp_path / f"{number}.npy", array)
    cd.average_files([tmp_path / "0.npy", tmp_path / "1.npy"], tmp_path / "mean.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "mean.npy"), arrays[0] + 0.5)
    np.savez(tmp_path / "two.npz", a=arrays[0], b=arrays[0])
    with pytest.raises(FileError, match="can hold one array, not 2"):
        cd.average_files([tmp_path / "two.npz"], tmp_path / "mean.npy")


def test_pytorch_loads_one_of_files_that_differ_in_elements_alone(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    loaded = []
    load = torch.load
    monkeypatch.setattr(
        torch, "load", lambda path, **options: loaded.append(path.name) or load(path, **options)
    )

    def save(name, step=0, **others):
        tied = torch.arange(6.0).reshape(2, 3) + step
        model = {"a": tied, "sub": {"tied": tied, "part": tied[1:]}, "n": torch.tensor(step), **others}
        torch.save(model, tmp_path / f"{name}.pt")

    def mean_of(*names):
        loaded.clear()
        cd.average_files([tmp_path / f"{name}.pt" for name in names], tmp_path / "mean.pt")
        return load(tmp_path / "mean.pt", weights_only=True)

    save("first")
    save("a file of a longer name", 2)
    save("third", 4)
    found = mean_of("first", "a file of a longer name", "third")
    assert loaded == ["first.pt"]
    assert found["a"].tolist() == found["sub"]["tied"].tolist() == [[2, 3, 4], [5, 6, 7]]
    assert found["sub"]["part"].tolist() == [[5, 6, 7]]
    assert found["n"] == 2
    save("of another step", 2, epoch=7)  # as many bytes of elements, with other contents around them
    assert mean_of("first", "of another step")["a"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert loaded == ["first.pt", "of another step.pt"]
    swapped = {"a": torch.zeros(3, 2), "sub": {"tied": torch.zeros(2, 3)}}
    torch.save(swapped, tmp_path / "swapped.pt")
    with pytest.raises(MismatchError, match=r"swapped\.pt"):
        mean_of("first", "swapped")
    data = bytearray((tmp_path / "third.pt").read_bytes())
    place = data.index(torch.tensor([4.0, 5.0]).numpy().tobytes())
    data[place] ^= 1
    (tmp_path / "third.pt").write_bytes(data)
    with pytest.raises(FileError, match=r"third\.pt cannot be read: member .* has CRC-32"):
        mean_of("first", "third")


def test_what_is_around_the_tensors_of_pytorch_is_kept_and_no_code_is_run(tmp_path):
    torch = pytest.importorskip("torch")
    for number in range(2):
        state = {"w": torch.nn.Parameter(torch.full((2,), float(number)))}
        averages = ["ema", (torch.full((1,), 4.0 * number),)]
        torch.save(
            {"model": state, "epoch": 7 + number, "names": ["a"], "averages": averages},
            tmp_path / f"{number}.pt",
        )
    cd.average_files([tmp_path / "0.pt", tmp_path / "1.pt"], tmp_path / "mean.pt")
    found = torch.load(tmp_path / "mean.pt", weights_only=True)
    assert found["model"]["w"].tolist() == [0.5, 0.5]
    assert (found["epoch"], found["names"]) == (7, ["a"])
    assert found["averages"] == ["ema", (torch.tensor([2.0]),)]
    (tmp_path / "text.pt").write_bytes(b"hello")
    torch.save({"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}, tmp_path / "ambiguous.pt")
    for name, message in (
        ("text", "PyTorch does not load it"),
        ("ambiguous", "two of its tensors are called 'a.b'"),
    ):
        with pytest.raises(FileError, match=f"{name}.pt cannot be read: {message}"):
            cd.average_files([tmp_path / f"{name}.pt"], tmp_path / "mean.pt")

    class Harmful:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "code was run"),)

    torch.save({"w": torch.ones(2), "harm": Harmful()}, tmp_path / "harmful.pt")
    with pytest.raises(FileError, match=r"harmful.pt cannot be read: it holds more than tensors"):
        cd.average_files([tmp_path / "harmful.pt"], tmp_path / "mean.pt")
    assert not (tmp_path / "code was run").exists()
    cd.average_files([tmp_path / "0.pt"], tmp_path / "converted.safetensors")
    assert read(tmp_path / "converted.safetensors")["model.w"].tolist() == [0, 0]


def test_a_dtype_may_be_asked_for_and_makes_different_ones_fit(tmp_path):
    values = np.float32([1.0, 1 + 2.0**-8, 3.0])
    paths = [
        write(tmp_path / "0.safetensors", {"a": values, "n": np.array([1])}),
        write(tmp_path / "1.safetensors", {"a": values.astype(BFLOAT16), "n": np.array([2])}),
    ]
    with pytest.raises(DtypeMismatchError, match=r"file 1 \(.*\) has dtype bfloat16 at 'a'; file 0 .*dtype="):
        cd.average_files(paths, tmp_path / "mean.safetensors")
    for precision in ("accurate", "exact"):
        cd.average_files(paths, tmp_path / "mean.safetensors", dtype="float64", precision=precision)
        found = read(tmp_path / "mean.safetensors")
        assert found["a"].dtype == np.float64
        assert found["a"].tolist() == [1.0, 1 + 2.0**-9, 3.0]
        assert found["n"].tolist() == [2], "1.5 to nearest even"


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_floats_of_8_bits_are_averaged(name, tmp_path):
    dtype = np.dtype(getattr(ml_dtypes, name))
    values = [np.float32([1, 2, 0.5]), np.float32([2, 3.5, 0.5])]
    paths = [
        write(tmp_path / f"{k}.safetensors", {"a": value.astype(dtype)}) for k, value in enumerate(values)
    ]
    total = cd.Accumulator("exact")
    for value in values:
        total.add(value.astype(dtype))
    for precision in ("accurate", "exact"):
        cd.average_files(paths, tmp_path / "mean.safetensors", precision=precision)
        found = read(tmp_path / "mean.safetensors")["a"]
        assert found.dtype == dtype
        assert found.astype(np.float32).tolist() == [1.5, 2.75 if name == "float8_e4m3fn" else 3.0, 0.5]
        assert found.tobytes() == total.mean().tobytes()
        other = write(tmp_path / "other.safetensors", {"a": values[1]})
        for second in (paths[1], other):
            cd.average_files(
                [paths[0], second], tmp_path / "wide.safetensors", dtype="float32", precision=precision
            )
            wide = read(tmp_path / "wide.safetensors")["a"]
            assert (wide.dtype, wide.tolist()) == (np.float32, [1.5, 2.75, 0.5])


def test_tensors_that_not_all_files_have_follow_the_policy(tmp_path):
    paths = [
        write(tmp_path / "0.npz", {"a": np.float32([1]), "b": np.float32([1])}),
        write(tmp_path / "1.npz", {"a": np.float32([4]), "c": np.float32([8])}),
        write(tmp_path / "2.npz", {"a": np.float32([4]), "b": np.float32([5])}),
    ]
    output = tmp_path / "mean.npz"
    with pytest.raises(StructureMismatchError, match=r"file 1 \(.*1.npz\) has 'c', which no other file has"):
        cd.average_files(paths, output)
    with pytest.raises(StructureMismatchError, match=r"file 1 \(.*3.npz\) lacks 'b'"):
        cd.average_files([paths[0], write(tmp_path / "3.npz", {"a": np.float32([1])})], output)
    assert not output.exists()
    cd.average_files(paths, output, [1, 1, 3], keys="union")
    assert {k: v.tolist() for k, v in read(output).items()} == {"a": [3.4000000953674316], "b": [4], "c": [8]}
    cd.average_files(paths, output, keys="intersection")
    assert {k: v.tolist() for k, v in read(output).items()} == {"a": [3]}


def test_integers_follow_the_policy(tmp_path):
    paths = [write(tmp_path / f"{k}.npz", {"n": np.array([k, 9 - k])}) for k in (2, 4, 9)]
    for policy, right in (("mean", [5, 4]), ("first", [2, 7]), ("max", [9, 7])):
        cd.average_files(paths, tmp_path / "mean.npz", integers=policy)
        assert read(tmp_path / "mean.npz")["n"].tolist() == right


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"weights": [1]}, "1 weight for 2 files"),
        ({"weights": [0, 0]}, "weights"),
        ({"weights": [1, float("nan")]}, "weights"),
        ({"precision": "fast"}, "precision"),
        ({"dtype": "int8"}, "dtype"),
        ({"integers": "min"}, "integers"),
        ({"keys": "some"}, "keys"),
    ],
)
def test_bad_options_are_refused(keywords, message, tmp_path):
    paths = [write(tmp_path / f"{k}.npz", {"a": np.float32([1])}) for k in range(2)]
    with pytest.raises(OptionError, match=message):
        cd.average_files(paths, tmp_path / "mean.npz", **keywords)
    for given in ([], None, 3, str(paths[0]), paths[0], bytes(paths[0]), set(paths), dict.fromkeys(paths, 1)):
        with pytest.raises(OptionError, match="list of at least one file"):
            cd.average_files(given, tmp_path / "mean.npz")
    with pytest.raises(OptionError, match=r"^paths\[1\] is 3, an int; expected a path"):
        cd.average_files([paths[0], 3], tmp_path / "mean.npz")
    with pytest.raises(OptionError, match=r"^output is None, a NoneType; expected a path"):
        cd.average_files(paths, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.npz", "1.npz"]


def test_paths_may_be_of_any_kind_and_come_one_by_one(tmp_path):
    paths = [write(tmp_path / f"{k}.npz", {"a": np.float32([k])}) for k in range(3)]
    given = (kind(path) for kind, path in zip((str, bytes, type(paths[0])), paths, strict=True))
    cd.average_files(given, bytes(tmp_path / "mean.npz"), weights=[0, 1, 1])
    assert read(tmp_path / "mean.npz")["a"].tolist() == [1.5]


def test_models_without_a_common_tensor_are_refused(tmp_path):
    paths = [write(tmp_path / f"{name}.npz", {name: np.float32([1])}) for name in "ab"]
    np.savez(tmp_path / "empty.npz")
    for given, keys in ((paths, "intersection"), ([tmp_path / "empty.npz"], "strict")):
        with pytest.raises(StructureMismatchError, match="there is nothing to average: no tensor is in "):
            cd.average_files(given, tmp_path / "mean.npz", keys=keys)
    with pytest.raises(OptionError, match="weights of the files that have 'a' are all 0"):
        cd.average_files(paths, tmp_path / "mean.npz", weights=[0, 1], keys="union")
    assert not (tmp_path / "mean.npz").exists()


def with_header(header, data):
    return len(header).to_bytes(8, "little") + header + data


def broken(tmp_path, what):
    good = write(tmp_path / "good.safetensors", {"a": np.float32([1, 2]), "b": np.float32([3])})
    data = good.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length]
    made = {
        "truncated": data[:-2],
        "header only in part": data[:20],
        "empty": b"",
        "no JSON": data[:8] + b"x" * length + data[8 + length :],
        "a JSON list": (2).to_bytes(8, "little") + b"[]",
        "an unknown dtype": data[:8] + header.replace(b'"F32"', b'"F99"', 1) + data[8 + length :],
        "another size": data[:8] + header.replace(b"[2]", b"[3]") + data[8 + length :],
        "a shape of floats": with_header(header.replace(b"[2]", b"[2.0]"), b"1234" * 3),
        "a negative shape": with_header(header.replace(b"[2]", b"[-2]"), b"1234" * 3),
        "an overlap": with_header(header.replace(b"[8,12]", b"[4,8]"), b"1234" * 2),
        "a gap": with_header(header.replace(b"[8,12]", b"[12,16]"), b"1234" * 4),
        "a name twice": with_header(header.replace(b'"b"', b'"a"'), b"1234" * 3),
        "more bytes": data + b"1234",
        "lists in lists": with_header(b"[" * 100_000, b""),
        "no offsets": data[:8] + header.replace(b"data_offsets", b"data_offsetz") + data[8 + length :],
    }[what]
    (tmp_path / "bad.safetensors").write_bytes(made)
    return good, tmp_path / "bad.safetensors"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("truncated", "tensor 'b' ends at byte .* the file is truncated"),
        ("header only in part", "fewer than its header"),
        ("empty", "has 0 bytes"),
        ("no JSON", "not valid JSON"),
        ("a JSON list", "not a JSON object"),
        ("an unknown dtype", "tensor 'a' has dtype F99; expected one of F64"),
        ("another size", r"tensor 'a' has 8 bytes; shape \[3\] of F32 needs 12"),
        ("a shape of floats", r"tensor 'a' has shape \[2.0\]; expected whole numbers"),
        ("a negative shape", r"tensor 'a' has shape \[-2\]; expected whole numbers"),
        ("an overlap", "tensor 'b' does not begin where the one before it ends"),
        ("a gap", "tensor 'b' does not begin where the one before it ends"),
        ("a name twice", "'a' is in it twice"),
        ("more bytes", "its tensors end at byte"),
        ("lists in lists", "not valid JSON"),
        ("no offsets", "not one of safetensors"),
    ],
)
def test_files_that_are_broken_are_named_and_no_output_is_left(what, message, tmp_path):
    good, bad = broken(tmp_path, what)
    with pytest.raises(FileError, match=f"bad.safetensors cannot be read: .*{message}"):
        cd.average_files([good, bad], tmp_path / "mean.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.safetensors", "good.safetensors"]


def test_the_odd_shape_is_named_with_its_file_and_tensor(tmp_path):
    paths = [write(tmp_path / f"{k}.npz", {"a": np.ones((2, 3 + (k == 1)), np.float32)}) for k in range(3)]
    with pytest.raises(
        ShapeMismatchError, match=r"file 1 \(.*1.npz\) has shape \(2, 4\) at 'a'; the other 2 have \(2, 3\)"
    ):
        cd.average_files(paths, tmp_path / "mean.npz")


def test_other_mistakes_with_files_are_explained(tmp_path):
    good = write(tmp_path / "good.npz", {"a": np.ones(2, np.float32)})
    (tmp_path / "bad.npz").write_bytes(good.read_bytes()[:60])
    (tmp_path / "text.npy").write_text("no array at all")
    for paths, output, message in [
        ([good, tmp_path / "none.npz"], "mean.npz", "none.npz does not exist"),
        ([good], "mean.onnx", "unknown ending; expected one of .safetensors"),
        ([good], "no folder/mean.npz", "there is no folder"),
        ([good], "folder", "a folder has to exist"),
        ([tmp_path / "bad.npz"], "mean.npz", "bad.npz cannot be read"),
        ([tmp_path / "text.npy"], "mean.npz", "text.npy cannot be read"),
        ([tmp_path], "mean.npz", "model.safetensors does not exist"),
        ([good], f"{'long' * 100}.npz", "cannot be written: File name too long"),
        ([tmp_path / f"{'long' * 100}.npz"], "mean.npz", "cannot be read: File name too long|does not exist"),
        ([good], "no\0name.npz", "cannot be written"),
    ]:
        with pytest.raises(FileError, match=message):
            cd.average_files(paths, tmp_path / output)
    for name in ("float8_e4m3fn", "float8_e5m2", "bfloat16"):
        brain = write(tmp_path / "b.safetensors", {"a": np.ones(2, getattr(ml_dtypes, name))})
        with pytest.raises(FileError, match=f"NumPy's files have no {name}"):
            cd.average_files([brain], tmp_path / "mean.npz")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "b.safetensors",
        "bad.npz",
        "good.npz",
        "text.npy",
    ]


@pytest.mark.parametrize("ending", [".safetensors", ".npz", ".npy"])
def test_a_full_disk_is_named_and_no_output_is_left(ending, tmp_path, monkeypatch):
    path = write(tmp_path / f"0{ending}", {"array": np.ones(1000, np.float32)})
    (tmp_path / f"mean{ending}").write_text("the old one")
    full = OSError(28, "No space left on device")

    def fails(*_):
        raise full

    monkeypatch.setattr(module, "_mean", fails)
    with pytest.raises(FileError, match=f"mean{ending} cannot be written: No space left on device"):
        cd.average_files([path], tmp_path / f"mean{ending}")
    assert sorted(each.name for each in tmp_path.iterdir()) == [f"0{ending}", f"mean{ending}"]
    assert (tmp_path / f"mean{ending}").read_text() == "the old one"


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="no posix_fallocate here")
def test_a_disk_that_is_too_small_is_found_out_before_any_work(tmp_path, monkeypatch):
    path = write(tmp_path / "0.safetensors", {"array": np.ones(10, np.float32)})

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(module, "_mean", lambda *_: pytest.fail("worked"))
    with pytest.raises(FileError, match=r"mean.safetensors cannot be written: No space left"):
        cd.average_files([path], tmp_path / "mean.safetensors")
    assert [each.name for each in tmp_path.iterdir()] == ["0.safetensors"]


def test_what_pytorch_says_of_a_full_disk_becomes_an_error_that_names_the_file(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    from crossdevice.combining.files import torch_files

    class FillsUp(io.BytesIO):
        def write(self, data):
            if self.tell() > 1000:
                raise OSError(28, "No space left on device")
            return super().write(data)

    torch.save({"a": torch.ones(100_000)}, tmp_path / "0.pt")
    monkeypatch.setattr(torch_files, "replaced", lambda _: FillsUp())
    with pytest.raises(FileError, match=r"mean.pt cannot be written: No space left on device"):
        cd.average_files([tmp_path / "0.pt"], tmp_path / "mean.pt")


def test_an_input_may_be_the_output(tmp_path):
    paths = [write(tmp_path / f"{k}.safetensors", {"a": np.float32([k])}) for k in (1, 2)]
    cd.average_files(paths, paths[0])
    assert read(paths[0])["a"].tolist() == [1.5]


def test_what_goes_wrong_in_one_thread_ends_all_of_them(tmp_path, monkeypatch):
    path = write(tmp_path / "0.safetensors", {"a": np.ones(100_000, np.float32)})
    monkeypatch.setattr(module, "RANGE_BYTES", 4096)
    monkeypatch.setattr(module, "SMALLEST_RANGE_BYTES", 1024)
    monkeypatch.setattr(module, "num_threads", lambda: 3)
    meet, calls = threading.Barrier(3, timeout=60), []

    def mean(part, *_):
        calls.append(part.start)
        if len(calls) <= 3:
            meet.wait()
        if part.start == 0:
            raise OSError(28, "No space left on device")
        time.sleep(0.05)
        return np.ones(part.stop - part.start, np.float32)

    monkeypatch.setattr(module, "_mean", mean)
    with pytest.raises(FileError, match=r"mean.safetensors cannot be written: No space left"):
        cd.average_files([path], tmp_path / "mean.safetensors")
    assert 0 in calls
    assert len(calls) < 20, "of 98 ranges or more"


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="nobody says here what is in memory")
@pytest.mark.parametrize("is_in_memory", [True, False])
def test_the_disk_is_asked_for_what_is_not_in_memory_only(tmp_path, monkeypatch, is_in_memory):
    array, asked = np.arange(1000, dtype=np.float32), []
    np.save(tmp_path / "a.npy", array)

    preadv = os.preadv

    def nothing_is_there(*arguments):
        if len(arguments) > 3:  # whether a byte can be read without waiting
            raise BlockingIOError
        return preadv(*arguments)

    if not is_in_memory:
        monkeypatch.setattr(os, "preadv", nothing_is_there)
    monkeypatch.setattr(os, "posix_fadvise", lambda _, start, length, advice: asked.append((start, length)))
    cd.average_files([tmp_path / "a.npy"], tmp_path / "mean.npy")
    assert asked == ([] if is_in_memory else [(0, os.path.getsize(tmp_path / "a.npy"))])
    assert np.load(tmp_path / "mean.npy").tolist() == array.tolist()


@pytest.mark.parametrize("ending", [".safetensors", ".npz", ".pt"])
def test_files_that_are_written_to_meanwhile_are_refused(tmp_path, ending):
    paths = [write(tmp_path / f"{k}{ending}", model(k)) for k in range(2)]

    def write_again(*_):
        with paths[1].open("r+b") as file:
            first = file.read(1)
            file.seek(0)
            file.write(first)

    with pytest.raises(FileError, match=rf"1\{ending} cannot be read: it was written to meanwhile"):
        cd.average_files(paths, tmp_path / f"mean{ending}", progress=write_again)
    assert sorted(tmp_path.iterdir()) == paths

    def replace(*_):
        write(paths[1], model(7))  # a new file in its place: the old one is read to its end

    before = [read(path) for path in paths]
    cd.average_files(paths, tmp_path / f"mean{ending}", progress=replace)
    expected = cd.reduce([each["wide"] for each in before], "mean")
    assert np.array_equal(read(tmp_path / f"mean{ending}")["wide"], expected)


def test_a_file_that_is_truncated_meanwhile_does_not_end_the_process(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "num_threads", lambda: 1)
    path = write(tmp_path / "0.safetensors", {"a": np.zeros(100_000), "b": np.zeros(100_000, np.float32)})

    def truncate(*_):
        os.truncate(path, 10_000)

    with pytest.raises(FileError, match=r"0\.safetensors cannot be read: it was truncated meanwhile"):
        cd.average_files([path], tmp_path / "mean.safetensors", progress=truncate)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("ending", [".safetensors", ".npz", ".pt", ".index.json"])
def test_pipes_are_refused_instead_of_waited_for(tmp_path, ending):
    pipe = tmp_path / f"model{ending}"
    os.mkfifo(pipe)
    with pytest.raises(FileError, match="is not a regular file"):
        cd.average_files([pipe], tmp_path / "mean.safetensors")


def test_a_pipe_is_not_replaced_by_a_file(tmp_path):
    good = write(tmp_path / "good.npz", {"a": np.float32([1])})
    os.mkfifo(tmp_path / "mean.npz")
    with pytest.raises(FileError, match=r"mean\.npz cannot be written: it is not a regular file"):
        cd.average_files([good], tmp_path / "mean.npz")
    assert (tmp_path / "mean.npz").is_fifo()


def test_tied_tensors_of_pytorch_stay_tied_where_all_files_agree(tmp_path):
    torch = pytest.importorskip("torch")
    paths = [tmp_path / f"{k}.pt" for k in range(3)]
    for number, path in enumerate(paths):
        table, head = torch.full((2, 3), float(number)), torch.full((2, 3), float(7))
        torch.save({"table": table, "head": head if number == 2 else table, "empty": table[:0]}, path)
    for chosen, are_tied in ((paths[:2], True), (paths, False)):
        cd.average_files(chosen, tmp_path / "mean.pt")
        mean = torch.load(tmp_path / "mean.pt")
        assert (mean["head"].data_ptr() == mean["table"].data_ptr()) is are_tied
        assert torch.equal(mean["head"], torch.full((2, 3), 0.5 if are_tied else 8 / 3))


ENDS_WHILE_IT_WRITES = """
import os, signal, sys
from pathlib import Path
from crossdevice.combining.files.model_file import replaced

with replaced(Path(sys.argv[1])) as file:
    file.write(b"new")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="the system has no files without a name")
def test_killed_processes_leave_nothing_behind(tmp_path):
    (tmp_path / "old").write_bytes(b"old")
    # Not a fork: other tests may have started threads of JAX, which warns of that.
    killed = subprocess.run([sys.executable, "-c", ENDS_WHILE_IT_WRITES, tmp_path / "old"], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("old", b"old")]


@pytest.mark.parametrize("has_names", [True, False])
def test_new_files_have_the_permissions_of_any_new_file(tmp_path, monkeypatch, has_names):
    if has_names:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    (tmp_path / "any").touch()
    with replaced(tmp_path / "new") as file:
        file.write(b"new")
        assert len(list(tmp_path.iterdir())) == 1 + (has_names or not hasattr(os, "O_TMPFILE"))
    assert (tmp_path / "new").read_bytes() == b"new"
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "any").stat().st_mode


@pytest.mark.parametrize("has_names", [True, False])
def test_a_file_that_others_may_not_read_is_replaced_by_one_that_they_may_not_read(
    tmp_path, monkeypatch, has_names
):
    if has_names:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    (tmp_path / "secret").touch(0o600)
    with replaced(tmp_path / "secret") as file:
        assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == 0o600  # from the beginning
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600


@pytest.mark.parametrize("has_names", [True, False])
def test_a_name_may_be_as_long_as_the_system_allows(tmp_path, monkeypatch, has_names):
    if has_names:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    name = "x" * os.pathconf(tmp_path, "PC_NAME_MAX")
    with replaced(tmp_path / name) as file:
        file.write(b"new")
    assert (tmp_path / name).read_bytes() == b"new"


@pytest.mark.parametrize("ending", ["safetensors", "npz"])
def test_many_small_tensors_cost_few_reads_or_few_headers(tmp_path, monkeypatch, ending):
    count = 300
    random = np.random.default_rng(0)
    models = [
        {
            f"w{n:03}": random.standard_normal(n % 3).astype(np.float32 if n < 200 else BFLOAT16)
            for n in range(count)
        }
        for _ in range(3)
    ]
    if ending == "npz":  # which has no bfloat16
        models = [{name: array.astype(np.float64) for name, array in model.items()} for model in models]
    paths = [write(tmp_path / f"{number}.{ending}", model) for number, model in enumerate(models)]
    calls = []
    reads = (
        (SafetensorsFile, "elements") if ending == "safetensors" else (np.lib.format, "read_array_header_2_0")
    )
    original = getattr(*reads)
    monkeypatch.setattr(*reads, lambda *given: calls.append(given) or original(*given))
    cd.average_files(paths, tmp_path / f"mean.{ending}", WEIGHTS)
    assert 0 < len(calls) <= 6
    found = read(tmp_path / f"mean.{ending}")
    assert found.keys() == models[0].keys()
    for name in list(models[0])[1::49]:
        alone = [
            write(tmp_path / f"alone{number}.{ending}", {name: model[name]})
            for number, model in enumerate(models)
        ]
        cd.average_files(alone, tmp_path / f"one.{ending}", WEIGHTS)
        assert found[name].tobytes() == read(tmp_path / f"one.{ending}")[name].tobytes(), name


def test_tensors_in_another_order_in_one_file_and_those_some_lack_are_averaged_by_name(tmp_path):
    names = [f"w{n}" for n in range(8)]
    models = [
        {name: np.full(3, 10 * number + place, np.float32) for place, name in enumerate(order)}
        for number, order in enumerate([names, names[::-1], names[:3] + names[4:]])
    ]
    paths = [write(tmp_path / f"{number}.safetensors", model) for number, model in enumerate(models)]
    cd.average_files(paths, tmp_path / "mean.safetensors", keys="union")
    found = read(tmp_path / "mean.safetensors")
    for name in names:
        expected = np.mean([model[name] for model in models if name in model], axis=0, dtype=np.float64)
        np.testing.assert_array_equal(found[name], expected.astype(np.float32))
