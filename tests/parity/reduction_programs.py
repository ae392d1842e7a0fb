"""Reductions, broadcasts and gathers by the classes of algorithms."""

from __future__ import annotations

import functools
import itertools
from typing import Any

ALGORITHMS = ("ReductionToOneDevice", "HierarchicalCopyAllReduce")
DESTINATIONS = ("itself", "/cpu:0", "/cpu:2", "two devices", "variable")
DTYPES = ("float16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64", "complex64")
COUNTS = (1, 2, 3, 4)
WRONG_PAIRS = {
    "none": None,
    "number": 3,
    "no pairs": [1],
    "no destination": [(1,)],
    "a list": [[1, "/cpu:0"]],
    "empty": [],
}
SPELLINGS = ("/cpu:1", "CPU:1", "/device:CPU:1", "/job:localhost/replica:0/task:0/device:CPU:1")


def arrays(d: Any, count: int, dtype: str = "float32") -> list[Any]:
    return [d.array([1 + k, 5 * k], dtype) for k in range(count)]


def destination(d: Any, name: str, value: Any) -> Any:
    if name == "two devices":
        return d.placed(1, 0)
    if name == "variable":
        return d.on_device(d.array([9.0]), 1)
    return value if name == "itself" else name


def reduce(algorithm: str, op: str, where: str, d: Any) -> Any:
    value = d.per_replica(arrays(d, 2))
    return getattr(d, algorithm)().reduce(d.ReduceOp[op], value, destination(d, where, value))


def batch(algorithm: str, op: str, d: Any) -> Any:
    pairs = [(value, value) for value in (d.per_replica(arrays(d, 2)), d.per_replica(arrays(d, 2)))]
    return getattr(d, algorithm)().batch_reduce(d.ReduceOp[op], pairs)


def dtypes(dtype: str, op: str, d: Any) -> Any:
    return d.ReductionToOneDevice().reduce(d.ReduceOp[op], d.per_replica(arrays(d, 2, dtype)), "/cpu:0")


def counts(algorithm: str, count: int, op: str, d: Any) -> Any:
    value = d.per_replica(arrays(d, count))
    return getattr(d, algorithm)().batch_reduce(d.ReduceOp[op], [(value, value)])


def broadcast(where: str, d: Any) -> Any:
    value = d.array([1.0, 2.0])
    return d.ReductionToOneDevice().broadcast(value, destination(d, where, d.placed(0, 1, 2)))


def wrong_operation(op: Any, d: Any) -> Any:
    return d.ReductionToOneDevice().reduce(op, d.per_replica(arrays(d, 2)), "/cpu:0")


def wrong_destination(where: Any, d: Any) -> Any:
    return d.ReductionToOneDevice().reduce(d.ReduceOp.SUM, d.per_replica(arrays(d, 2)), where)


def wrong_pairs(pairs: Any, d: Any) -> Any:
    return d.ReductionToOneDevice().batch_reduce(d.ReduceOp.SUM, pairs)


def wrong_value(value: Any, d: Any) -> Any:
    return d.ReductionToOneDevice().reduce(d.ReduceOp.SUM, value, "/cpu:0")


def spelling(where: str, d: Any) -> Any:
    return d.ReductionToOneDevice().reduce(d.ReduceOp.SUM, d.per_replica(arrays(d, 2)), where)


def destination_is_not_written(d: Any) -> Any:
    variable = d.on_device(d.array([9.0, 9.0]), 1)
    d.ReductionToOneDevice().reduce(d.ReduceOp.SUM, d.per_replica(arrays(d, 2)), variable)
    return variable


def order_of_devices(d: Any) -> Any:
    value = d.per_replica(arrays(d, 2))
    return d.devices_of(d.ReductionToOneDevice().reduce(d.ReduceOp.SUM, value, d.placed(2, 0, 1)))


def accumulation(op: str, d: Any) -> Any:
    ops = d.ReductionToOneDevice(accumulation_fn=lambda parts: parts[0] * parts[1])
    return ops.reduce(d.ReduceOp[op], d.per_replica(arrays(d, 2)), "/cpu:0")


def accumulates_a_tuple(d: Any) -> Any:
    kinds: list[Any] = []

    def first(parts: Any) -> Any:
        kinds.append(len(parts))
        return parts[0]

    d.ReductionToOneDevice(accumulation_fn=first).reduce(
        d.ReduceOp.SUM, d.per_replica(arrays(d, 3)), "/cpu:0"
    )
    return kinds


def rows(d: Any, index: int, number: float) -> Any:
    return d.IndexedSlices(d.array([[number, number]]), d.array([index], "int64"), d.array([4, 2], "int64"))


def sparse(op: str, dense: bool, d: Any) -> Any:
    value = d.per_replica([rows(d, 2, 1.0), rows(d, 2, 3.0)])
    result = d.ReductionToOneDevice().reduce(d.ReduceOp[op], value, "/cpu:0")
    return d.to_dense(result) if dense else result


def mixed_dtypes_in_a_batch(algorithm: str, d: Any) -> Any:
    values = [d.per_replica(arrays(d, 2, dtype)) for dtype in ("float32", "float64")]
    return getattr(d, algorithm)().batch_reduce(d.ReduceOp.SUM, [(value, value) for value in values])


def different_shapes(d: Any) -> Any:
    value = d.per_replica([d.array([1.0]), d.array([1.0, 2.0, 3.0])])
    return d.ReductionToOneDevice().reduce(d.ReduceOp.SUM, value, "/cpu:0")


def different_dtypes(d: Any) -> Any:
    value = d.per_replica([d.array([1.0]), d.array([1.0], "float64")])
    return d.ReductionToOneDevice().reduce(d.ReduceOp.SUM, value, "/cpu:0")


def without_elements(algorithm: str, d: Any) -> Any:
    value = d.per_replica([d.array([]), d.array([])])
    return getattr(d, algorithm)().batch_reduce(d.ReduceOp.MEAN, [(value, value)])


def packs(number: int, d: Any) -> Any:
    values = [d.per_replica(arrays(d, 2)) for _ in range(3)]
    ops = d.HierarchicalCopyAllReduce(num_packs=number)
    return ops.batch_reduce(d.ReduceOp.SUM, [(value, value) for value in values])


def wraps(dtype: str, number: int, d: Any) -> Any:
    value = d.per_replica([d.array([number], dtype), d.array([1], dtype)])
    return d.ReductionToOneDevice().reduce(d.ReduceOp.SUM, value, "/cpu:0")


def base_class(d: Any) -> Any:
    value = d.per_replica(arrays(d, 2))
    return d.CrossDeviceOps().reduce(d.ReduceOp.SUM, value, value)


def own_class(d: Any) -> Any:
    class Own(d.CrossDeviceOps):  # type: ignore[misc,name-defined]
        def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
            return [reduce_op.name, options is not None, per_replica_value.values[1]]

        def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
            return [reduce_op.name, len(value_destination_pairs)]

        def broadcast_implementation(self, tensor, destinations):
            return [tensor, destinations]

    ops, value = Own(), d.per_replica(arrays(d, 2))
    pairs = [(value, value), (value, "/cpu:0")]
    return (
        ops.reduce(d.ReduceOp.MEAN, value, "/cpu:0"),
        ops.batch_reduce(d.ReduceOp.SUM, pairs),
        ops.broadcast(d.array([1.0]), "/cpu:1"),
    )


def options(d: Any) -> Any:
    chosen = d.CommunicationOptions(bytes_per_pack=8, timeout_seconds=0)
    return d.ReductionToOneDevice().reduce(d.ReduceOp.SUM, d.per_replica(arrays(d, 2)), "/cpu:0", chosen)


def fields_of_options(d: Any) -> Any:
    chosen = d.CommunicationOptions(bytes_per_pack=8, timeout_seconds=2.0)
    return chosen.bytes_per_pack, chosen.timeout_seconds, chosen.implementation.name


def wrong_options(arguments: dict[str, Any], d: Any) -> Any:
    return d.CommunicationOptions(**arguments).bytes_per_pack


PROGRAMS = {
    **{
        "/".join(("reduce", *row)): functools.partial(reduce, *row)
        for row in itertools.product(ALGORITHMS, ("SUM", "MEAN"), DESTINATIONS)
    },
    **{
        "/".join(("batch", *row)): functools.partial(batch, *row)
        for row in itertools.product(ALGORITHMS, ("SUM", "MEAN"))
    },
    **{
        "/".join(("dtype", *row)): functools.partial(dtypes, *row)
        for row in itertools.product(DTYPES, ("SUM", "MEAN"))
    },
    **{
        f"count/{algorithm}/{count}/{op}": functools.partial(counts, algorithm, count, op)
        for algorithm, count, op in itertools.product(ALGORITHMS, COUNTS, ("SUM", "MEAN"))
    },
    **{f"broadcast/{where}": functools.partial(broadcast, where) for where in DESTINATIONS},
    **{
        f"wrong operation/{op}": functools.partial(wrong_operation, op)
        for op in ("sum", "MEAN", "mode", None, 0)
    },
    **{
        f"wrong destination/{where!r}": functools.partial(wrong_destination, where)
        for where in (None, 3, "", "nowhere", ["/cpu:0"], ("/cpu:0",))
    },
    **{f"wrong pairs/{kind}": functools.partial(wrong_pairs, pairs) for kind, pairs in WRONG_PAIRS.items()},
    **{f"wrong value/{value!r}": functools.partial(wrong_value, value) for value in (None, "text")},
    **{f"spelling/{where}": functools.partial(spelling, where) for where in SPELLINGS},
    "order of devices": order_of_devices,
    **{f"accumulation/{op}": functools.partial(accumulation, op) for op in ("SUM", "MEAN")},
    "accumulates a tuple": accumulates_a_tuple,
    **{
        f"sparse/{op}/{'dense' if dense else 'rows'}": functools.partial(sparse, op, dense)
        for op, dense in itertools.product(("SUM", "MEAN"), (True, False))
    },
    **{
        f"mixed dtypes in a batch/{each}": functools.partial(mixed_dtypes_in_a_batch, each)
        for each in ALGORITHMS
    },
    "different shapes": different_shapes,
    "different dtypes": different_dtypes,
    **{f"without elements/{each}": functools.partial(without_elements, each) for each in ALGORITHMS},
    **{f"packs/{number}": functools.partial(packs, number) for number in (-1, 0, 1, 2, 5)},
    **{
        f"wraps/{dtype}": functools.partial(wraps, dtype, number)
        for dtype, number in (("int8", 127), ("int32", 2**31 - 1), ("uint8", 255))
    },
    "destination is not written": destination_is_not_written,
    "base class": base_class,
    "own class": own_class,
    "options": options,
    "fields of options": fields_of_options,
    **{
        f"wrong options/{arguments}": functools.partial(wrong_options, arguments)
        for arguments in ({"bytes_per_pack": -1}, {"implementation": "MPI"}, {"colour": 1})
    },
}
