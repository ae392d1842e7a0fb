"""JAX arrays, on the devices that JAX was started with."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from crossdevice.backends.protocol import Backend, ThreadState, address_range, dtype_named, native
from crossdevice.errors import ConversionError, DeviceError, DtypeError
from crossdevice.values.device import Device
from crossdevice.values.quantities import kind_text


class JaxBackend(Backend):
    """Host arrays are worked on in NumPy, which compiles nothing; all destinations share one result.

    JAX adopts an ndarray that starts on a line of 64 bytes, and holds on to it, so that a pooled block
    comes back only after the last array in it. It never donates such memory to a computation, so what
    is shared stays as it is. Inputs are always copied: those a computation may be given to overwrite.

    Without `jax_enable_x64` JAX has no 64-bit dtypes: what is float64 elsewhere, a mean of 32-bit
    integers, becomes float32, as it does in `jnp.mean`. On GPUs XLA divides float32 to within a unit of the
    last place only, which means of 8- and 16-bit integers show.
    """

    name = "jax"
    is_immutable = True
    shares_gpu_arrays = True

    def namespace(self) -> Any:
        """Returns JAX's own namespace, which follows the standard."""
        return jnp

    def thread_state(self, devices: Sequence[Device]) -> ThreadState:
        """Makes new arrays of a replica live on its device, if JAX has it, under the caller's settings."""
        inherited = {name: _setting(name) for name in _SETTINGS}
        is_placed = devices and _devices().keys() >= set(devices)

        def enter(device: Device) -> contextlib.AbstractContextManager[Any]:
            stack = contextlib.ExitStack()
            if is_placed:
                stack.enter_context(jax.default_device(_devices()[device]))
            for name, value in inherited.items():
                if _setting(name) != value:
                    within = jax if hasattr(jax, name) else jax.experimental
                    stack.enter_context(getattr(within, name)(value))
            return stack

        return enter

    def check_array(self, array: Any, where: str) -> None:
        """Tracers have no elements yet, and sharded arrays are on several devices at once."""
        if isinstance(array, jax.core.Tracer):
            raise ConversionError(
                f"{where} is a tracer: it has no elements while a function is traced; inside jit, grad, "
                "shard_map or pmap use jax.lax.psum(value, axis_name), or call crossdevice outside of it"
            )
        if not isinstance(array, jax.Array):
            raise ConversionError(f"{where} is {kind_text(array)}; expected a dense array of JAX")
        if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
            raise ConversionError(
                f"{where} is an array of random keys; expected numbers (jax.random.key_data(keys))"
            )
        if len(array.sharding.device_set) > 1:
            raise ConversionError(
                f"{where} is sharded over {len(array.sharding.device_set)} devices; expected an array on "
                "one device (its shards: [shard.data for shard in array.addressable_shards])"
            )

    def signature(self, array: Any) -> Hashable:
        """Raises for tracers, which have no device, so that calls with them are not kept."""
        if isinstance(array, jax.core.Tracer):
            raise RuntimeError("a tracer")
        return type(array), array.dtype, array.shape, array.device

    def check_device(self, device: Device) -> None:
        """Accepts only devices that JAX has made: their number is fixed when it starts."""
        if device not in _devices():
            found = ", ".join(map(str, _devices()))
            raise DeviceError(
                f"{device} does not exist for jax arrays; those that do are {found} "
                "(more host devices: jax.config.update('jax_num_cpu_devices', n) before JAX is first used)"
            )

    def host_view(self, array: Any) -> NDArray[Any]:
        """Returns the array's memory, once it is computed."""
        return native(np.asarray(array))

    def address_range(self, array: Any) -> tuple[int, int]:
        """Returns the range of its view on the host."""
        return address_range(self.host_view(array))

    def writable_view(self, array: Any) -> None:  # noqa: ARG002
        """Always None: the arrays are immutable."""
        return

    def from_host(self, flat: NDArray[Any], shape: tuple[int, ...], device: Device) -> Any:
        """Adopts the memory on the host where it starts on a line; copies it otherwise."""
        return jax.device_put(flat.reshape(shape), _devices()[device])

    def read_only(self, array: Any, device: Device) -> Any:
        """Returns the array itself on its own device; elsewhere JAX copies."""
        return jax.device_put(array, _devices()[device])

    def flat(self, array: Any) -> Any:
        """Returns another array of the same memory, if on the host."""
        return self.reshape(array, (-1,))

    def reshape(self, flat: Any, shape: tuple[int, ...]) -> Any:
        """Returns another array of the same memory, if on the host."""
        device = Device.parse(flat.device)
        return self.from_host(self.host_view(flat), shape, device) if device.is_host else flat.reshape(shape)

    def part_of(self, flat: Any, start: int, stop: int) -> Any:
        """Slices host memory without JAX, which compiles for every length."""
        device = Device.parse(flat.device)
        if not device.is_host:
            return flat[start:stop]
        return self.from_host(self.host_view(flat)[start:stop], (stop - start,), device)

    def copy(self, array: Any, device: Device) -> Any:
        """Copies to new memory on the device."""
        if device.is_host:
            return self.from_host(np.array(self.to_host(array)), array.shape, device)
        return jax.device_put(jnp.copy(array), _devices()[device])

    def concat(self, arrays: Sequence[Any], axis: int, device: Device) -> Any:
        """Concatenates in NumPy on the host: JAX rejects arrays of different devices, even logical ones."""
        if not device.is_host:
            return jnp.concatenate(list(arrays), axis)
        joined = np.concatenate([self.host_view(array).reshape(array.shape) for array in arrays], axis)
        return self.from_host(joined, joined.shape, device)

    def cast(self, array: Any, dtype: str) -> Any:
        """Converts; refuses dtypes that JAX would silently replace by one of half the width."""
        _refuse_wide(dtype)
        device = Device.parse(array.device)
        if device.is_host:
            return self.from_host(self.host_view(array).astype(dtype_named(dtype)), array.shape, device)
        return array.astype(dtype)

    def round_once(self, wide: Any, dtype: str) -> Any:
        """Rounds to odd in float32 first: XLA may go to 16 bits through float32, which would round twice."""
        if dtype not in ("bfloat16", "float16"):
            return wide.astype(dtype)
        near = wide.astype("float32")
        back = near.astype("float64")
        bits = jax.lax.bitcast_convert_type(near, jnp.int32)
        bits = jnp.where(jnp.abs(back) > jnp.abs(wide), bits - 1, bits)
        bits = jnp.where((back != wide) & ~jnp.isnan(wide), bits | 1, bits)
        return jax.lax.bitcast_convert_type(bits, jnp.float32).astype(dtype)

    def divided(self, total: Any, divisor: float) -> Any:
        """Divides by a whole array: XLA multiplies by the reciprocal of anything that it broadcasts."""
        return total / jnp.full_like(total, divisor)

    def from_parts(self, parts: Any) -> Any:
        """Combines real and imaginary parts."""
        pairs = parts.reshape(-1, 2)
        return jax.lax.complex(pairs[:, 0], pairs[:, 1])

    def from_dlpack(self, tensor: Any) -> Any:
        """Adopts the memory; refuses dtypes that JAX would silently replace by one of half the width."""
        _refuse_wide(self.dtype_of(tensor))
        return jnp.from_dlpack(tensor)

    def scatter_rows(self, rows: Any, indices: Any, shape: tuple[int, ...]) -> Any:
        """Adds up the rows of repeated indices."""
        device = Device.parse(rows.device)
        if not device.is_host:
            return jnp.zeros(shape, rows.dtype, device=_devices()[device]).at[indices].add(rows)
        dense = np.zeros(shape, rows.dtype)
        np.add.at(dense, self.host_view(indices), self.host_view(rows).reshape(rows.shape))
        return self.from_host(dense, shape, device)


_SETTINGS = (
    "enable_x64",  # in jax.experimental before JAX 0.8
    "default_matmul_precision",
    "default_prng_impl",
    "numpy_dtype_promotion",
    "numpy_rank_promotion",
    "disable_jit",
    "debug_nans",
)
"""Settings that JAX keeps per thread; each can be changed for a block by a function of this name."""


def _setting(name: str) -> Any:
    return getattr(jax.config, f"jax_{name}")


def _refuse_wide(dtype: str) -> None:
    is_wide = dtype_named(dtype).name in ("float64", "complex128", "int64", "uint64")
    if is_wide and not jax.config.jax_enable_x64:
        raise DtypeError(
            f"JAX has no {dtype} unless jax_enable_x64 is set; set it, or ask for precision='fast'"
        )


@functools.cache
def _devices() -> dict[Device, Any]:
    """Maps our names to JAX's devices of this process: asking JAX takes longer than a small sum."""
    local = list(jax.local_devices())
    if jax.default_backend() != "cpu":
        with contextlib.suppress(RuntimeError):  # JAX_PLATFORMS may leave the host out
            local += jax.local_devices(backend="cpu")
    return {Device.parse(device): device for device in local}
