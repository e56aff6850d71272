"""Measure speed and memory of FedAvg for 2 and 8 clients with 25 million fp32 values each.

    python -m tests.bench.aggregate

Prints one JSON line. "proven" computes the digests of all that it reads, as fl-server does; "plain" does not.
"""

import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from fedring.codec import Encoding, Entry, Schema, Vectors, encode
from fedring.server.aggregation.aggregate import AggregationPlan, aggregate, store_model
from fedring.server.aggregation.contributions import Contribution
from fedring.server.aggregation.modelfile import ModelReader
from fedring.server.state.blobs import FileBlobs
from fedring.server.state.checked import CheckedReader, Room, find_damage
from fedring.server.state.rows import lay_out
from tests.bench.lab.daemons import peak_bytes, print_line, resident_bytes
from tests.bench.lab.turns import time_call

VALUES = 25_000_000
REPEATS = 5


def main(clients: tuple[int, ...] = (2, 8)) -> None:
    """Print one JSON line."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as executor:
        blobs = FileBlobs(Path(folder))
        base, updates = _inputs(blobs, max(clients))
        result: dict[str, object] = {"values": VALUES, "copy_seconds": round(_copy_seconds(), 4)}
        for count in clients:
            for proven in (False, True):
                name = f"clients_{count}_{'proven' if proven else 'plain'}"
                result[name] = _measure(blobs, base, updates[:count], executor, proven=proven)
        blobs.close()
    print_line(result)


def _inputs(blobs: FileBlobs, clients: int) -> tuple[str, list[str]]:
    rng = np.random.default_rng(0)
    values = rng.standard_normal(VALUES, np.float32)
    schema = Schema((Entry("w", (VALUES,), "float32", "parameter"),))
    base = store_model(schema, Vectors(values, np.empty(0)), blobs, {}).blob
    updates = []
    for client in range(clients):
        partial = blobs.open_partial(f"client-{client}")
        partial.write(encode(np.roll(values, client), Encoding("fp32")))
        updates.append(blobs.seal_many([partial])[0])
    return base, updates


def _measure(
    blobs: FileBlobs, base: str, updates: list[str], executor: ThreadPoolExecutor, *, proven: bool
) -> dict[str, float]:
    seconds: list[float] = []
    cpu = time.process_time()
    _reset_peak()
    before = resident_bytes(os.getpid())
    packets = lay_out([("parameters", "delta", "fp32", 16 + 4 * VALUES)])
    with blobs.reader(base) as blob:
        for _ in range(REPEATS):
            room = Room()
            checked = [CheckedReader(blob.read, blob.size, base, room)]
            checked += [CheckedReader(blobs.range_reader(name), packets[0].bytes, name, room) for name in updates]
            reads = [reader.read for reader in checked[1:]] if proven else map(blobs.range_reader, updates)
            sources = [Contribution(f"client-{i}", 100 + i, packets, read) for i, read in enumerate(reads)]
            check = partial(find_damage, checked if proven else ())
            started = time.perf_counter()
            reader = ModelReader(checked[0] if proven else blob)
            model = aggregate(reader, sources, blobs, executor, AggregationPlan(), check=check)
            seconds.append(time.perf_counter() - started)
            blobs.delete(model.blob)
    cpu = time.process_time() - cpu
    grown = peak_bytes(os.getpid()) - before
    best, median = min(seconds), statistics.median(seconds)
    return {
        "best_seconds": round(best, 3),
        "median_seconds": round(median, 3),
        "cpu_seconds": round(cpu / REPEATS, 3),
        "copies": round(median / _copy_seconds() / (len(updates) + 2), 2),
        "peak_growth_mb": round(grown / 1024**2, 1),
    }


def _copy_seconds() -> float:
    """Return the seconds to copy one model's parameters in memory, the best of five."""
    source, target = np.ones(VALUES, np.float32), np.ones(VALUES, np.float32)
    return min(time_call(lambda: np.copyto(target, source)) for _ in range(5))


def _reset_peak() -> None:
    """Let the kernel forget the peak of this process' resident memory."""
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    main()
