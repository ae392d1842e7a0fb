"""Every kind of kernel of the GPU, on sizes and addresses that are odd: what compute-sanitizer looks at."""

import itertools
import sys

import torch

import crossdevice as cd
from crossdevice.values.dtypes import COMPLEXES

DTYPES = ("float32", "bfloat16", "float16", "float64", "int8", "int64", "uint8", "complex64")
SIZES = (1, 7, 1024, 5000, 64)


def tensor(size: int, dtype: str, offset: int = 0) -> torch.Tensor:
    return torch.ones(size + offset, device="cuda").to(getattr(torch, dtype))[offset:]


def main() -> int:
    """Prints how many reductions were made."""
    ops, count = cd.TreeAllReduce(), 0
    for dtype, op, precision in itertools.product(
        DTYPES, ("sum", "mean", "max", "prod"), ("fast", "accurate", "exact")
    ):
        if op == "prod" and precision == "exact":
            continue  # in Python's integers, on the host
        if dtype in COMPLEXES and op in ("max", "prod"):
            continue
        options = cd.CommunicationOptions(precision=precision)
        for size, offset in itertools.product((1, 1025, 4099), (0, 1)):
            value = cd.PerReplica([tensor(size, dtype, offset) for _ in range(3)])
            ops.reduce(op, value, value, options)
            if op == "sum":
                ops.reduce(op, value, value, options, out=value)
            count += 1
        values = [cd.PerReplica([tensor(size, dtype) for _ in range(3)]) for size in SIZES]
        ops.batch_reduce(op, [(value, value) for value in values], options)
        count += len(values)
        if precision == "accurate" and op == "mean" and "int" not in dtype:
            ops.batch_reduce(op, [(value, value) for value in values], options, weights=[0.1, 2, 3])
            ops.reduce(op, values[3], values[3], options, weights=[0.1, 2, 3])
            count += len(values) + 1
    torch.cuda.synchronize()
    sys.stdout.write(f"{count} reductions\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
