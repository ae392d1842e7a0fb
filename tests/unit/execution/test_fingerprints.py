"""Fingerprints: equal for equal bits wherever they are, different for any other."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

import crossdevice as cd
from crossdevice.backends.protocol import dtype_named
from crossdevice.kernels.host import fused_pass
from crossdevice.kernels.host.fingerprint_pass import PIECE_BYTES, pieces_of, sums_of
from crossdevice.kernels.position_keys import BLOCK_BYTES, ROW_BYTES
from crossdevice.testing import run_ranks
from crossdevice.values.dtypes import ITEM_BYTES

GOLDEN = {
    "nothing": (lambda: np.zeros(0, np.float32), "2cb41c593e9c54e92f983343a24d8cd1"),
    "a scalar": (lambda: np.float32(1.5), "a9d921f7eaff6fce34355928849f81c5"),
    "some floats": (lambda: np.arange(1000, dtype=np.float32), "d4b3c67ecdc242c0ad3eddcd0d7521bd"),
    "bfloat16": (lambda: np.arange(77).astype(ml_dtypes.bfloat16), "c4c313120d7d3bd687d6d4c4167657b8"),
    "complex numbers": (
        lambda: np.arange(6).reshape(2, 3) * np.complex64(1 - 2j),
        "5cf12f96618702168093131f11a4400b",
    ),
    "several pieces": (lambda: np.arange(1 << 18, dtype=np.int64), "dd80b364c9834cca13b34f4922a5ae2d"),
    "a tree": (lambda: {"w": np.ones(3), "b": [np.zeros(2), 1.5]}, "7ac8ca8f003be6dbfed9756b43447a70"),
}


@pytest.fixture(params=["numba", "numpy"])
def _kernels(request):
    fused_pass.select_kernels(request.param)
    yield
    fused_pass.select_kernels(None)


def digest(value):
    return cd.fingerprint(value).digest


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("name", GOLDEN)
def test_digests_are_those_of_all_releases(name):
    make, expected = GOLDEN[name]
    assert digest(make()) == expected


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("size", [1, 4, 64, 65, BLOCK_BYTES, BLOCK_BYTES + 3, 3 * BLOCK_BYTES + 17])
def test_any_flipped_bit_shows(size):
    memory = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    seen = {digest(memory)}
    places = range(size) if size <= 65 else np.unique(np.random.default_rng(0).integers(0, size, 40))
    for place, bit in itertools.product(places, range(8)):
        memory[place] ^= 1 << bit
        seen.add(digest(memory))
        memory[place] ^= 1 << bit
    assert len(seen) == 1 + 8 * len(places)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_signs_that_change_together_show(dtype):
    memory = np.random.default_rng(2).random(4 * BLOCK_BYTES // np.dtype(dtype).itemsize).astype(dtype)
    seen = {digest(memory), digest(-memory)}
    per_block = BLOCK_BYTES // memory.itemsize
    pairs = [(0, 1), (0, 2), (3, per_block + 3), (0, 3 * per_block), (8, 24)]
    for pair in pairs:
        changed = memory.copy()
        changed[list(pair)] *= -1
        seen.add(digest(changed))
    quad = memory.copy()
    quad[[1, 2, per_block + 1, per_block + 2]] *= -1
    assert len(seen | {digest(quad)}) == 2 + len(pairs) + 1


def test_what_moves_shows():
    """Swapped and rotated by words, lanes, rows and blocks; and the two by two exchange of equal sums."""
    memory = np.arange(4 * BLOCK_BYTES // 4, dtype=np.uint32)
    seen = [digest(memory)]
    for words in (1, 2, 16, ROW_BYTES, BLOCK_BYTES // 4, BLOCK_BYTES // 2):
        seen.append(digest(np.roll(memory, words)))
        swapped = memory.copy()
        swapped[[0, words]] = swapped[[words, 0]]
        seen.append(digest(swapped))
    # What is added in two places of two blocks is taken away in the other two.
    crossed, step = memory.copy(), BLOCK_BYTES // 4
    crossed[[0, step + 1]] += np.uint32(1)
    crossed[[1, step]] -= np.uint32(1)
    seen.append(digest(crossed))
    assert len(set(seen)) == len(seen)


def test_zeros_of_different_lengths_shapes_and_dtypes_differ():
    arrays = [np.zeros(n, np.uint8) for n in (0, 1, 2, 63, 64, 65, 4096, 4097)]
    arrays += [np.zeros((2, 3), np.float32), np.zeros((3, 2), np.float32), np.zeros(6, np.float32)]
    arrays += [np.zeros(6, np.int32), np.zeros((), np.float32), np.zeros(1, np.float32), np.zeros((0, 3))]
    assert len(set(map(digest, arrays))) == len(arrays)


def test_no_two_of_many_arrays_share_a_digest_or_half_of_one():
    random = np.random.default_rng(3)
    digests = set()
    for number in range(20_000):
        memory = np.zeros(48, np.uint8)
        memory[:4] = np.frombuffer(number.to_bytes(4, "little"), np.uint8)
        memory[4 + number % 44] ^= random.integers(0, 256)
        digests.add(digest(memory))
    assert len({d[:16] for d in digests}) == len({d[16:] for d in digests}) == 20_000


def test_sums_of_random_pairs_differ_in_half_of_their_bits():
    """Also where the arrays differ in one bit only: the high half of every sum is well mixed."""
    random = np.random.default_rng(4)
    flips = []
    for _ in range(200):
        memory = random.integers(0, 256, 5 * BLOCK_BYTES, dtype=np.uint8)
        before = sums_of(pieces_of(0, memory), 1)
        memory[random.integers(memory.size)] ^= 1 << random.integers(8)
        after = sums_of(pieces_of(0, memory), 1)
        flips.append(np.bitwise_count((before ^ after) >> np.uint64(32)).sum())
    assert 56 < np.mean(flips) < 72  # of 4 times 32 bits


def test_nan_payloads_and_signs_of_zero_count():
    words = np.array([0x7FC00000, 0x7FC00001, 0xFFC00000, 0x7F800001, 0, 0x80000000], np.uint32)
    assert len({digest(words[i : i + 1].view(np.float32)) for i in range(len(words))}) == len(words)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("shape", [(3, 5), (7, 400, 100), (1, 3, 700, 301), (2, PIECE_BYTES // 4 + 5)])
def test_memory_order_byte_order_and_strides_do_not_count(shape):
    array = np.random.default_rng(5).random(shape).astype(np.float32)
    expected = digest(array)
    assert digest(np.asfortranarray(array)) == expected
    assert digest(array.astype(">f4")) == expected
    apart = np.zeros((*shape[:-1], 2 * shape[-1]), np.float32)
    apart[..., ::2] = array
    assert digest(apart[..., ::2]) == expected
    assert digest(array[::-1][::-1]) == expected
    assert digest(array[::-1]) != expected or shape[0] == 1


def test_threads_do_not_count(monkeypatch):
    array = np.random.default_rng(6).random(3 << 20).astype(np.float32)
    found = set()
    for threads in (1, 2, 5):
        cd.set_num_threads(threads)
        found.add(digest(array))
    cd.set_num_threads(None)
    assert len(found) == 1


def test_ranges_that_meet_anywhere_add_up_to_the_whole():
    random = np.random.default_rng(7)
    memory = random.integers(0, 256, 3 * BLOCK_BYTES + 100, dtype=np.uint8)
    whole = sums_of(pieces_of(0, memory), 1)
    for _ in range(20):
        cuts = [0, *sorted(random.integers(0, memory.size, 5)), memory.size]
        ranges = [(int(start), int(stop)) for start, stop in itertools.pairwise(cuts)]
        random.shuffle(ranges)
        pieces = [piece for start, stop in ranges for piece in pieces_of(0, memory[start:stop], offset=start)]
        assert (sums_of(pieces, 1) == whole).all()


@pytest.mark.more("TensorFlow")
@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_tensors_and_variables_of_tensorflow_have_the_digests_of_numpy(dtype):
    tf = pytest.importorskip("tensorflow")
    random, element = np.random.default_rng(9), dtype_named(dtype)
    words = random.integers(0, 2 if dtype == "bool" else 256, 24 * ITEM_BYTES[dtype], dtype=np.uint8)
    array = words.view(element).reshape(2, 3, 4)  # any bits, also NaNs with payloads
    tensor, variable = tf.convert_to_tensor(array), tf.Variable(array)
    assert tensor.dtype.as_numpy_dtype == element
    assert digest(tensor) == digest(variable) == digest(array)
    words[-1] ^= 1
    assert digest(array) not in (digest(tensor), digest(variable))
    variable.assign(array)
    assert digest(variable) == digest(array)


@pytest.mark.more("JAX")
def test_libraries_do_not_count():
    torch, jnp = pytest.importorskip("torch"), pytest.importorskip("jax.numpy")
    array = np.random.default_rng(8).random((20, 30)).astype(np.float32)
    tensor = torch.from_numpy(array)
    assert digest(tensor) == digest(jnp.asarray(array)) == digest(array)
    assert digest(tensor.requires_grad_()) == digest(array)
    assert digest(tensor.detach().T) == digest(array.T)
    assert digest(tensor.detach().bfloat16()) == digest(jnp.asarray(array).astype(jnp.bfloat16))
    conjugated = torch.complex(tensor.detach(), tensor.detach()).conj()
    assert digest(conjugated) == digest(conjugated.resolve_conj())


def test_trees_have_a_digest_for_each_leaf_and_one_for_all():
    tree = {"w": np.ones(3), "b": [np.zeros(2), 1.5]}
    found = cd.fingerprint(tree)
    assert list(found.leaves) == ["value['b'][0]", "value['b'][1]", "value['w']"]
    assert found.leaves["value['w']"] == digest(np.ones(3))
    assert found.differing_leaves(cd.fingerprint(tree | {"c": 1})) == ["value['c']"]
    assert digest({"w": np.ones(3)}) != digest({"v": np.ones(3)}) != digest(np.ones(3))
    rows = cd.IndexedSlices(np.ones((2, 3)), np.array([0, 4]), (9, 3))
    assert list(cd.fingerprint(rows).leaves) == ["value.values", "value.indices"]
    assert digest(rows) != digest(cd.IndexedSlices(rows.values, rows.indices, (8, 3)))
    assert list(cd.fingerprint(cd.Mirrored([1.0, 1.0])).leaves) == ["value.values[0]", "value.values[1]"]


def test_what_has_no_bits_is_refused():
    with pytest.raises(cd.errors.DtypeError, match=r"value\['a'\] has dtype object"):
        cd.fingerprint({"a": np.array([None])})
    with pytest.raises(cd.errors.ConversionError, match=r"value\[0\] is a str; expected an array of numpy"):
        cd.fingerprint(["text"])
    with pytest.raises(cd.errors.ConversionError, match="value is a list of lists of several lengths"):
        cd.fingerprint([[1, 2], [3]])


def test_replicas_in_the_minority_are_named():
    same, other = {"w": np.ones(2), "b": 0.0}, {"w": np.ones(2), "b": -0.0}
    ops = cd.DirectAllReduce()
    ops.check_same(cd.PerReplica([same, same]))
    expected = r"replica 1 \(cpu:1\) differs at value\['b'\] \(1 of 2 leaves\) from the other 2"
    with pytest.raises(cd.errors.BitsMismatchError, match=expected):
        ops.check_same(cd.PerReplica([same, other, same]))
    with pytest.raises(
        cd.errors.BitsMismatchError, match=r"replicas 0, 1 and replicas 2, 3 differ .* no side"
    ):
        ops.check_same(cd.PerReplica([same, same, other, other]))
    with pytest.raises(cd.errors.ConversionError, match="compares the replicas of a distributed value"):
        ops.check_same(same)


def test_ranks_in_the_minority_are_named_on_all_ranks():
    def program(group):
        group.check_same(np.ones(3))
        with pytest.raises(cd.errors.BitsMismatchError) as minority:
            group.check_same({"w": np.full(2, group.rank == 1), "b": 0})
        with pytest.raises(cd.errors.BitsMismatchError) as tie:
            cd.CollectiveAllReduce(group=group).check_same(np.full(2, group.rank // 2))
        group.check_same({"w": 1})  # the group is as good as before
        return str(minority.value), str(tie.value)

    found = run_ranks(4, program)
    assert len(set(found)) == 1
    minority, tie = found[0]
    assert minority.startswith("rank 1 (")
    assert minority.endswith("differs at value['w'] (1 of 2 leaves) from the other 3, which hold the same")
    assert tie == "ranks 0, 1 and ranks 2, 3 differ; no side has a majority"


@pytest.mark.parametrize("length", [3, 1000])
def test_arrays_like_an_earlier_one_but_for_their_memory_are_read_in_the_order_of_their_indices(length):
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(length).random((length, length)) + 1j
    right = [digest(each.copy()) for each in (values, values.T, values.conj())]
    for plain in (values, torch.from_numpy(values)):  # in either order
        assert digest(plain) == right[0]
        assert digest(plain.T) == right[1]
        assert digest(plain) == right[0]
        assert digest(plain[::-1] if plain is values else plain.flip(0)) == digest(values[::-1].copy())
    assert digest(torch.from_numpy(values).conj()) == right[2]
    assert digest(values.astype(">c16")) == right[0]
