"""Laws of the rules and of the guards: the order of arrival changes no byte, and one client has bounded influence."""

import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedring.codec import NAMES, Encoding, Entry, Schema, Vectors, encode, encode_buffers
from fedring.server.aggregation.aggregate import AggregationPlan, aggregate, store_model
from fedring.server.aggregation.combining import Combination
from fedring.server.aggregation.contributions import Contribution
from fedring.server.aggregation.modelfile import ModelReader
from fedring.server.aggregation.robust import CenteredClip, GeometricMedian, Krum, Median, TrimmedMean
from fedring.server.aggregation.rule import Rule
from fedring.server.model.guards import guard
from fedring.server.state.blobs import FileBlobs
from fedring.server.state.rows import UpdateRow, lay_out
from fedring.train.jobs.job import Job

SIZE = 300
SCHEMA = Schema((Entry("w", (SIZE,), "float32", "parameter"), Entry("mean", (3,), "float32", "buffer")))
RULES: list[Rule] = [
    CenteredClip(),
    CenteredClip(0.5),
    GeometricMedian(),
    Krum(1),
    Krum(1, True),
    Median(),
    TrimmedMean(0.2),
]

clients = st.lists(
    st.tuples(st.integers(1, 1 << 40), st.sampled_from(NAMES), st.floats(1e-6, 1e6)), min_size=5, max_size=12
)


@settings(max_examples=25, deadline=None)
@given(
    clients=clients,
    rule=st.sampled_from(RULES),
    bucketing=st.integers(1, 2),
    seed=st.integers(0, 1 << 30),
)
def test_the_order_of_arrival_changes_no_byte_with_any_rule(
    clients: list[tuple[int, str, float]], rule: Rule, bucketing: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    base = rng.standard_normal(SIZE, np.float32)
    sent = [
        contribution(f"c{number}", samples, (rng.standard_normal(SIZE) * scale).astype(np.float32), name, scale)
        for number, (samples, name, scale) in enumerate(clients)
    ]
    how = Combination(rule, bucketing, str(seed))
    shuffled = Random(seed).sample(sent, len(sent))
    models = [make(base, order, how, threads) for order, threads in ((sent, 1), (shuffled, 3))]
    assert models[0].digest() == models[1].digest()


attacks = st.tuples(st.integers(1, 1 << 40), st.floats(1e-3, 1e6))


@settings(max_examples=25, deadline=None)
@given(
    honest=st.lists(st.tuples(st.integers(1, 2000), st.floats(0.1, 10)), min_size=1, max_size=6),
    attack=attacks,
    max_samples=st.integers(1, 4000),
    clip=st.floats(0.01, 10),
    seed=st.integers(0, 1 << 30),
)
def test_one_client_moves_the_mean_by_at_most_its_share_of_twice_the_bound(
    honest: list[tuple[int, float]], attack: tuple[int, float], max_samples: int, clip: float, seed: int
) -> None:
    """Whatever one client sends, the mean moves by 2 C w_max / sum(w), compared with an honest update or with none."""
    rng = np.random.default_rng(seed)
    base = np.zeros(SIZE, np.float32)
    samples, norm = attack
    others = [update(f"c{number}", count, size, rng) for number, (count, size) in enumerate(honest)]
    mine = [[update("x", samples, norm, rng)], [update("x", samples, 1.0, rng)], []]
    job = Job.model_validate({"update_clip": clip, "max_samples": max_samples})
    models, weights = [], guard(job, [row for row, _ in [*others, *mine[0]]]).weights
    for updates in ([*others, *each] for each in mine):
        factors = guard(job, [row for row, _ in updates]).factors
        sent = [
            replace(each, weight=weights[row.client_id], factor=factors.get(row.client_id, 1.0))
            for row, each in updates
        ]
        models.append(make(base, sent, Combination(), 2).parameters.astype(np.float64))
    assert max(weights.values()) <= max_samples
    bound = 2 * clip * max(weights.values()) / sum(weights.values())
    for other in models[1:]:
        assert np.linalg.norm(models[0] - other) <= bound * (1 + 1e-5)


def update(client: str, samples: int, norm: float, rng: np.random.Generator) -> tuple[UpdateRow, Contribution]:
    direction = rng.standard_normal(SIZE)
    values: NDArray[np.float32] = (direction * (norm / np.linalg.norm(direction))).astype(np.float32)
    row = UpdateRow(1, client, "", "", (), samples, 1, 1.0, float(np.linalg.norm(values.astype(np.float64))), 1.0)
    return row, contribution(client, samples, values, "fp32", 1.0)


def contribution(client: str, samples: int, values: NDArray[np.float32], name: str, scale: float) -> Contribution:
    payloads = [encode(values, Encoding(name, chunk=64)), encode_buffers(np.array([scale, -scale, 1.0]))]
    data = b"".join(payloads)
    packets = lay_out([("parameters", "delta", name, len(payloads[0])), ("buffers", "delta", "fp64", len(payloads[1]))])
    return Contribution(client, samples, packets, lambda offset, size: data[offset : offset + size])


def make(base: NDArray[np.float32], sent: list[Contribution], how: Combination, threads: int) -> Vectors:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(threads) as executor:
        blobs = FileBlobs(Path(folder))
        first = store_model(SCHEMA, Vectors(base, np.zeros(3)), blobs, {})
        with blobs.reader(first.blob) as blob:
            new = aggregate(ModelReader(blob), sent, blobs, executor, AggregationPlan(combination=how))
        with blobs.reader(new.blob) as blob:
            vectors = ModelReader(blob).vectors()
        blobs.close()
    return vectors
