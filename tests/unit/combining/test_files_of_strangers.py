"""Files that are broken, or made to break readers: an error that names them, before memory is taken."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import resource
import subprocess
import sys
import tracemalloc
import zipfile

import numpy as np
import pytest

import crossdevice as cd
from crossdevice.combining import average_files as module
from crossdevice.combining.files.formats import open_model
from crossdevice.errors import FileError

MIB = 1 << 20


def npz(path, arrays, *, save=np.savez):
    save(path, **arrays)
    return path


def with_a_bit_turned(path, data):
    """The same file with one bit of these bytes of it turned over."""
    found = bytearray(path.read_bytes())
    at = found.index(data)
    found[at + len(data) // 2] ^= 4
    path.write_bytes(found)


def averaged(path):
    output = path.with_name(f"mean{path.suffix}")
    cd.average_files([path, path], output)
    return output


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("num_elements", [6, 300_000])
def test_a_bit_that_has_turned_in_an_npz_is_found(order, num_elements, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "RANGE_BYTES", 1 << 18)
    array = np.arange(num_elements, dtype=np.float64).reshape(2, -1, order=order)
    path = npz(tmp_path / "model.npz", {"first": np.ones(3), "weight": array})
    assert np.array_equal(np.load(averaged(path))["weight"], array)
    with_a_bit_turned(path, array.tobytes("A")[-40:])
    with pytest.raises(
        FileError, match=r"model\.npz cannot be read: .*(CRC-32 .* 'weight\.npy'|'weight\.npy' has CRC-32)"
    ):
        averaged(path)


def test_a_bit_that_has_turned_in_a_compressed_npz_or_in_a_header_is_found(tmp_path):
    path = npz(tmp_path / "a.npz", {"a": np.arange(1000.0)}, save=np.savez_compressed)
    found = bytearray(path.read_bytes())
    found[len(found) // 2] ^= 16
    path.write_bytes(found)
    with pytest.raises(FileError, match=r"a\.npz cannot be read"):
        averaged(path)
    path = npz(tmp_path / "b.npz", {"a": np.arange(1000.0)})
    with_a_bit_turned(path, b" \n")  # the padding of the header
    with pytest.raises(FileError, match=r"b\.npz cannot be read"):
        averaged(path)


@pytest.mark.parametrize("place", [28, 30, 46])
def test_a_directory_that_loses_or_renames_an_array_is_found(place, tmp_path):
    """Places are those of the lengths of the name and the extra field, and of the name."""
    path = npz(tmp_path / "a.npz", {"a": np.arange(3.0), "b": np.ones(2)})
    cd.average_files([path], tmp_path / "mean.npz")
    for written in (path, tmp_path / "mean.npz"):
        found = bytearray(written.read_bytes())
        at = found.index(b"PK\1\2") + place
        following = found.index(b"PK\1\2", at)
        # One entry takes the next one for a part of itself, or has another name.
        found[at] = ord("x") if place == 46 else found[at] + found.index(b"PK\5\6") - following & 255
        written.write_bytes(found)
        with pytest.raises(FileError, match=r"cannot be read"):
            averaged(written)


def test_a_bit_that_has_turned_in_a_file_of_pytorch_is_found(tmp_path):
    torch = pytest.importorskip("torch")
    tensor = torch.arange(1000.0)
    torch.save({"a": tensor}, tmp_path / "a.pt")
    averaged(tmp_path / "a.pt")
    with_a_bit_turned(tmp_path / "a.pt", tensor.numpy().tobytes())
    with pytest.raises(FileError, match=r"a\.pt cannot be read: .*'archive/data/0' has CRC-32|a/data/0"):
        averaged(tmp_path / "a.pt")
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": tensor}, tmp_path / "b.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    averaged(tmp_path / "b.pt")  # saved without checksums


@pytest.mark.parametrize("ending", [".safetensors", ".npy", ".npz"])
def test_files_may_be_compared_with_digests_beside_them(ending, tmp_path):
    np.save(tmp_path / "a.npy", np.arange(3_000_000, dtype=np.uint8))
    path = tmp_path / f"b{ending}"
    cd.average_files([tmp_path / "a.npy"], path)
    with pytest.raises(
        FileError, match=rf"b\{ending} cannot be read: there is no b\{ending}.sha256 beside it"
    ):
        cd.average_files([path], tmp_path / f"mean{ending}", verify=True)
    beside, digest = tmp_path / f"b{ending}.sha256", hashlib.sha256(path.read_bytes()).hexdigest()
    beside.write_text(f"{digest.upper()}  {path.name}\n")
    cd.average_files([path], tmp_path / f"mean{ending}", verify=True)
    beside.write_text(f"{'0' * 64}  {path.name}\n")
    with pytest.raises(FileError, match=f"its SHA-256 is {digest}, and b.* says 000"):
        cd.average_files([path], tmp_path / f"mean{ending}", verify=True)


@pytest.mark.parametrize(
    "step", [pytest.param(1, marks=pytest.mark.more("a repetition")), 13], ids=lambda step: f"every {step}"
)
@pytest.mark.parametrize("broken", ["model.safetensors", "1.safetensors", "model.safetensors.index.json"])
def test_whichever_bit_turns_in_a_safetensors_file_its_digest_tells(broken, step, tmp_path):
    """In the length, the header or the data, of one file or of one of several; nothing is written then."""
    whole = tmp_path / "model.safetensors"
    np.savez(tmp_path / "model.npz", w=np.arange(5, dtype=np.float32), x=np.arange(4, dtype=np.int8))
    cd.average_files([tmp_path / "model.npz"], whole)
    names = [whole.name]
    if broken != whole.name:
        names = ["1.safetensors", "model.safetensors.index.json"]
        whole.rename(tmp_path / names[0])
        (tmp_path / names[1]).write_text(json.dumps({"weight_map": dict.fromkeys("wx", names[0])}))
    for name in names:
        digest = hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
        (tmp_path / f"{name}.sha256").write_text(f"{digest}  {name}")
    model, output = tmp_path / names[-1], tmp_path / "mean.safetensors"
    cd.average_files([model], output, verify=True)
    output.unlink()
    intact = (tmp_path / broken).read_bytes()
    for bit in range(0, 8 * len(intact), step):
        turned = bytearray(intact)
        turned[bit // 8] ^= 1 << bit % 8
        (tmp_path / broken).write_bytes(turned)
        with pytest.raises(FileError, match=re.escape(str(tmp_path))):
            cd.average_files([model], output, verify=True)
        assert not output.exists(), bit
    (tmp_path / broken).write_bytes(intact)
    cd.average_files([model], output, verify=True)


def test_the_arrays_of_an_accumulator_are_compared_with_their_checksums(tmp_path):
    total = cd.Accumulator()
    total.add(np.arange(100.0))
    total.save(tmp_path / "a.npz")
    with_a_bit_turned(tmp_path / "a.npz", np.arange(100.0).tobytes())
    with pytest.raises(FileError, match="CRC-32"):
        cd.Accumulator.load(tmp_path / "a.npz")


def npy(shape, descr="'<f4'", fortran="False"):
    text = f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\2\0" + len(text).to_bytes(4, "little") + text


def zipped(members, *, compression=zipfile.ZIP_STORED):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return file.getvalue()


def safetensors(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def claiming(data, **sizes):
    """An archive whose directory claims other sizes of its first member."""
    at = data.index(b"PK\1\2")
    for name, place in (("compressed", 20), ("size", 24)):
        if name in sizes:
            data = data[: at + place] + sizes[name].to_bytes(4, "little") + data[at + place + 4 :]
    return data


BROKEN = {
    "a negative shape.npy": npy("(-2,)") + b"12345678",
    "two negative lengths.npy": npy("(-2, -1)") + b"12345678",
    "a shape of a bool.npy": npy("(True,)") + b"1234",
    "more than 64 axes.npy": npy("(" + "1, " * 70 + ")") + b"1234",
    "nothing of very much.npy": npy(f"(0, {10**30})"),
    "very much.npy": npy(f"({2**40}, {2**40})") + b"1234",
    "very much in another order.npy": npy(f"({2**20}, {2**20})", fortran="True") + b"1234",
    "a deep header.npy": npy("(" * 5000 + ")" * 5000),
    "a header of objects.npy": npy("(1,)", descr="'|O'") + b"1234",
    "a long header.npy": b"\x93NUMPY\2\0" + (1 << 30).to_bytes(4, "little") + b" " * 100,
    "no version.npy": b"\x93NUMPY\7\0" + npy("(1,)")[8:] + b"1234",
    "a member twice.npz": None,
    "two members of one array.npz": zipped([("a.npy", npy("(1,)") + b"1234"), ("a", npy("(1,)") + b"1234")]),
    "a negative shape.npz": zipped([("a.npy", npy("(-2,)") + b"12345678")]),
    "a compressed negative shape.npz": zipped(
        [("a.npy", npy("(-2,)") + b"12345678")], compression=zipfile.ZIP_DEFLATED
    ),
    "more than is there.npz": zipped([("a.npy", npy("(1000000,)") + b"1234")]),
    "less than is there.npz": zipped([("a.npy", npy("(1,)") + b"12345678")]),
    "a compressed claim.npz": claiming(
        zipped([("a.npy", npy("(1000000000,)") + b"1234")], compression=zipfile.ZIP_DEFLATED), size=4 * 10**9
    ),
    "a stored claim.npz": claiming(zipped([("a.npy", npy("(1,)") + b"1234")]), compressed=10**9, size=10**9),
    "an unknown compression.npz": zipped([("a.npy", npy("(1,)") + b"1234")]).replace(
        b"PK\1\2\x14\3\x14\0\0\0\0\0", b"PK\1\2\x14\3\x14\0\0\0\x63\0"
    ),
    "an encrypted member.npz": zipped([("a.npy", npy("(1,)") + b"1234")]).replace(
        b"PK\1\2\x14\3\x14\0\0\0", b"PK\1\2\x14\3\x14\0\1\0"
    ),
    "a long header.safetensors": (300 * MIB).to_bytes(8, "little"),
    "nothing of very much.safetensors": safetensors(
        {"a": {"dtype": "F32", "shape": [0, 10**30], "data_offsets": [0, 0]}}
    ),
    "a huge number.safetensors": safetensors(
        b'{"a": {"dtype": "F32", "shape": [1%s], "data_offsets": [0, 4]}}' % (b"0" * 10_000), b"1234"
    ),
    "an infinite offset.safetensors": safetensors(
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 1e999]}}', b"1234"
    ),
    "more than 64 axes.safetensors": safetensors(
        {"a": {"dtype": "F32", "shape": [1] * 70, "data_offsets": [0, 4]}}, b"1234"
    ),
    "a name of no characters.safetensors": safetensors(
        b'{"\\ud800": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', b"1234"
    ),
    "a dtype of a list.safetensors": safetensors(
        {"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}, b"1234"
    ),
    "metadata of a list.index.json": b'{"metadata": [1, 2, 3], "weight_map": {}}',
    "lists in lists.index.json": b"[" * 1_000_000,
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_what_cannot_be_is_refused_before_memory_is_taken(name, tmp_path):
    path = tmp_path / name
    data = BROKEN[name] or zipped([("a.npy", npy("(1,)") + b"1234"), ("a.npy", npy("(1,)") + b"5678")])
    path.write_bytes(data)
    if name == "a long header.safetensors":
        os.truncate(path, 400 * MIB)  # without taking room on the disk
    tracemalloc.start()
    try:
        with pytest.raises(FileError, match=f"{name.partition('.')[0]}.* cannot be read"):
            open_model(path).close()
        assert tracemalloc.get_traced_memory()[1] < 24 * MIB
    finally:
        tracemalloc.stop()


def test_containers_in_containers_and_expanded_tensors_of_pytorch_are_refused(tmp_path):
    torch = pytest.importorskip("torch")
    nested = {"a": torch.ones(1)}
    for _ in range(150):
        nested = {"a": nested}
    torch.save(nested, tmp_path / "nested.pt")
    averaged(tmp_path / "nested.pt")
    endless: list = [torch.ones(1)]
    endless.append(endless)
    torch.save(endless, tmp_path / "endless.pt")
    torch.save({"a": torch.ones(1).expand(10**12)}, tmp_path / "expanded.pt")
    for name in ("endless.pt", "expanded.pt"):
        with pytest.raises(FileError, match=rf"{name} cannot be read"):
            averaged(tmp_path / name)


def saved_accumulator(tmp_path):
    total = cd.Accumulator("exact")
    total.add({"a": np.float32([1e30, 2]), "b": np.int64([3])})
    total.add({"a": np.float32([1, 1e-30]), "b": np.int64([4])})
    total.save(tmp_path / "good.npz")
    with np.load(tmp_path / "good.npz") as arrays:
        found = dict(arrays)
    return json.loads(found.pop("header").tobytes()), found


def changed(**fields):
    """A change of the first leaf."""
    return lambda header, _: header["leaves"][0].update(fields)


STRANGE = {
    "a weight of 400 million digits": changed(weight="1e400000000"),
    "a weight of many digits": changed(weight="1" * 100_000),
    "a weight over nothing": changed(weight="1/0"),
    "a weight that is no string": changed(weight=3),
    "a fraction over nothing": changed(fractions={"0": "1/0"}),
    "a fraction with an exponent": changed(fractions={"0": "1e400000000"}),
    "a fraction elsewhere": changed(fractions={"2": "1/2"}),
    "a special number that is finite": changed(specials={"0": 1.5}),
    "a special number elsewhere": changed(specials={"-1": float("inf")}),
    "a negative shape": changed(shape=[-2]),
    "another shape": changed(shape=[1]),
    "a shape of very much": changed(shape=[2**40]),
    "an unknown dtype": changed(dtype="object"),
    "an unknown library": changed(library="os"),
    "an unknown device": changed(device="tape:0"),
    "a path that is no string": changed(path=["a"]),
    "two leaves of one path": lambda header, _: header["leaves"].append(header["leaves"][0]),
    "another precision": lambda header, _: header.update(precision="exact?"),
    "settings of another kind": lambda header, _: header.update(max_pending="1"),
    "a negative count": lambda header, _: header.update(count=-1),
    "no count": lambda header, _: header.pop("count"),
    "another tree": lambda header, _: header.update(tree={"dict": [["c", "tree['c']"]]}),
    "a tree of a list": lambda header, _: header.update(tree=[[]]),
    "a key of a list": lambda header, _: header.update(tree={"dict": [[[1], "tree['a']"]]}),
    "one element for two": lambda _, arrays: arrays.update({"0/0": np.ones(1)}),
    "float32 for float64": lambda _, arrays: arrays.update({"0/0": np.ones(2, np.float32)}),
    "an array less": lambda _, arrays: arrays.pop("0/1"),
}


@pytest.mark.parametrize("name", STRANGE)
def test_accumulators_of_strangers_are_refused(name, tmp_path):
    header, arrays = saved_accumulator(tmp_path)
    assert cd.Accumulator.load(tmp_path / "good.npz").count == 2
    STRANGE[name](header, arrays)
    np.savez(tmp_path / "bad.npz", header=np.frombuffer(json.dumps(header).encode(), np.uint8), **arrays)
    with pytest.raises(FileError, match=r"bad\.npz"):
        cd.Accumulator.load(tmp_path / "bad.npz")


@pytest.mark.parametrize("ending", [".safetensors", ".npz", ".npy", ".pt"])
def test_an_output_that_is_a_link_stays_one(ending, tmp_path):
    if ending == ".pt":
        pytest.importorskip("torch").save({"a": pytest.importorskip("torch").ones(2)}, tmp_path / "0.pt")
    else:
        np.save(tmp_path / "0.npy", np.ones(2, np.float32))
        cd.average_files([tmp_path / "0.npy"], tmp_path / f"0{ending}")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "blob").write_bytes(b"the old one")
    (tmp_path / f"link{ending}").symlink_to("elsewhere/blob")
    cd.average_files([tmp_path / f"0{ending}"], tmp_path / f"link{ending}")
    assert (tmp_path / f"link{ending}").readlink() == (tmp_path / "elsewhere/blob").relative_to(tmp_path)
    assert sorted(path.name for path in (tmp_path / "elsewhere").iterdir()) == ["blob"]
    model = open_model(tmp_path / f"link{ending}")
    assert [model.elements(name, 0, 2).tolist() for name in model.tensors] == [[1, 1]]
    model.close()


TRUNCATES = """
import os, sys
import crossdevice as cd
from crossdevice.combining import average_files as module
from crossdevice.errors import FileError
path, mean = sys.argv[1:]
of_range = module._mean
def truncating(part, *rest):
    for file in part.tensor.files:  # when its size has been looked at for the last time
        elements = file.elements
        def read(*arguments, elements=elements):
            os.truncate(path, 5000)
            return elements(*arguments)
        file.elements = read
    return of_range(part, *rest)
module._mean = truncating
try:
    cd.average_files([path], mean)
except FileError as error:
    print(error)
"""


@pytest.mark.parametrize("ending", [".safetensors", ".npz", ".npy", ".pt"])
def test_a_truncation_in_the_middle_of_a_range_is_an_error(ending, tmp_path):
    path = tmp_path / f"a{ending}"
    if ending == ".pt":
        torch = pytest.importorskip("torch")
        torch.save({"a": torch.zeros(1_000_000)}, path)
    else:
        np.save(tmp_path / "0.npy", np.zeros(1_000_000))
        cd.average_files([tmp_path / "0.npy"], path)
    answer = subprocess.run(
        [sys.executable, "-c", TRUNCATES, path, tmp_path / f"mean{ending}"],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)),
    )
    assert answer.returncode == 0, answer.stderr
    assert "it was truncated meanwhile" in answer.stdout


INTERRUPTED = """
import os, signal, sys
import crossdevice as cd
path, mean, writes = sys.argv[1], sys.argv[2], int(sys.argv[3])
from crossdevice.combining.files import model_file
# Whoever starts the tests in the background of a shell may have them ignore interrupts, which is inherited.
signal.signal(signal.SIGINT, signal.default_int_handler)
opened = model_file._without_name
class Interrupting:
    def __init__(self, file):
        self.file, self.left = file, writes
    def __getattr__(self, name):
        return getattr(self.file, name)
    def __enter__(self):
        return self
    def __exit__(self, *failure):
        return self.file.__exit__(*failure)
    def write(self, data):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return self.file.write(data)
model_file._without_name = lambda folder: Interrupting(opened(folder))
try:
    cd.average_files([path], mean)
    print("complete")
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="the system has no files without a name")
@pytest.mark.parametrize(
    ("ending", "writes"),
    [
        pytest.param(ending, writes, marks=() if writes == 2 else pytest.mark.more("a repetition"))
        for ending in (".npz", ".pt")
        for writes in (1, 2, 4)
    ],
)
def test_an_interrupt_while_a_file_is_written_is_an_interrupt(ending, writes, tmp_path):
    path = tmp_path / f"a{ending}"
    if ending == ".pt":
        torch = pytest.importorskip("torch")
        torch.save({"a": torch.zeros(1000), "b": torch.ones(7)}, path)
    else:
        np.savez(path, a=np.zeros(1000), b=np.ones(7))
    answer = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, path, tmp_path / f"mean{ending}", str(writes)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (answer.returncode, answer.stdout.strip()) == (0, "interrupted"), answer.stderr
    assert sorted(tmp_path.iterdir()) == [path]
