"""Measure times and sizes of the codecs, as one JSON line: python -m tests.bench.codec [--dim N] [--runs N]."""

import argparse
import json
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from fedring.codec import Encoding, decode, encode
from fedring.codec.select import largest
from tests.bench.lab.turns import time_call

THREADS = 2
ENCODINGS = {
    "int8": Encoding("int8"),
    "sq8_10": Encoding("sq8"),
    "packed_10": Encoding("packed"),
    "packed_1": Encoding("packed", keep_ratio=0.01),
    "packed_01": Encoding("packed", keep_ratio=0.001),
    "uniform": Encoding("uniform"),
}


def milliseconds(action: Callable[[], object], runs: int) -> float:
    """Return the shortest time of several calls."""
    return round(1000 * min(time_call(action) for _ in range(runs)), 1)


def measure(vector: NDArray[np.float32], runs: int) -> dict[str, float]:
    """Return the milliseconds and the sizes of every encoding for `vector` [D]."""
    tenth = vector.size // 10
    tensor = torch.from_numpy(vector)
    results: dict[str, float] = {
        "copy_ms": milliseconds(vector.copy, runs),
        "largest_10_ms": milliseconds(lambda: largest(vector, tenth), runs),
        "argpartition_10_ms": milliseconds(lambda: np.argpartition(np.abs(vector), -tenth), runs),
        "torch_topk_10_ms": milliseconds(lambda: tensor.abs().topk(tenth, sorted=False), runs),
    }
    for label, encoding in ENCODINGS.items():
        payload = encode(vector, encoding)
        results[f"{label}_encode_ms"] = milliseconds(lambda how=encoding: encode(vector, how), runs)  # type: ignore[misc]
        results[f"{label}_decode_ms"] = milliseconds(
            lambda data=payload, how=encoding: decode(data, name=how.name, length=vector.size),  # type: ignore[misc]
            runs,
        )
        results[f"{label}_bytes_ratio"] = round(len(payload) / vector.nbytes, 5)
    results["int8_encode_over_copy"] = round(results["int8_encode_ms"] / results["copy_ms"], 2)
    return results


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--dim", type=int, default=25_000_000, help="length of the vector, which is Laplace distributed"
    )
    parser.add_argument("--runs", type=int, default=3, help="repeats, of which the best is reported")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    vector = np.random.default_rng(0).laplace(size=options.dim).astype(np.float32)
    print(json.dumps({"dim": options.dim, "threads": THREADS, **measure(vector, options.runs)}))


if __name__ == "__main__":
    main()
