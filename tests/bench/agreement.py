"""Compare each aggregation rule with the same rule of byzfl, on the same updates.

    python -m tests.bench.agreement [--clients 11] [--values 2000] [--draws 20] [--out DIR]

It needs `make outsiders`: byzfl (github.com/LPD-EPFL/byzfl) is the library of robust rules by the group
that Krum is from. Ours are computed by the server's own code, from encoded updates to a model. Each draw has honest
updates alone ("random"), or two malicious clients among them, who send what byzfl's own attacks make of the honest
updates. The difference is the largest of any value, relative to the largest value of byzfl's result. Shows progress on
stderr, then a table, and writes agreement.json.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedring import vision
from fedring.codec import Encoding, Entry, Schema, Vectors, encode
from fedring.ctl.local.progress import progress_bar
from fedring.ctl.output import print_table
from fedring.server.aggregation.aggregate import AggregationPlan, aggregate, store_model
from fedring.server.aggregation.combining import Combination
from fedring.server.aggregation.contributions import Contribution
from fedring.server.aggregation.modelfile import ModelReader
from fedring.server.aggregation.strategy import make_strategy
from fedring.server.state.blobs import FileBlobs
from fedring.server.state.rows import lay_out
from fedring.train.jobs.aggregation_table import Aggregation
from fedring.train.names.offered import Offered
from tests.bench.lab.parts import describe_run

MALICIOUS = 2
SPREAD = 1.0  # of honest updates around their mean, whose values are drawn with the deviation 1, too
ATTACKS = ("random", "SignFlipping", "ALittleIsEnough", "InnerProductManipulation", "Mimic", "boosted")
BOOST = 100.0  # how long the update of "boosted" is: what only a rule without bounds would follow
EXACT = 1e-6  # fp32 keeps seven digits

Updates = NDArray[np.float32]
"""One update in each row, [clients, values]."""

Theirs = Callable[[Any, NDArray[np.float64]], NDArray[np.float64]]
"""Takes the module byzfl and the updates in float64, and returns its result."""


def _radius(updates: NDArray[np.float64]) -> float:
    return float(np.median(np.linalg.norm(updates, axis=1)))


CASES: dict[str, tuple[dict[str, Any], Theirs, str]] = {
    "mean": ({"rule": "mean"}, lambda their, sent: their.Average()(sent), "McMahan et al. 2017"),
    "median": ({"rule": "median"}, lambda their, sent: their.Median()(sent), "Yin et al. 2018, definition 1"),
    "trimmed_mean": (
        {"rule": "trimmed_mean"},
        lambda their, sent: their.TrMean(MALICIOUS)(sent),
        "Yin et al. 2018, definition 2",
    ),
    "krum": (
        {"rule": "krum", "malicious": MALICIOUS},
        lambda their, sent: their.Krum(MALICIOUS)(sent),
        "ours: n - f - 2 neighbours, as Blanchard et al. 2017; byzfl: n - f - 1",
    ),
    "krum, as many neighbours": (
        {"rule": "krum", "malicious": MALICIOUS},
        lambda their, sent: their.Krum(MALICIOUS + 1)(sent),
        "both: n - f - 2 neighbours (byzfl with f + 1)",
    ),
    "multi_krum": (
        {"rule": "multi_krum", "malicious": MALICIOUS},
        lambda their, sent: their.MultiKrum(MALICIOUS)(sent),
        "as krum; the mean of n - f",
    ),
    "centered_clip": (
        {"rule": "centered_clip"},
        lambda their, sent: their.CenteredClipping(L=3, tau=_radius(sent))(sent),
        "Karimireddy et al. 2021, three iterations from 0; ours leaves out updates of three times the median norm",
    ),
    "geometric_median": (
        {"rule": "geometric_median"},
        lambda their, sent: their.GeometricMedian(nu=1e-6 * _radius(sent), T=8)(sent),
        "Pillutla et al. 2022, eight iterations; ours from the mean of shortened updates, byzfl from 0",
    ),
    "geometric_median, converged": (
        {"rule": "geometric_median"},
        lambda their, sent: their.GeometricMedian(nu=1e-6 * _radius(sent), T=500)(sent),
        "ours after 8 iterations, byzfl after 500: what the iterations leave",
    ),
}
"""The table of the job, byzfl's call, and what each of them computes, for each comparison."""


def main() -> None:
    """Print a table, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=11, help="updates of a round, of which 2 may be malicious")
    parser.add_argument("--values", type=int, default=2000, help="parameters of the model")
    parser.add_argument("--draws", type=int, default=20, help="sets of updates of each kind")
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="folder for agreement.json")
    options = parser.parse_args()
    try:
        vision.load()  # byzfl imports torchvision, whose compiled part need not load
        byzfl = import_module("byzfl")
    except ImportError:
        parser.error("byzfl is not installed: pip install --group outsiders")
    results = measure(byzfl, options.clients, options.values, options.draws)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "agreement.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print_table("Largest relative difference from byzfl", columns(results), table_rows(results))


def measure(byzfl: Any, clients: int, values: int, draws: int) -> dict[str, Any]:
    """Return the largest difference of each comparison under each attack, and how many draws agree."""
    rows: dict[str, dict[str, dict[str, float]]] = {case: {} for case in CASES}
    with progress_bar() as bar, tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as executor:
        task = bar.add_task("agreement", total=len(ATTACKS) * draws)
        blobs = FileBlobs(Path(folder))
        for attack in ATTACKS:
            found: dict[str, list[float]] = {case: [] for case in CASES}
            for seed in range(draws):
                sent = _updates(byzfl, attack, clients, values, seed)
                for case, (table, theirs, _) in CASES.items():
                    ours = combined(blobs, executor, _table(table, clients), sent)
                    wanted = theirs(byzfl, sent.astype(np.float64))
                    found[case].append(float(np.abs(ours - wanted).max() / np.abs(wanted).max()))
                bar.advance(task)
            for case, each in found.items():
                rows[case][attack] = {"largest": max(each), "agree": sum(one < EXACT for one in each)}
        blobs.close()
    described = describe_run("agreement", quick=False, chosen=(clients, values, draws) != (11, 2000, 20))
    return described | {"clients": clients, "values": values, "draws": draws, "rows": rows}


def combined(
    blobs: FileBlobs, executor: ThreadPoolExecutor, table: Mapping[str, Any], sent: Updates
) -> NDArray[np.float32]:
    """Return what the server adds to a model of zeros, [values], when it gets these updates in fp32."""
    schema = Schema((Entry("w", (sent.shape[1],), "float32", "parameter"),))
    base = store_model(schema, Vectors(np.zeros(sent.shape[1], np.float32), np.empty(0)), blobs, {}).blob
    contributions = []
    for number, update in enumerate(sent):
        partial, payload = blobs.open_partial(f"client-{number}"), encode(update, Encoding("fp32"))
        partial.write(payload)
        packets = lay_out([("parameters", "delta", "fp32", len(payload))])
        sealed = blobs.range_reader(blobs.seal_many([partial])[0])
        contributions.append(Contribution(f"client-{number:04}", 1, *(packets, sealed)))
    rule = make_strategy(Aggregation.model_validate(table), Offered()).rule
    with blobs.reader(base) as blob:
        plan = AggregationPlan(combination=Combination(rule))
        model = aggregate(ModelReader(blob), contributions, blobs, executor, plan)
    with blobs.reader(model.blob) as blob:
        return ModelReader(blob).vectors().parameters


def columns(results: Mapping[str, Any]) -> list[str]:
    """Return the heads of the table's columns."""
    return ["rule", *(f"{attack}>" for attack in ATTACKS), "what is compared"]


def table_rows(results: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of the table; behind a larger difference stands in how many draws there is none."""
    return [
        [case, *(_cell(by_attack[attack], results["draws"]) for attack in ATTACKS), CASES[case][2]]
        for case, by_attack in results["rows"].items()
    ]


def _cell(found: Mapping[str, float], draws: int) -> str:
    largest = f"{found['largest']:.0e}"
    return largest if found["agree"] == draws else f"{largest} ({found['agree']:.0f} of {draws} agree)"


def _table(table: Mapping[str, Any], clients: int) -> dict[str, Any]:
    return {**table, "beta": MALICIOUS / clients} if table["rule"] == "trimmed_mean" else dict(table)


def _updates(byzfl: Any, attack: str, clients: int, values: int, seed: int) -> Updates:
    """Return the updates of one draw: honest ones around a common direction, and behind them the malicious ones."""
    random = np.random.RandomState(seed)
    direction = random.standard_normal(values)
    honest = direction + SPREAD * random.standard_normal((clients, values))
    if attack == "random":
        return honest.astype(np.float32)
    honest = honest[: clients - MALICIOUS]
    if attack == "boosted":
        lie = BOOST * random.standard_normal(values)
    else:
        lie = np.asarray(getattr(byzfl, attack)()(honest))
    return np.concatenate([honest, np.repeat(lie[None], MALICIOUS, axis=0)]).astype(np.float32)


if __name__ == "__main__":
    main()
