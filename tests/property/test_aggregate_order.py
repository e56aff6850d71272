"""The law of aggregation: the same updates give the same bytes, in any order of arrival and with any threads."""

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedring.codec import NAMES, Encoding, Entry, Reader, Schema, Vectors, decode, encode
from fedring.server.aggregation.aggregate import AggregationPlan, aggregate, store_model
from fedring.server.aggregation.contributions import Contribution
from fedring.server.aggregation.modelfile import ModelReader
from fedring.server.state.blobs import FileBlobs
from fedring.server.state.rows import lay_out

SIZE = 300
SCHEMA = Schema((Entry("w", (SIZE,), "float32", "parameter"),))

clients = st.lists(
    st.tuples(st.integers(1, 1 << 40), st.sampled_from(NAMES), st.floats(1e-6, 1e6)), min_size=1, max_size=6
)


@settings(max_examples=25, deadline=None)
@given(clients=clients, seed=st.integers(0, 1 << 30))
def test_the_order_of_arrival_changes_no_byte(clients: list[tuple[int, str, float]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    base = rng.standard_normal(SIZE, np.float32)
    contributions, total = [], np.zeros(SIZE)
    for number, (samples, name, scale) in enumerate(clients):
        payload = encode((rng.standard_normal(SIZE) * scale).astype(np.float32), Encoding(name, chunk=64))
        packets = lay_out([("parameters", "delta", name, len(payload))])
        contributions.append(Contribution(f"c{number}", samples, packets, _reader(payload)))
        total += samples * decode(payload, name=name, length=SIZE).astype(np.float64)
    shuffled = Random(seed).sample(contributions, len(contributions))
    results = [_aggregate(base, order, threads) for order, threads in ((contributions, 1), (shuffled, 3))]
    assert np.array_equal(results[0], results[1])
    wanted = base + total / sum(samples for samples, _, _ in clients)
    assert np.array_equal(results[0], wanted.astype(np.float32))


def _aggregate(base: NDArray[np.float32], contributions: list[Contribution], threads: int) -> NDArray[np.float32]:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(threads) as executor:
        blobs = FileBlobs(Path(folder))
        first = store_model(SCHEMA, Vectors(base, np.empty(0)), blobs, {})
        with blobs.reader(first.blob) as blob:
            new = aggregate(ModelReader(blob), contributions, blobs, executor, AggregationPlan())
        with blobs.reader(new.blob) as blob:
            parameters = ModelReader(blob).vectors().parameters
        blobs.close()
    return parameters


def _reader(payload: bytes) -> Reader:
    return lambda offset, size: payload[offset : offset + size]
