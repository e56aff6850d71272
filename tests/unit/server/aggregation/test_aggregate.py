"""Aggregation: rules, federated averaging, server optimizers and encoded deltas; errors leave nothing behind."""

import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedring.codec import TILE, Encoding, Entry, Schema, Vectors, decode, encode, encode_buffers
from fedring.codec.encoding import NAMES
from fedring.codec.errors import CodecError
from fedring.server.aggregation.aggregate import AggregationPlan, NewModel, aggregate, store_model
from fedring.server.aggregation.combining import Combination, Walk
from fedring.server.aggregation.contributions import Contribution, open_vectors
from fedring.server.aggregation.modelfile import ModelReader
from fedring.server.aggregation.optimizer import ServerOptimizer
from fedring.server.aggregation.robust import Median
from fedring.server.aggregation.rule import Rule, RuleError
from fedring.server.aggregation.walk import in_order, tiles
from fedring.server.model.downlink import apply_delta, delta_step
from fedring.server.model.transforms.download import Encoded
from fedring.server.model.transforms.optimizing import Optimized
from fedring.server.state.blobs import FileBlobs
from fedring.server.state.checked import read_checked
from fedring.server.state.rows import Kind, lay_out

SCHEMA = Schema(
    (
        Entry("w", (4,), "float32", "parameter"),
        Entry("mean", (2,), "float32", "buffer"),
        Entry("count", (), "int64", "buffer"),
    )
)
FIRST = Vectors(np.array([1, 2, 3, 4], np.float32), np.array([0.5, 1.5, 10.0]))


@pytest.fixture
def blobs(tmp_path: Path) -> Iterator[FileBlobs]:
    blobs = FileBlobs(tmp_path)
    yield blobs
    blobs.close()


@pytest.fixture
def executor() -> Iterator[Executor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


def contribution(
    client: str,
    samples: int,
    parameters: Sequence[float] | NDArray[np.float32],
    *,
    kind: Kind = "delta",
    buffers: Sequence[float] = (),
    encodings: Sequence[Encoding] = (Encoding("fp32"),),
) -> Contribution:
    """An update that sends `parameters` once in each encoding."""
    payloads = [encode(np.asarray(parameters, np.float32), encoding) for encoding in encodings]
    packets = [
        ("parameters", kind, encoding.name, len(data)) for encoding, data in zip(encodings, payloads, strict=True)
    ]
    if buffers:
        payloads.append(encode_buffers(np.asarray(buffers, np.float64)))
        packets.append(("buffers", kind, "fp64", len(payloads[-1])))
    data = b"".join(payloads)
    return Contribution(client, samples, lay_out(packets), lambda offset, size: data[offset : offset + size])  # type: ignore[arg-type]  # literals in a list


def run(
    blobs: FileBlobs,
    executor: Executor,
    contributions: Sequence[Contribution],
    plan: AggregationPlan | None = None,
    base: tuple[Schema, Vectors] = (SCHEMA, FIRST),
) -> tuple[NewModel, Vectors]:
    first = store_model(*base, blobs, {})
    with blobs.reader(first.blob) as blob:
        new = aggregate(ModelReader(blob), contributions, blobs, executor, plan or AggregationPlan())
    with blobs.reader(new.blob) as blob:
        vectors = ModelReader(blob).vectors()
    assert vectors.digest() == new.digest
    assert blobs.partials() == []
    return new, vectors


def test_deltas_are_weighted_by_samples(blobs: FileBlobs, executor: Executor) -> None:
    _, model = run(blobs, executor, [contribution("a", 3, [4, 0, 0, 0]), contribution("b", 1, [0, 8, 0, -4])])
    assert model.parameters.tolist() == [4.0, 4.0, 3.0, 3.0]


def test_weights_have_the_same_effect_as_deltas(blobs: FileBlobs, executor: Executor) -> None:
    delta = np.array([4, 0, -1, 0.5], np.float32)
    sent = [contribution("a", 3, FIRST.parameters + delta, kind="weights"), contribution("b", 1, delta)]
    _, model = run(blobs, executor, sent)
    assert model.parameters.tolist() == (FIRST.parameters + delta).tolist()


def test_packets_of_one_vector_add_up(blobs: FileBlobs, executor: Executor) -> None:
    two = (Encoding("fp32"), Encoding("fp32_sparse", keep_ratio=0.25))
    _, model = run(blobs, executor, [contribution("a", 5, [0, 8, 1, 0], encodings=two)])
    assert model.parameters.tolist() == [1.0, 18.0, 4.0, 4.0]


def test_buffers_are_averaged_and_counts_stay_whole(blobs: FileBlobs, executor: Executor) -> None:
    sent = [
        contribution("a", 1, [0] * 4, kind="weights", buffers=[1.0, 2.0, 11]),
        contribution("b", 2, [0] * 4, kind="weights", buffers=[2.5, 2.0, 12]),
    ]
    _, model = run(blobs, executor, sent)
    assert model.buffers.tolist() == [2.0, 2.0, 12.0]


def test_buffers_are_averaged_over_the_clients_that_send_them(blobs: FileBlobs, executor: Executor) -> None:
    sent = [contribution("a", 100, [0] * 4), contribution("b", 1, [0] * 4, buffers=[0.5, 0.5, 1.0])]
    assert run(blobs, executor, sent)[1].buffers.tolist() == [1.0, 2.0, 11.0]
    assert run(blobs, executor, sent[:1])[1].buffers.tolist() == FIRST.buffers.tolist()


def test_the_order_of_arrival_changes_nothing_even_if_sums_cancel(blobs: FileBlobs, executor: Executor) -> None:
    sent = [contribution(name, 1, [value] * 4) for name, value in (("a", 2.0**60), ("b", 3.0), ("c", -(2.0**60)))]
    digests = {run(blobs, executor, order)[0].digest for order in permutations(sent)}
    assert len(digests) == 1  # in float64 2^60 + 3 - 2^60 is not 2^60 - 2^60 + 3


def test_every_tile_of_a_large_model_is_averaged(blobs: FileBlobs, executor: Executor) -> None:
    size = 2 * TILE + 17
    rng = np.random.default_rng(0)
    schema = Schema((Entry("w", (size,), "float32", "parameter"),))
    base, *deltas = (rng.standard_normal(size, np.float32) for _ in range(3))
    encodings = (Encoding("fp32"), Encoding("uniform", chunk=1000))
    sent = [
        contribution(name, samples, delta, encodings=[encoding])
        for name, samples, delta, encoding in zip("ab", (30, 10), deltas, encodings, strict=True)
    ]
    _, model = run(blobs, executor, sent, base=(schema, Vectors(base, np.empty(0))))
    second = decode(encode(deltas[1], encodings[1]), name="uniform", length=size)
    wanted = base + (deltas[0].astype(np.float64) * 30 + second.astype(np.float64) * 10) / 40
    assert np.array_equal(model.parameters, wanted.astype(np.float32))


def test_a_mean_that_does_not_fit_into_float32_is_an_error_and_leaves_no_file(
    blobs: FileBlobs, executor: Executor
) -> None:
    base = Vectors(np.full(4, 3e38, np.float32), FIRST.buffers)
    with pytest.raises(CodecError, match="non_finite"):
        run(blobs, executor, [contribution("a", 1, [3e38] * 4)], base=(SCHEMA, base))
    assert blobs.partials() == []


@pytest.mark.parametrize("names", ["", "aa"])
def test_no_contribution_and_two_of_one_client_are_errors(blobs: FileBlobs, executor: Executor, names: str) -> None:
    with pytest.raises(ValueError, match="contribut"):
        run(blobs, executor, [contribution(name, 1, [0] * 4) for name in names])


def test_a_server_optimizer_continues_from_its_saved_state(blobs: FileBlobs, executor: Executor) -> None:
    optimizer = ServerOptimizer("Adam", {"lr": 0.1})
    delta, state, model = np.array([1, -1, 2, 0.5], np.float32), b"", FIRST.parameters
    saved = b""
    for _ in range(3):
        plan = AggregationPlan(steps=[Optimized(optimizer, saved)])
        base = Vectors(model, FIRST.buffers)
        new, got = run(blobs, executor, [contribution("a", 7, delta)], plan, (SCHEMA, base))
        model, state = optimizer.step(model, delta, state)
        assert np.array_equal(got.parameters, model)
        saved = read_checked(blobs, new.columns["optimizer_blob"])


def test_an_encoded_delta_leads_every_client_to_the_published_model(blobs: FileBlobs, executor: Executor) -> None:
    plan = AggregationPlan(steps=[Encoded(Encoding("int8", chunk=2))])
    sent = [contribution("a", 3, [0.3, 0.1, 5, 0.7], buffers=[0.1, 0.2, 1])]
    new, model = run(blobs, executor, sent, plan)
    parameters, buffers = new.delta_packets
    with blobs.reader(new.columns["delta_blob"]) as blob:
        step = decode(blob.read(parameters.offset, parameters.bytes), name="int8", length=4)
        change = decode(blob.read(buffers.offset, buffers.bytes), name="fp64", length=3)
    client = Vectors(apply_delta(FIRST.parameters, step.astype(np.float32)), FIRST.buffers + change)
    assert client.digest() == new.digest
    assert (parameters.kind, buffers.kind) == ("delta", "delta")
    with blobs.reader(new.columns["residual_blob"]) as blob:
        residual = np.frombuffer(blob.read(0, blob.size), "<f4")
    assert np.allclose(model.parameters + residual, FIRST.parameters + sent_delta(sent[0]), atol=1e-6)
    assert np.abs(residual).max() > 1e-4


def sent_delta(sent: Contribution, length: int = 4) -> NDArray[np.floating]:
    packet = sent.packets[0]
    return decode(sent.reader(packet.offset, packet.bytes), name=packet.encoding, length=length)


def test_what_a_delta_leaves_out_is_sent_with_the_next() -> None:
    base, target = np.zeros(4, np.float32), np.array([1, 2, 3, 4], np.float32)
    model, residual = base, None
    for _ in range(4):
        step = delta_step(model, target, residual, Encoding("fp32_sparse", keep_ratio=0.25))
        assert np.array_equal(step.model + step.residual, target + (0 if residual is None else residual))
        model, residual = step.model, step.residual
        target = model  # nothing new: only the residual
    assert model.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert residual is not None
    assert not residual.any()


@pytest.mark.parametrize("encoding", sorted({*NAMES} - {"fp16"}))  # which sends less of it
def test_a_delta_makes_no_model_with_values_beyond_float32(encoding: str) -> None:
    """Each of the three fits, but what the encoding had left out before takes the next model beyond."""
    base, target, residual = (np.array([value, 0, 0, 0], np.float32) for value in (2e38, 3.4e38, 1.3e38))
    with pytest.raises(CodecError, match="does not fit into float32") as caught:
        delta_step(base, target, residual, Encoding(encoding))
    assert caught.value.reason == "non_finite"


@dataclass(frozen=True)
class BoundedNorm:
    """A rule of Gram matrices, for these tests: the plain mean of deltas that are scaled down to a norm of `bound`."""

    bound: float

    def coefficients(self, gram: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(np.minimum(1, self.bound / np.sqrt(np.diag(gram))) / len(gram))


def plan_of(rule: Rule) -> AggregationPlan:
    return AggregationPlan(combination=Combination(rule))


def test_a_rule_can_combine_all_clients_coordinate_by_coordinate(blobs: FileBlobs, executor: Executor) -> None:
    weights = FIRST.parameters + np.array([9, 2, 0, 1], np.float32)
    sent = [
        contribution("a", 1, [1, 5, 0, 0], buffers=[1, 1, 1]),
        contribution("b", 1000, weights, kind="weights"),
        contribution("c", 1, [2, 7, -8, 1]),
    ]
    _, model = run(blobs, executor, sent, plan_of(Median()))
    assert model.parameters.tolist() == [3.0, 7.0, 3.0, 5.0]
    assert model.buffers.tolist() == (FIRST.buffers + 1).tolist()


def test_a_rule_of_gram_matrices_gives_each_client_one_coefficient(blobs: FileBlobs, executor: Executor) -> None:
    sent = [contribution("a", 1, [3, 4, 0, 0], buffers=[1, 1, 1]), contribution("b", 9, [0, 0, 300, 400])]
    models = [run(blobs, executor, order, plan_of(BoundedNorm(5)))[1] for order in (sent, sent[::-1])]
    assert models[0].parameters.tolist() == [2.5, 4.0, 4.5, 6.0]
    assert models[0].buffers.tolist() == (FIRST.buffers + 1).tolist()
    assert models[0].digest() == models[1].digest()


def test_with_a_rule_of_gram_matrices_one_client_does_not_move_the_buffers(
    blobs: FileBlobs, executor: Executor
) -> None:
    values = {"a": [0.5, 0.25, 1], "b": [0.25, 0.5, 1], "c": [1e200, -1e200, 1e15]}
    sent = [contribution(name, 1, [1, 1, 1, 1], buffers=each) for name, each in values.items()]
    assert run(blobs, executor, sent, plan_of(BoundedNorm(9)))[1].buffers.tolist() == [1.0, 1.75, 11.0]


def test_a_gram_matrix_covers_every_tile_before_the_deltas_are_added_up(blobs: FileBlobs, executor: Executor) -> None:
    size = 2 * TILE + 17
    schema = Schema((Entry("w", (size,), "float32", "parameter"),))
    base, first, second = (np.random.default_rng(seed).standard_normal(size, np.float32) for seed in range(3))
    sent = [contribution("a", 1, first, encodings=[Encoding("uniform", chunk=1000)]), contribution("b", 1, second)]
    steps = [Optimized(ServerOptimizer("SGD", {"lr": 1.0}))]
    plan = AggregationPlan(combination=Combination(BoundedNorm(100)), steps=steps)
    _, model = run(blobs, executor, sent, plan, (schema, Vectors(base, np.empty(0))))
    deltas = np.stack([sent_delta(each, size).astype(np.float64) for each in sent])
    factors = np.minimum(1, 100 / np.linalg.norm(deltas, axis=1, keepdims=True))
    wanted = np.mean(deltas * factors, axis=0)
    np.testing.assert_allclose(model.parameters, base + wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rule", [BoundedNorm(7.0), Median()])
def test_updates_that_do_not_fit_into_memory_side_by_side_are_read_in_pieces(
    blobs: FileBlobs, executor: Executor, rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = TILE + 17
    schema = Schema((Entry("w", (size,), "float32", "parameter"),))
    base, *deltas = (np.random.default_rng(seed).standard_normal(size, np.float32) for seed in range(4))
    encodings = ("uniform", "packed", "fp32")
    sent = [
        contribution(name, 1, delta, encodings=[Encoding(encoding, chunk=1000)])
        for name, delta, encoding in zip("abc", deltas, encodings, strict=True)
    ]
    first = (schema, Vectors(base, np.empty(0)))
    _, whole = run(blobs, executor, sent, plan_of(rule), first)
    monkeypatch.setattr("fedring.server.aggregation.combining.ROWS_BYTES", 3 * 4 * 300_000)
    _, model = run(blobs, executor, sent, plan_of(rule), first)
    np.testing.assert_allclose(model.parameters, whole.parameters, rtol=0, atol=1e-6)


def test_what_lies_side_by_side_never_takes_more_memory_than_the_limit(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = TILE + 17
    values = np.random.default_rng(0).standard_normal(size, np.float32)
    sent = [contribution(f"c{number}", 1, values, encodings=[Encoding("uniform")]) for number in range(4)]
    base = np.ones(size, np.float32)
    walk = Walk(lambda low, high: base[low:high], size, open_vectors(sent, "parameters", size), executor)
    monkeypatch.setattr("fedring.server.aggregation.combining.ROWS_BYTES", 3_000_000)
    wanted, start = sent_delta(sent[0], size), 0
    for part, rows in walk.side_by_side():
        assert rows.nbytes <= 3_000_000
        assert (rows == wanted[start : start + len(part)]).all()
        start += len(part)
    assert start == size


class Broken:
    """A rule that returns what it is given, or raises it."""

    def __init__(self, result: object) -> None:
        self.result = result

    def combine(self, deltas: NDArray[np.float64], weights: NDArray[np.float64]) -> Any:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    coefficients = combine  # the method that is asked for first


BROKEN = {
    "a value that is not finite": [0.5, np.nan],
    "an array of shape (3,) instead of (2,)": np.zeros(3),
    "it raised KeyError: 'client'": KeyError("client"),
    "it raised TypeError": object(),
}


@pytest.mark.parametrize("text", BROKEN)
def test_a_rule_that_fails_ends_the_aggregation_with_one_sentence(
    blobs: FileBlobs, executor: Executor, text: str
) -> None:
    sent = [contribution("a", 1, [0] * 4), contribution("b", 1, [0] * 4)]
    with pytest.raises(RuleError, match=re.escape(text)) as caught:
        run(blobs, executor, sent, plan_of(Broken(BROKEN[text])))
    assert caught.value.reason == "bad_rule"
    assert blobs.partials() == []


def test_a_factor_shortens_the_parameters_and_leaves_the_buffers(blobs: FileBlobs, executor: Executor) -> None:
    clipped = replace(contribution("a", 1, [4, 0, 0, 8], buffers=[1, 1, 1]), factor=0.25)
    weights = replace(contribution("b", 3, FIRST.parameters + 4, kind="weights"), factor=0.5)
    _, model = run(blobs, executor, [clipped, weights])
    assert model.parameters.tolist() == [2.75, 3.5, 4.5, 6.0]
    assert model.buffers.tolist() == (FIRST.buffers + 1).tolist()


def test_a_walk_is_in_order_and_computes_few_tiles_ahead() -> None:
    begun: list[int] = []

    def work(start: int, stop: int) -> int:
        begun.append(start)
        return start

    with ThreadPoolExecutor(4) as executor:
        walk = in_order(executor, work, ((i, i + 1) for i in range(100)))
        assert [next(walk) for _ in range(3)] == [0, 1, 2]
        assert max(begun) < 10
        assert list(walk) == list(range(3, 100))


def test_a_walk_ends_although_its_only_thread_is_busy_with_it() -> None:
    with ThreadPoolExecutor(1) as executor:
        walk = in_order(executor, lambda start, stop: stop - start, tiles(2 * TILE + 1))
        assert executor.submit(lambda: list(walk)).result(60) == [TILE, TILE, 1]


def test_a_walk_that_is_closed_early_waits_for_the_tiles_it_has_begun() -> None:
    entered, leave = threading.Event(), threading.Event()
    finished: list[int] = []

    def work(start: int, stop: int) -> int:
        if start == 1:
            entered.set()
            leave.wait(60)
            finished.append(start)
        return start

    with ThreadPoolExecutor(2) as executor:
        walk = in_order(executor, work, ((i, i + 1) for i in range(9)))
        next(walk)
        entered.wait(60)
        threading.Timer(0.05, leave.set).start()
        walk.close()
        assert finished == [1]
