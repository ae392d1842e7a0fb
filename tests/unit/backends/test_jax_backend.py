"""JAX arrays: adopted without a copy, shared without harm, refused where they have no elements."""

import gc

import numpy as np
import pytest

import crossdevice as cd
from conformance import array_libraries
from crossdevice.backends.registry import backend_named
from crossdevice.errors import ConversionError, DestinationError, DeviceError, LibraryMismatchError, OutError
from crossdevice.kernels.host.resources.pool import SMALLEST_POOLED_BYTES, result_pool

jax = pytest.importorskip("jax")
sparse = pytest.importorskip("jax.experimental.sparse")

pytestmark = pytest.mark.more("JAX")
LARGE = SMALLEST_POOLED_BYTES // 4


@pytest.fixture(autouse=True)
def _devices():
    array_libraries.jax_devices()


def replicas(*numbers, size=LARGE):
    return cd.PerReplica(
        [array_libraries.jax_array(np.full(size, number, np.float32), k) for k, number in enumerate(numbers)]
    )


def address(array):
    return array.unsafe_buffer_pointer()


def test_host_arrays_are_read_without_a_copy():
    (array,) = replicas(1).values
    assert backend_named("jax").host_view(array).__array_interface__["data"][0] == address(array)


def test_destinations_share_one_large_result_on_devices_of_their_own():
    value = replicas(1, 2, 4)
    result = cd.RingAllReduce().reduce("sum", value, value)
    assert [array.device for array in result.values] == [array.device for array in value.values]
    assert len({address(array) for array in result.values}) == 1
    assert address(result.values[0]) not in {address(array) for array in value.values}
    assert all(float(array[-1]) == 7 for array in result.values)


def test_memory_is_not_used_again_while_any_array_lies_in_it():
    value = replicas(1, 2)
    gc.collect()
    before = result_pool.statistics().leased_bytes
    kept = cd.ReductionToOneDevice().reduce("sum", value, value).values[1]
    plus = kept + 0
    for number in range(4):
        other = replicas(number, number)
        later = cd.ReductionToOneDevice().reduce("sum", other, other)
        assert address(later.values[0]) != address(kept)
        assert float(later.values[0][0]) == 2 * number
    assert np.asarray(kept).min() == np.asarray(kept).max() == np.asarray(plus).max() == 3
    del later
    gc.collect()
    assert result_pool.statistics().leased_bytes > before
    del kept
    gc.collect()
    assert result_pool.statistics().leased_bytes == before


def test_a_result_given_to_a_computation_to_overwrite_leaves_the_others_as_they_are():
    value = replicas(1, 2)
    result = cd.ReductionToOneDevice().reduce("sum", value, value)
    overwrite = jax.jit(lambda array: array + 1, donate_argnums=0)
    assert float(overwrite(result.values[0])[0]) == 4
    assert np.asarray(result.values[1]).max() == 3


def test_an_input_can_be_given_to_a_computation_afterwards_and_copies_do_not_change():
    value = replicas(1, 2)
    copies = cd.ReductionToOneDevice().broadcast(value.values[0], value)
    total = cd.ReductionToOneDevice().reduce("sum", value, "cpu:0")
    grown = jax.jit(lambda array: array + 1, donate_argnums=0)(value.values[0])
    assert (float(grown[0]), float(total[0])) == (2, 3)
    assert [float(array[5]) for array in copies.values] == [1, 1]


def test_arrays_that_are_still_being_computed_are_waited_for():
    work = jax.jit(lambda array: (array @ array) @ array)
    inputs = [array_libraries.jax_array(np.eye(700, dtype=np.float32), k) for k in range(3)]
    result = cd.TreeAllReduce().reduce("sum", cd.PerReplica([work(array) for array in inputs]), "cpu:0")
    assert np.array_equal(np.asarray(result), 3 * np.eye(700, dtype=np.float32))


def test_tracers_are_refused_with_the_way_to_do_it_inside():
    def inside(array):
        return cd.all_reduce([array, array])[0]

    with pytest.raises(ConversionError, match=r"tracer.*jax\.lax\.psum"):
        jax.jit(inside)(np.float32([1]))
    with pytest.raises(ConversionError, match=r"tracer.*inside jit, grad"):
        jax.grad(lambda array: inside(array).sum())(np.float32([1]))


def test_what_has_no_numbers_for_all_elements_is_refused():
    for wrong, reason in (
        (jax.ShapeDtypeStruct((2,), np.float32), "is a ShapeDtypeStruct; expected a dense array"),
        (sparse.BCOO.fromdense(np.eye(2)), "is a BCOO; expected a dense array"),
        (jax.random.key(0), r"random keys.*jax\.random\.key_data"),
    ):
        for call in (cd.reduce, lambda wrong: cd.broadcast(wrong[0], ["cpu:0"])):
            with pytest.raises(ConversionError, match=f"replica 0.*{reason}"):
                call([wrong, wrong])


def test_sharded_arrays_are_refused():
    mesh = jax.sharding.Mesh(np.array(array_libraries.jax_devices()[:2]), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    sharded = jax.device_put(np.zeros(4, np.float32), sharding)
    with pytest.raises(ConversionError, match="sharded over 2 devices"):
        cd.all_reduce([sharded, sharded])
    with pytest.raises(DestinationError, match="sharded over 2 devices; expected one device"):
        cd.RingAllReduce().reduce("sum", replicas(1, 2, size=3), sharded)


def test_out_is_refused_since_arrays_are_immutable():
    value = replicas(1, 2, size=3)
    for ops_call in (
        lambda ops: ops.reduce("sum", value, value, out=value),
        lambda ops: ops.broadcast(value.values[0], value, out=value),
    ):
        with pytest.raises(OutError, match="an array of jax, which cannot be written to"):
            ops_call(cd.RingAllReduce())


def test_devices_that_jax_has_not_made_do_not_exist():
    value = replicas(1, 2, size=3)
    with pytest.raises(DeviceError, match=r"cpu:99 does not exist for jax.*jax_num_cpu_devices"):
        cd.RingAllReduce().reduce("sum", value, "cpu:99")


def test_libraries_do_not_mix():
    with pytest.raises(LibraryMismatchError, match=r"numpy.*jax|jax.*numpy"):
        cd.all_reduce([np.float32([1]), replicas(1, size=1).values[0]])


def test_without_64_bits_a_mean_of_integers_is_what_jax_can_hold():
    numbers = [array_libraries.jax_array(np.int32([1, 2]), k) for k in range(2)]
    assert cd.all_reduce(numbers, "mean")[0].dtype == np.float64
    with jax.enable_x64(False):
        assert cd.all_reduce(numbers, "mean")[0].dtype == np.float32
