"""Measure what secure aggregation costs: accuracy on MNIST, bytes, and the time and memory of making a model.

    python -m tests.bench.secure --data-root DIR [--seeds 3] [--rounds 60] [--ways uniform,dense,blocks]
    python -m tests.bench.secure --cost [--values 25000000]

The first line trains a perceptron on MNIST with 8 simulated clients, each on 1,000 of its samples in each round, with
the encoding `uniform` and with secure aggregation: of all blocks, of 10 % of them, and in groups under a robust rule.
`--model fedring.train.models:mnist_cnn` trains the CNN. The second line makes a model of 8 updates, plain and masked by
turns, of which two clients of the group were lost before. Prints one JSON line.
"""

import argparse
import json
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from fedring.codec import Encoding, Entry, Schema, Vectors, encode
from fedring.secure.levels import blocks_of
from fedring.secure.limits import bits_of_sum
from fedring.secure.masks import MASKED, mask, masked_packet, wrap
from fedring.server.aggregation.aggregate import AggregationPlan, aggregate, store_model
from fedring.server.aggregation.contributions import Contribution
from fedring.server.aggregation.modelfile import ModelReader
from fedring.server.model.masked_sum import GroupMasks, open_groups
from fedring.server.state.blobs import FileBlobs
from fedring.server.state.checked import CheckedReader, Room, find_damage
from fedring.server.state.rows import lay_out
from fedring.simulation import simulate
from fedring.v1.secure_pb2 import SecureRound
from tests.bench.lab.daemons import peak_bytes, print_line, resident_bytes
from tests.bench.lab.turns import alternate

CLIENTS, LOST, LEVELS, BLOCK = 8, 2, 7, 256
WORK: dict[str, Any] = {
    "data": "fedring.data:mnist",
    "min_clients": CLIENTS,
    "min_clients_to_aggregate": 6,
    "lr": 0.05,
    "momentum": 0.9,
    "weights": "uniform",
    "evaluate": False,
    "evaluate_on_server": True,
}
WAYS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "dense": {"secure_aggregation": {}},
    "blocks": {"secure_aggregation": {"keep_ratio": 0.1}},
    "weights": {"secure_aggregation": {}, "weights": "samples"},
    "grouped": {"secure_aggregation": {"group_size": 4}, "aggregation": {"rule": "geometric_median"}},
}


def train(way: str, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """Train once, and return the accuracy in percent, and the bytes of an update as a share of fp32."""
    chosen = {"model": options.model, "subset_size": options.samples, "rounds": options.rounds}
    job = {**WORK, **WAYS[way], **chosen}
    if "secure_aggregation" in job:
        job["secure_aggregation"] = {**job["secure_aggregation"], **json.loads(options.table)}
    run = {"workers": options.workers, "threads": 1, "data_root": options.data_root}
    report = simulate(job, clients=CLIENTS, seed=seed, **run)
    sent = mean(row["upload_bytes"] for row in report["rounds"])
    return {
        "accuracy": round(100 * report["accuracy"], 2),
        "of_fp32": round(sent / (4 * report["parameters"]), 4),
        "seconds": round(report["seconds"], 1),
    }


def accuracy(options: argparse.Namespace) -> dict[str, Any]:
    """Return what each way reaches, seed by seed, and the means."""
    rows = {way: [train(way, seed, options) for seed in range(options.seeds)] for way in options.ways.split(",")}
    means = {way: round(mean(row["accuracy"] for row in found), 2) for way, found in rows.items()}
    return {"rounds": options.rounds, "seeds": options.seeds, "mean_accuracy": means, "trainings": rows}


def cost(values: int) -> dict[str, Any]:
    """Return the seconds and the memory of a model of plain fp32 updates, and of masked ones."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as executor:
        blobs = FileBlobs(Path(folder))
        schema = Schema((Entry("w", (values,), "float32", "parameter"),))
        vector = rng.standard_normal(values, np.float32)
        base = store_model(schema, Vectors(vector, np.empty(0)), blobs, {}).blob
        plain = [_seal(blobs, [encode(np.roll(vector, client), Encoding("fp32"))]) for client in range(CLIENTS)]
        scales = np.full(blocks_of(values, BLOCK), 0.1, "<f4").tobytes()
        secure = SecureRound(scales=scales, block=BLOCK, levels=LEVELS)
        group, masked = _masked_updates(blobs, values)

        def plain_updates(readers: Sequence[CheckedReader]) -> list[Contribution]:
            return _contributions(readers, "fp32")

        def masked_updates(readers: Sequence[CheckedReader]) -> list[Contribution]:
            return open_groups([group], secure, _contributions(readers, MASKED), values)

        ways = {
            "plain": lambda: _measure(blobs, base, plain, executor, plain_updates),
            "masked": lambda: _measure(blobs, base, masked, executor, masked_updates),
        }
        rows = alternate(ways, 3, warm_up=1)
        blobs.close()
    seconds = {name: median(row["seconds"] for row in found) for name, found in rows.items()}
    ratio = round(seconds["masked"] / seconds["plain"], 2)
    masks = len(group.masks)
    return {"values": values, "clients": CLIENTS, "lost": LOST, "masks": masks, "ratio": ratio, "measurements": rows}


def _contributions(readers: Sequence[CheckedReader], encoding: str) -> list[Contribution]:
    packets = lay_out([("parameters", "delta", encoding, readers[0].size)])
    return [Contribution(f"client-{i}", 1, packets, reader.read) for i, reader in enumerate(readers)]


def _masked_updates(blobs: FileBlobs, values: int) -> tuple[GroupMasks, list[str]]:
    """Return a group, and its updates: the first client adds all masks, so that the sum is one of levels."""
    rng, bits = np.random.default_rng(0), bits_of_sum(CLIENTS + LOST, LEVELS)
    # Each client's own mask, and one that it has in common with each lost client.
    seeds = tuple((secrets.token_bytes(32), 1) for _ in range(CLIENTS * (1 + LOST)))
    names = []
    for client in range(CLIENTS):
        words = wrap(rng.integers(-LEVELS, LEVELS + 1, values, np.int16), bits)
        for seed, _ in seeds if client == 0 else ():
            words += mask(seed, bits, 0, values)
        names.append(_seal(blobs, masked_packet(words, bits)))
    return GroupMasks("client-0", tuple(f"client-{i}" for i in range(CLIENTS)), bits, seeds), names


def _seal(blobs: FileBlobs, parts: Sequence[bytes | memoryview]) -> str:
    opened = blobs.open_partial("update")
    for part in parts:
        opened.write(part)
    return blobs.seal_many([opened])[0]


def _measure(
    blobs: FileBlobs,
    base: str,
    names: Sequence[str],
    executor: ThreadPoolExecutor,
    updates: Callable[[Sequence[CheckedReader]], list[Contribution]],
) -> dict[str, float]:
    Path("/proc/self/clear_refs").write_text("5")  # let the kernel forget the peak of this process' memory
    before, cpu, began = resident_bytes(os.getpid()), time.process_time(), time.perf_counter()
    with blobs.reader(base) as blob:
        room = Room()
        model = CheckedReader(blob.read, blob.size, base, room)
        readers = []
        for name in names:
            with blobs.reader(name) as update:
                readers.append(CheckedReader(blobs.range_reader(name), update.size, name, room))

        def check() -> None:
            if find_damage([model, *readers]):
                raise ValueError("a file is damaged")

        made = aggregate(ModelReader(model), updates(readers), blobs, executor, AggregationPlan(), check=check)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    blobs.delete(made.blob)
    growth = (peak_bytes(os.getpid()) - before) / 1e6
    return {"seconds": round(seconds, 2), "cpu_seconds": round(cpu, 2), "growth_mb": round(growth)}


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, help="folder of the data sets")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each way")
    parser.add_argument("--rounds", type=int, default=60, help="rounds of each training")
    parser.add_argument("--model", default="tests.bench.robust:mlp", help="what is trained, as module:attribute")
    parser.add_argument("--samples", type=int, default=1000, help="samples of each client in a round")
    parser.add_argument("--workers", type=int, help="processes that train; default: one for each core")
    parser.add_argument("--ways", default=",".join(WAYS), help="names, with commas between")
    parser.add_argument("--table", default="{}", help="keys of the table secure_aggregation, as JSON")
    parser.add_argument("--cost", action="store_true", help="measure the making of a model instead")
    parser.add_argument("--values", type=int, default=25_000_000, help="parameters of that model")
    options = parser.parse_args()
    print_line({"bench": "secure", **(cost(options.values) if options.cost else accuracy(options))})


if __name__ == "__main__":
    main()
