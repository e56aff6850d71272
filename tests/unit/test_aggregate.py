"""Aggregation: federated averaging, what follows it, and that it leaves nothing behind on errors."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from fedring.codec import TILE, Encoding, Entry, Schema, Vectors, decode, encode, encode_buffers
from fedring.codec.errors import CodecError
from fedring.server.model.aggregate import NewModel, Plan, aggregate, store_model
from fedring.server.model.downlink import apply_delta, delta_step
from fedring.server.model.mean import Contribution
from fedring.server.model.modelfile import ModelReader
from fedring.server.model.optimizer import ServerOptimizer
from fedring.server.model.walk import in_order, tiles
from fedring.server.state.blobs import FileBlobs
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
    plan: Plan | None = None,
    base: tuple[Schema, Vectors] = (SCHEMA, FIRST),
) -> tuple[NewModel, Vectors]:
    first = store_model(*base, blobs, {})
    with blobs.reader(first.blob) as blob:
        new = aggregate(ModelReader(blob), contributions, blobs, executor, plan or Plan())
    with blobs.reader(new.blob) as blob:
        vectors = ModelReader(blob).vectors()
    assert vectors.digest() == new.digest
    assert blobs.partials() == []
    return new, vectors


def test_deltas_count_by_their_samples(blobs: FileBlobs, executor: Executor) -> None:
    _, model = run(blobs, executor, [contribution("a", 3, [4, 0, 0, 0]), contribution("b", 1, [0, 8, 0, -4])])
    assert model.parameters.tolist() == [4.0, 4.0, 3.0, 3.0]


def test_weights_and_deltas_mean_the_same(blobs: FileBlobs, executor: Executor) -> None:
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


def test_only_those_who_send_buffers_count_for_them(blobs: FileBlobs, executor: Executor) -> None:
    sent = [contribution("a", 100, [0] * 4), contribution("b", 1, [0] * 4, buffers=[0.5, 0.5, 1.0])]
    assert run(blobs, executor, sent)[1].buffers.tolist() == [1.0, 2.0, 11.0]
    assert run(blobs, executor, sent[:1])[1].buffers.tolist() == FIRST.buffers.tolist()


def test_the_order_of_arrival_changes_nothing_even_where_sums_cancel(blobs: FileBlobs, executor: Executor) -> None:
    sent = [contribution(name, 1, [value] * 4) for name, value in (("a", 2.0**60), ("b", 3.0), ("c", -(2.0**60)))]
    digests = {run(blobs, executor, order)[0].digest for order in permutations(sent)}
    assert len(digests) == 1  # in float64 2^60 + 3 - 2^60 is not 2^60 - 2^60 + 3


def test_a_model_of_many_tiles_is_averaged_everywhere(blobs: FileBlobs, executor: Executor) -> None:
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


def test_a_mean_beyond_float32_is_refused_and_leaves_nothing(blobs: FileBlobs, executor: Executor) -> None:
    base = Vectors(np.full(4, 3e38, np.float32), FIRST.buffers)
    with pytest.raises(CodecError, match="non_finite"):
        run(blobs, executor, [contribution("a", 1, [3e38] * 4)], base=(SCHEMA, base))
    assert blobs.partials() == []


@pytest.mark.parametrize("names", ["", "aa"])
def test_no_client_and_a_client_twice_are_refused(blobs: FileBlobs, executor: Executor, names: str) -> None:
    with pytest.raises(ValueError, match="contribut"):
        run(blobs, executor, [contribution(name, 1, [0] * 4) for name in names])


def test_a_server_optimizer_goes_on_from_its_saved_state(blobs: FileBlobs, executor: Executor) -> None:
    optimizer = ServerOptimizer("Adam", {"lr": 0.1})
    delta, state, model = np.array([1, -1, 2, 0.5], np.float32), b"", FIRST.parameters
    blob = ""
    for _ in range(3):
        plan = Plan(optimizer=optimizer, optimizer_blob=blob)
        base = Vectors(model, FIRST.buffers)
        new, got = run(blobs, executor, [contribution("a", 7, delta)], plan, (SCHEMA, base))
        model, state = optimizer.step(model, delta, state)
        assert np.array_equal(got.parameters, model)
        blob = new.optimizer_blob


def test_a_compressed_step_leads_every_client_to_the_published_model(blobs: FileBlobs, executor: Executor) -> None:
    plan = Plan(encoding=Encoding("int8", chunk=2))
    sent = [contribution("a", 3, [0.3, 0.1, 5, 0.7], buffers=[0.1, 0.2, 1])]
    new, model = run(blobs, executor, sent, plan)
    parameters, buffers = new.delta_packets
    with blobs.reader(new.delta_blob) as blob:
        step = decode(blob.read(parameters.offset, parameters.bytes), name="int8", length=4)
        change = decode(blob.read(buffers.offset, buffers.bytes), name="fp64", length=3)
    client = Vectors(apply_delta(FIRST.parameters, step.astype(np.float32)), FIRST.buffers + change)
    assert client.digest() == new.digest
    assert (parameters.kind, buffers.kind) == ("delta", "delta")
    with blobs.reader(new.residual_blob) as blob:
        owed = np.frombuffer(blob.read(0, blob.size), "<f4")
    assert np.allclose(model.parameters + owed, FIRST.parameters + sent_delta(sent[0]), atol=1e-6)
    assert np.abs(owed).max() > 1e-4


def sent_delta(sent: Contribution) -> NDArray[np.floating]:
    packet = sent.packets[0]
    return decode(sent.reader(packet.offset, packet.bytes), name=packet.encoding, length=4)


def test_what_a_step_leaves_out_comes_with_the_next() -> None:
    base, target = np.zeros(4, np.float32), np.array([1, 2, 3, 4], np.float32)
    model, owed = base, None
    for _ in range(4):
        step = delta_step(model, target, owed, Encoding("fp32_sparse", keep_ratio=0.25))
        assert np.array_equal(step.model + step.residual, target + (0 if owed is None else owed))
        model, owed = step.model, step.residual
        target = model  # nothing new: only what is owed
    assert model.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert owed is not None
    assert not owed.any()


def test_a_walk_is_in_order_and_bounded() -> None:
    begun: list[int] = []

    def work(start: int, stop: int) -> int:
        begun.append(start)
        return start

    with ThreadPoolExecutor(4) as executor:
        walk = in_order(executor, work, ((i, i + 1) for i in range(100)))
        assert [next(walk) for _ in range(3)] == [0, 1, 2]
        assert max(begun) < 10
        assert list(walk) == list(range(3, 100))


def test_a_walk_on_its_own_busy_thread_ends_all_the_same() -> None:
    with ThreadPoolExecutor(1) as executor:
        walk = in_order(executor, lambda start, stop: stop - start, tiles(2 * TILE + 1))
        assert executor.submit(lambda: list(walk)).result(60) == [TILE, TILE, 1]


def test_a_walk_that_is_broken_off_waits_for_its_readers() -> None:
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
