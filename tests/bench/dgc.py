"""Measure times and sizes of gradient compression, as one JSON line: python -m tests.bench.dgc [--dim N] [--runs N]."""

import argparse
import json
from collections.abc import Callable

import torch

from fedring.codec.gradient import Entries, Part, decode_gradient, encode_gradient
from fedring.codec.precision import to_words, words_size
from fedring.compress.dgc import DGC, Memory, accumulate, kept_count
from fedring.compress.dgc_select import select
from fedring.ddp.parts import DGCStep, apply_parts, make_part
from tests.bench.lab.turns import time_call

THREADS = 1
CONFIG = DGC()


def milliseconds(action: Callable[[], object], runs: int) -> float:
    """Return the shortest time of several calls."""
    return round(1000 * min(time_call(action) for _ in range(runs)), 2)


def measure(grad: torch.Tensor, runs: int) -> dict[str, float]:
    """Return the milliseconds and the sizes of every step of DGC for `grad` [D]."""
    memory = Memory.empty(grad.numel(), grad.device)
    results: dict[str, float] = {"accumulate_ms": milliseconds(lambda: accumulate(grad, memory, CONFIG), runs)}
    for label, ratio in (("25", 0.25), ("1", 0.01), ("01", 0.001)):
        count = kept_count(grad.numel(), ratio)
        indices = select(grad, count, CONFIG)
        part = Part(indices.numpy(), to_words(grad[indices].numpy(), CONFIG.precision))
        data = encode_gradient([part], sizes=[grad.numel()])
        bits = 8 * (len(data) - words_size(CONFIG.precision, indices.numel())) / indices.numel()
        results |= {
            f"select_{label}_ms": milliseconds(lambda: select(grad, count, CONFIG), runs),  # noqa: B023  # called at once
            f"topk_{label}_ms": milliseconds(lambda: grad.abs().topk(count, sorted=False), runs),  # noqa: B023
            f"encode_{label}_ms": milliseconds(lambda: encode_gradient([part], sizes=[grad.numel()]), runs),  # noqa: B023
            f"decode_{label}_ms": milliseconds(lambda: decode_gradient(data, sizes=[grad.numel()]), runs),  # noqa: B023
            f"bits_per_position_{label}": round(bits, 2),
        }
    step = DGCStep(CONFIG, CONFIG.ratio, step=0, workers=2)
    part = make_part(grad, memory, step)
    entries = Entries(part.positions, part.words.values)
    results["compress_ms"] = milliseconds(lambda: make_part(grad, memory, step), runs)
    results["apply_two_ms"] = milliseconds(lambda: apply_parts([entries] * 2, grad, memory, CONFIG), runs)
    return results


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--dim", type=int, default=25_000_000, help="length of the gradient, which is normally distributed"
    )
    parser.add_argument("--runs", type=int, default=3, help="repeats, of which the best is reported")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    grad = torch.randn(options.dim, generator=torch.Generator().manual_seed(0))
    print(json.dumps({"dim": options.dim, "threads": THREADS, **measure(grad, options.runs)}))


if __name__ == "__main__":
    main()
