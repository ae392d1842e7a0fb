"""Models combined: weighted, many, streamed, and in files, beside what others do.

    python benchmarks/combining.py [--rounds N] [--rows PATTERN] [--scale N] [--folder DIR]

Competitors take turns, round after round, and medians are compared: wall time, and CPU time of all threads.
A peer is the real package where it is installed, and says its version; otherwise its arithmetic, written out
here from its documentation, and says so. Beside the times stand, of a sample of elements, those that are not
the true weighted mean rounded once, and of all elements those that change when the clients come in reverse.
Files are written to DIR, read once before they are measured, and removed.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.metadata
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from flower_server import Server, Times
from resnet50 import gradient_shapes

import crossdevice as cd
from crossdevice.kernels.host.reference.running import rounded_fraction
from crossdevice.values.quantities import time_text

EXACT = cd.CommunicationOptions(precision="exact")
SAMPLE = 5000
"""Elements whose true mean is worked out in fractions."""

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

EIGHT_WEIGHTS = [1.0, 2.0, 1.5, 1.0, 3.0, 1.0, 0.5, 1.0]

Call = Callable[[], Any]


class Row(NamedTuple):
    """Calls that do the same, ours first, and what is to be said of it."""

    text: str
    floor: str
    calls: dict[str, Call]
    check: Callable[[], list[str]] = list
    prepare: Callable[[], None] = lambda: None
    """Called before each of them, and not measured."""


def measured(row: Row, rounds: int) -> dict[str, tuple[float, float]]:
    """Median wall and CPU seconds of each call, in turns."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in row.calls}
    for call in row.calls.values():
        call()
    for _ in range(rounds):
        for name, call in row.calls.items():
            row.prepare()
            cpu, wall = time.process_time(), time.perf_counter()
            answer = call()
            times = time.perf_counter() - wall, time.process_time() - cpu
            # Another process has measured itself.
            found[name].append(answer[:2] if isinstance(answer, Times) else times)
    return {
        name: (statistics.median(wall for wall, _ in pairs), statistics.median(cpu for _, cpu in pairs))
        for name, pairs in found.items()
    }


def printed(row: Row, rounds: int) -> None:
    times = measured(row, rounds)
    (ours, (own_wall, _)), *_ = times.items()
    print(f"\n{row.text}   [floor: {row.floor}]")
    for name, (wall, cpu) in times.items():
        ratio = "" if name == ours else f"{wall / own_wall:6.2f}x"
        print(f"  {name:<44} {time_text(wall):>9} wall {time_text(cpu):>9} CPU  {ratio}")
    for line in row.check():
        print(f"  {line}")


# ---------------------------------------------------------------- what is right


def wrong_elements(result: Any, clients: Sequence[Any], weights: Sequence[float]) -> str:
    """How many of a sample are not the true weighted mean, rounded once."""
    flat = np.asarray(result).reshape(-1)
    chosen = np.random.default_rng(0).integers(0, flat.size, SAMPLE)
    divisor = sum(map(Fraction, weights))
    columns = zip(*(np.asarray(array).reshape(-1)[chosen].tolist() for array in clients), strict=True)
    wrong = 0
    for number, column in zip(flat[chosen], columns, strict=True):
        true = sum(Fraction(w) * Fraction(x) for w, x in zip(weights, column, strict=True)) / divisor
        wrong += rounded_fraction(true, flat.dtype) != number
    return f"{wrong} of {SAMPLE} elements not correctly rounded"


def changed_elements(first: Any, second: Any) -> str:
    """How many elements have other bits."""
    arrays = [np.asarray(each).reshape(-1) for each in (first, second)]
    bits = [array.view(f"u{array.itemsize}") for array in arrays]
    share = np.count_nonzero(bits[0] != bits[1]) / bits[0].size
    return f"{100 * share:.3g} % of elements change with the order of clients"


# ---------------------------------------------------------------- what others do


def flower() -> tuple[str, Callable[[Sequence[tuple[list[Any], int]]], list[Any]]]:
    """Flower's aggregation of ndarrays; its arithmetic: products in float64 or float32, summed in turn."""
    try:
        from flwr.server.strategy.aggregate import aggregate
    except ImportError:

        def aggregate(results: Sequence[tuple[list[Any], int]]) -> list[Any]:
            total = sum(number for _, number in results)
            scaled = [[layer * number for layer in layers] for layers, number in results]
            return [sum(layers[1:], layers[0]) / total for layers in zip(*scaled, strict=True)]

        return "Flower aggregate (its arithmetic)", aggregate
    return f"Flower aggregate (flwr {importlib.metadata.version('flwr')})", aggregate


def nvflare(results: Sequence[tuple[list[Any], int]]) -> list[Any]:
    """NVFlare's weighted aggregation: a running sum in place, client by client, then times 1 / weight."""
    totals = [layer * results[0][1] for layer in results[0][0]]
    for layers, number in results[1:]:
        for total, layer in zip(totals, layers, strict=True):
            total += layer * number
    factor = 1.0 / sum(number for _, number in results)
    return [total * factor for total in totals]


def torch_loop(models: Sequence[Sequence[Any]], weights: Sequence[float]) -> list[Any]:
    """What people write: the first, then `add_` with alpha."""
    divisor = sum(weights)
    totals = []
    for column in zip(*models, strict=True):
        total = column[0] * (weights[0] / divisor)
        for tensor, weight in zip(column[1:], weights[1:], strict=True):
            total.add_(tensor, alpha=weight / divisor)
        totals.append(total)
    return totals


def mergekit(columns: Sequence[Sequence[Any]], weights: Sequence[float]) -> list[Any]:
    """mergekit's linear merge: tensors stacked, times weights, summed, over the sum of the weights."""
    import torch

    results = []
    for column in columns:
        stacked = torch.stack(list(column), dim=0)
        factors = torch.tensor(weights, dtype=stacked.dtype).reshape(-1, *[1] * (stacked.dim() - 1))
        results.append((factors * stacked).sum(dim=0) / factors.sum(dim=0))
    return results


# ---------------------------------------------------------------- the rows


def rows(scale: int, folder: Path) -> dict[str, Callable[[], Row | None]]:
    """Each is made when it is measured, as each holds about a gigabyte."""
    return {
        "weighted": lambda: weighted_resnet(scale),
        "servers, means": lambda: flower_servers(
            "the weighted mean alone", scale, {"reduce": "ours, cd.reduce", "aggregate": "Flower, aggregate"}
        ),
        "servers, rounds": lambda: flower_servers(
            "from clients' messages to the new record",
            scale,
            {
                "exact": "ours, FedAvg.aggregate_train",
                "accurate": 'ours, FedAvg(precision="accurate").aggregate_train',
                "train": "Flower, FedAvg.aggregate_train",
            },
        ),
        "bfloat16": lambda: bfloat16_layers(scale),
        "inputs 32": lambda: many_inputs(32, scale),
        "inputs 100": lambda: many_inputs(100, scale),
        "median": lambda: median_row(scale),
        "files": lambda: files_row(scale, folder),
        "accumulator": lambda: accumulator_row(scale),
    }


def resnets(random: np.random.Generator, number: int, scale: int) -> list[list[Any]]:
    """So many models with the shapes of ResNet-50's parameters, or of some of them."""
    shapes = gradient_shapes()[:: max(scale // 4, 1)]
    return [[random.standard_normal(shape, np.float32) for shape in shapes] for _ in range(number)]


def largest_of(model: Sequence[Any]) -> int:
    """The number of the layer on which results are checked."""
    return int(np.argmax([array.size for array in model]))


def weighted_resnet(scale: int) -> Row:
    import torch

    random = np.random.default_rng(1)
    weights = [int(number) for number in random.integers(10, 900, 10)]
    models = resnets(random, 10, scale)
    tensors = [[torch.from_numpy(array) for array in model] for model in models]
    results = list(zip(models, weights, strict=True))
    name, aggregate = flower()

    def check() -> list[str]:
        layer = largest_of(models[0])
        clients = [model[layer] for model in models]
        lines = []
        for who, call in (
            ("ours", lambda c, w: cd.reduce(c, "mean", weights=w)),
            ("ours, exact", lambda c, w: cd.reduce(c, "mean", weights=w, options=EXACT)),
            (name, lambda c, w: aggregate([([x], n) for x, n in zip(c, w, strict=True)])[0]),
            ("torch add_", lambda c, w: torch_loop([[torch.from_numpy(x)] for x in c], w)[0].numpy()),
        ):
            forwards = call(clients, weights)
            wrong = wrong_elements(forwards, clients, weights)
            changed = changed_elements(forwards, call(clients[::-1], weights[::-1]))
            lines.append(f"{who}: {wrong}, {changed}")
        return lines

    return Row(
        "weighted mean, ResNet-50 float32 x 10",
        "Flower 12x, NVFlare 3x, torch 1.5x; plain mean at least 1/1.3; reading is the limit",
        {
            "ours": lambda: cd.reduce(models, "mean", weights=weights),
            "ours, exact": lambda: cd.reduce(models, "mean", weights=weights, options=EXACT),
            "ours, plain mean": lambda: cd.reduce(models, "mean"),
            name: lambda: aggregate(results),
            "NVFlare (its arithmetic)": lambda: nvflare(results),
            "torch add_(alpha)": lambda: torch_loop(tensors, weights),
            "reading them with two threads": lambda: read_by_two(models),
        },
        check,
    )


def read_by_two(models: Sequence[Sequence[Any]]) -> None:
    """Copies all arrays, bit by bit, into memory that stays in the caches of two processors."""

    def read(chosen: Sequence[Sequence[Any]]) -> None:
        buffer = np.empty(1 << 16, np.float32)
        for model in chosen:
            for array in model:
                flat = array.reshape(-1)
                for start in range(0, flat.size, buffer.size):
                    part = flat[start : start + buffer.size]
                    np.copyto(buffer[: part.size], part)

    together(lambda: read(models[::2]), lambda: read(models[1::2]))


def together(here: Call, beside: Call) -> None:
    """Makes two calls at once."""
    thread = threading.Thread(target=beside)
    thread.start()
    here()
    thread.join()


def flower_servers(job: str, scale: int, kinds: dict[str, str]) -> Row | None:
    """Processes of their own, as servers are: what one leaves in its memory is no other's."""
    if importlib.util.find_spec("flwr") is None:
        print("\nservers: flwr is not installed")
        return None
    servers = {name: Server(kind, scale) for kind, name in kinds.items()}

    def check() -> list[str]:
        lines = []
        for name, server in servers.items():
            server.close()
            first, *others = server.rounds
            faults = statistics.median(each.page_faults for each in others)
            lines.append(f"{name}: first round {first.wall * 1e3:.0f} ms; {faults:.0f} page faults in others")
        return lines

    version = importlib.metadata.version("flwr")
    text = f"ResNet-50 float32 x 10, {job}, each in a process of its own, in turn (flwr {version})"
    return Row(text, "Flower's aggregate 12x", dict(servers), check)


def bfloat16_layers(scale: int) -> Row:
    import torch

    shapes = [(4096, 4096)] * 6 + [(11008, 4096)]  # some layers of a small language model, 290 MB
    shapes = [(first // scale, second) for first, second in shapes]
    weights = EIGHT_WEIGHTS
    models = [[torch.randn(shape, dtype=torch.bfloat16) for shape in shapes] for _ in weights]
    columns = list(zip(*models, strict=True))

    def check() -> list[str]:
        arrays = [each.view(torch.int16).numpy().view(BFLOAT16) for each in columns[0]]
        lines = []
        for who, found in (
            ("ours", cd.reduce(list(columns[0]), "mean", weights=weights)),
            ("mergekit", mergekit(columns[:1], weights)[0]),
        ):
            flat = found.view(torch.int16).numpy().view(BFLOAT16)
            lines.append(f"{who}: {wrong_elements(flat, arrays, weights)}")
        return lines

    return Row(
        "weighted mean, 8 x 300 MB bfloat16",
        "mergekit 2x",
        {
            "ours": lambda: cd.reduce(models, "mean", weights=weights),
            "mergekit linear (its arithmetic)": lambda: mergekit(columns, weights),
        },
        check,
    )


def many_inputs(number: int, scale: int) -> Row:
    import torch

    size = 200_000_000 // number // scale
    arrays = [np.random.default_rng(k).standard_normal(size, np.float32) for k in range(number)]
    tensors = [torch.from_numpy(array) for array in arrays]
    out = np.empty(size, np.float32)

    def loop() -> Any:
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            total.add_(tensor)
        return total.div_(number)

    def check() -> list[str]:
        forwards, backwards = cd.reduce(arrays, "mean"), cd.reduce(arrays[::-1], "mean")
        return [
            f"ours: {wrong_elements(forwards, arrays, [1] * number)}, "
            f"{changed_elements(forwards, backwards)}",
            f"torch: {wrong_elements(loop().numpy(), arrays, [1] * number)}",
        ]

    return Row(
        f"mean of {number} inputs, 0.8 GB in all",
        "torch loop 1.0x",
        {"ours": lambda: cd.reduce(arrays, "mean", out=out), "torch +=": loop},
        check,
    )


def median_row(scale: int) -> Row | None:
    if "MEDIAN" not in cd.ReduceOp.__members__:
        return None
    arrays = [np.random.default_rng(k).standard_normal((4 << 20) // scale, np.float32) for k in range(10)]
    return Row(
        "median, 10 x 4 M float32",
        "Flower 12x",
        {
            "ours": lambda: cd.reduce(arrays, "median"),
            "Flower's (numpy.median of a stack)": lambda: np.median(np.asarray(arrays), axis=0),
        },
        lambda: [changed_elements(cd.reduce(arrays, "median"), cd.reduce(arrays[::-1], "median"))],
    )


def files_row(scale: int, folder: Path) -> Row:
    from crossdevice.combining.files.formats import new_model
    from crossdevice.combining.files.model_file import TensorSpec
    from crossdevice.combining.files.safetensors_files import SafetensorsFile

    tensors = {f"layer.{k}.weight": TensorSpec("bfloat16", (4096 // scale, 4096)) for k in range(9)}
    paths = [folder / f"{number}.safetensors" for number in range(8)]
    (folder / "empty.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    like = SafetensorsFile(folder / "empty.safetensors")
    for number, path in enumerate(paths):
        random = np.random.default_rng(number)
        with new_model(path, tensors, like) as writer:
            for name, spec in tensors.items():
                writer.write(name, 0, random.standard_normal(spec.num_elements, np.float32).astype(BFLOAT16))
    weights = EIGHT_WEIGHTS
    output, old = folder / "mean.safetensors", folder / "old.safetensors"

    def read_once(chosen: Sequence[Path] = paths) -> None:
        buffer = bytearray(4 << 20)
        for path in chosen:
            with open(path, "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

    def check() -> list[str]:
        code = PEAK.format(paths=[str(path) for path in paths], output=str(output), weights=weights)
        answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        model = os.path.getsize(paths[0])
        return [
            f"peak of its own memory, beyond what importing takes: {int(answer.stdout) / model:.3f} models"
        ]

    return Row(
        "average of 8 safetensors files of 300 MB, in the page cache",
        "reading at least 1/1.3; memory 0.1 models",
        {
            "ours": lambda: cd.average_files(paths, output),
            "ours, weighted": lambda: cd.average_files(paths, output, weights),
            "ours, weighted, in the place of an old one": lambda: cd.average_files(paths, old, weights),
            "reading them once, with one thread": read_once,
            "reading them once, with two": lambda: together(
                lambda: read_once(paths[::2]), lambda: read_once(paths[1::2])
            ),
        },
        check,
        lambda: output.unlink(missing_ok=True),
    )


PEAK = """
import threading, time
import crossdevice as cd

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))

cd.average_files({paths}[:1], {output!r})
before, peak, done = anonymous(), 0, threading.Event()

def watch():
    global peak
    while not done.is_set():
        peak = max(peak, anonymous())
        time.sleep(0.002)

thread = threading.Thread(target=watch)
thread.start()
cd.average_files({paths}, {output!r}, {weights})
done.set()
thread.join()
print(peak - before)
"""


def accumulator_row(scale: int) -> Row:
    random = np.random.default_rng(1)
    models = resnets(random, 12, scale)
    weights = [int(number) for number in random.integers(10, 900, 12)]

    def one_by_one(order: Sequence[int] = range(12), **settings: Any) -> Any:
        total = cd.Accumulator(**settings)
        for number in order:
            total.add(models[number], weights[number])
        return total.mean()

    def check() -> list[str]:
        layer = largest_of(models[0])
        clients, lines = [model[layer] for model in models], []
        for precision in ("accurate", "exact"):
            forwards, backwards = (
                one_by_one(order, precision=precision)[layer] for order in (range(12), range(11, -1, -1))
            )
            at_once = cd.reduce(
                clients, "mean", weights=weights, options=cd.CommunicationOptions(precision=precision)
            )
            lines.append(
                f"{precision}: {wrong_elements(forwards, clients, weights)}, "
                f"{changed_elements(forwards, backwards)}; "
                f"bits of all at once: {forwards.tobytes() == at_once.tobytes()}"
            )
        return lines

    return Row(
        "Accumulator, ResNet-50 float32, 12 clients one by one",
        "all at once at least 1/5",
        {
            "ours, max_pending=4": lambda: one_by_one(max_pending=4),
            "ours, each at once": one_by_one,
            "ours, exact, max_pending=4": lambda: one_by_one(precision="exact", max_pending=4),
            "all at once (cd.reduce)": lambda: cd.reduce(models, "mean", weights=weights),
        },
        check,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--rows",
        default="*",
        help="weighted, servers, bfloat16, inputs 32, inputs 100, median, files, accumulator, or a pattern",
    )
    parser.add_argument("--scale", type=int, default=1, help="divides all sizes: 16 shows that it runs")
    parser.add_argument("--folder", type=Path, help="where files are written; 3 GB")
    arguments = parser.parse_args()
    print(f"{cd.num_threads()} threads, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for name, make in rows(arguments.scale, Path(folder)).items():
            row = make() if fnmatch.fnmatch(name, arguments.rows) else None
            if row is not None:
                printed(row, arguments.rounds)


if __name__ == "__main__":
    main()
