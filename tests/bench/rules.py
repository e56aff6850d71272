"""Measure what each aggregation rule costs beside the mean: seconds, processor time and memory.

    python -m tests.bench.rules [--clients 100] [--values 25000000] [--encoding uniform] [--rules mean,median]

The updates are made, not trained: a few different ones, which the clients share. Prints one JSON line; `walks` says how
often a rule reads the updates, and `growth_mb` is the peak of the process' memory above that before the aggregation.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from fedring.codec import Encoding, Entry, Schema, Vectors, encode
from fedring.server.aggregation.aggregate import AggregationPlan, aggregate, store_model
from fedring.server.aggregation.combining import Combination
from fedring.server.aggregation.contributions import Contribution
from fedring.server.aggregation.modelfile import ModelReader
from fedring.server.aggregation.rule import GramRule
from fedring.server.aggregation.strategy import make_strategy
from fedring.server.state.blobs import FileBlobs
from fedring.server.state.rows import lay_out
from fedring.train.jobs.aggregation_table import RULES, Aggregation
from fedring.train.names.offered import Offered
from tests.bench.lab.daemons import peak_bytes, print_line, resident_bytes

MEASURED = [rule for rule in RULES if rule != "fltrust"]  # that one is a weighted sum after a training

DIFFERENT = 4
"""Updates that differ."""


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100, help="clients of the round")
    parser.add_argument("--values", type=int, default=25_000_000, help="parameters of the model")
    parser.add_argument("--encoding", default="uniform", help="how the updates are encoded")
    parser.add_argument("--rules", default=",".join(MEASURED), help="the rules to measure")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as executor:
        blobs = FileBlobs(Path(folder))
        base, sent = _inputs(blobs, args.clients, args.values, args.encoding)
        rows: dict[str, dict[str, float]] = {}
        for name in args.rules.split(","):
            rows[name] = _measure(blobs, base, sent, executor, name)
            print(name, rows[name], file=sys.stderr, flush=True)  # each rule may take minutes
        blobs.close()
    print_line({"clients": args.clients, "values": args.values, "encoding": args.encoding, "rules": rows})


def _inputs(blobs: FileBlobs, clients: int, values: int, name: str) -> tuple[str, list[Contribution]]:
    rng = np.random.default_rng(0)
    schema = Schema((Entry("w", (values,), "float32", "parameter"),))
    base = store_model(schema, Vectors(rng.standard_normal(values, np.float32), np.empty(0)), blobs, {}).blob
    made = []
    for number in range(min(clients, DIFFERENT)):
        partial, payload = (
            blobs.open_partial(f"client-{number}"),
            encode(rng.standard_normal(values, np.float32), Encoding(name)),
        )
        partial.write(payload)
        packets = lay_out([("parameters", "delta", name, len(payload))])
        made.append((packets, blobs.range_reader(blobs.seal_many([partial])[0])))
    return base, [Contribution(f"client-{i}", 100 + i, *made[i % len(made)]) for i in range(clients)]


def _measure(
    blobs: FileBlobs, base: str, sent: Sequence[Contribution], executor: ThreadPoolExecutor, name: str
) -> dict[str, float]:
    table = {"rule": name, "malicious": max((len(sent) - 3) // 2, 1) if "krum" in name else 0}
    rule = make_strategy(Aggregation.model_validate(table), Offered()).rule
    Path("/proc/self/clear_refs").write_text("5")  # let the kernel forget the peak of this process' memory
    before, began, cpu = resident_bytes(os.getpid()), time.perf_counter(), time.process_time()
    with blobs.reader(base) as blob:
        model = aggregate(ModelReader(blob), sent, blobs, executor, AggregationPlan(combination=Combination(rule)))
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    blobs.delete(model.blob)
    growth = (peak_bytes(os.getpid()) - before) / 1e6
    walks = 2 if isinstance(rule, GramRule) else 1
    return {"walks": walks, "seconds": round(seconds, 1), "cpu_seconds": round(cpu, 1), "growth_mb": round(growth)}


if __name__ == "__main__":
    main()
