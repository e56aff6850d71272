"""FedDyn on the server: its formulas over several rounds, whom its state belongs to, and which jobs it goes with."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.closed_rounds import FixedPast, closed_round
from tests.damage import flip
from tests.unit.host import running
from tests.unit.host import spec as vector_job
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedring.codec import Encoding, encode
from fedring.codec.digest import name_of
from fedring.codec.encoding import TILE
from fedring.codec.errors import CodecError
from fedring.daemon.config import ConfigError
from fedring.server.aggregation.modelfile import ModelReader
from fedring.server.aggregation.steps import BaseFiles
from fedring.server.aggregation.versions import ModelVersions
from fedring.server.config import ServerConfig
from fedring.server.model.making import ModelMaker
from fedring.server.model.transforms.named import feddyn
from fedring.server.model.transforms.states import read_states
from fedring.server.operator.job_checks import JobChecks
from fedring.server.running.private_rounds import RoundPast
from fedring.server.running.rounds import abandon
from fedring.server.state.blobs import FileBlobs
from fedring.server.state.checked import CheckedReader, read_checked
from fedring.server.state.failures import DamagedModel
from fedring.server.state.rows import Kind, ModelRow, UpdateRow, lay_out
from fedring.simulation import simulate
from fedring.train.jobs.job import Job

Float64 = NDArray[np.float64]

SIZE = 2 * TILE + 5


def spec(*, size: int = SIZE, alpha: float = 0.5, clients: int = 0, **keys: Any) -> Job:
    args: dict[str, Any] = {"alpha": alpha} | ({"clients": clients} if clients else {})
    fixed = {"weights": "uniform", "model_args": {"size": size}, "min_clients": 4}
    return vector_job(**{**fixed, "transforms": [{"name": "feddyn", "args": args}], **keys})


class Reference:
    """Acar et al. 2021, algorithm 1, as it is printed: with each device's theta_k and gradient, in float64."""

    def __init__(self, theta: Float64, alpha: float, devices: int) -> None:
        self.theta, self.alpha, self.devices = theta, alpha, devices
        self.h = np.zeros_like(theta)

    def round(self, deltas: Sequence[Float64]) -> None:
        trained = [self.theta + delta for delta in deltas]
        moved = sum((theta_k - self.theta for theta_k in trained), start=np.zeros_like(self.theta))
        self.h = self.h - self.alpha / self.devices * moved
        self.theta = sum(trained, start=np.zeros_like(self.theta)) / len(trained) - self.h / self.alpha


class Server:
    """A maker of models, and the blobs that it makes."""

    def __init__(self, root: Path, executor: ThreadPoolExecutor) -> None:
        self.root, self.blobs = root, FileBlobs(root)
        config = ServerConfig.model_validate({"state_dir": root})
        self.maker = ModelMaker(self.blobs, executor, config, "run-1", ModelVersions(self.blobs))

    def values(self, row: ModelRow) -> Float64:
        with self.blobs.reader(row.blob) as blob:
            return ModelReader(blob).vectors().parameters.astype(np.float64)

    def next(self, job: Job, base: ModelRow, deltas: Sequence[Float64], **keys: Any) -> ModelRow:
        rows = [update_of(f"client-{number}", delta) for number, delta in enumerate(deltas)]
        return self.maker.next(base, self.maker.prepare(closed_round(job, rows, **keys)), base.version + 1)

    def h(self, row: ModelRow) -> NDArray[np.float32]:
        return read_states(read_checked(self.blobs, row.transforms_blob))[0]["feddyn"]["h"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with ThreadPoolExecutor(2) as executor:
        server = Server(tmp_path, executor)
        yield server
        server.blobs.close()


def update_of(client: str, delta: Float64, kind: Kind = "delta") -> UpdateRow:
    payload = encode(delta.astype(np.float32), Encoding("fp32"))
    packets, name = lay_out([("parameters", kind, "fp32", len(payload))]), name_of(client.encode() + payload)
    digest = name_of(payload)
    return UpdateRow(1, client, digest, name, packets, 7, len(payload), 0.0, 1.0, 2.0, payload=payload)


def drawn(count: int, seed: int, size: int = SIZE) -> list[Float64]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(size).astype(np.float32).astype(np.float64) for _ in range(count)]


@pytest.mark.parametrize("alpha", [0.01, 0.5, 10.0])
def test_models_follow_the_algorithm_over_rounds_with_other_clients_each(server: Server, alpha: float) -> None:
    job = spec(alpha=alpha, clients=6)
    model = server.maker.first(job, 1)
    reference = Reference(server.values(model), alpha, devices=6)
    for seed, count in enumerate([6, 1, 3, 6, 2]):
        deltas = drawn(count, seed)
        model = server.next(job, model, deltas)
        reference.round(deltas)
        np.testing.assert_allclose(server.values(model), reference.theta, atol=2e-5)
        np.testing.assert_allclose(server.h(model), reference.h, atol=2e-5 * max(1.0, alpha))


def test_by_default_all_clients_are_those_of_the_barrier_and_never_fewer_than_deliver(server: Server) -> None:
    job = spec(min_clients=4)
    first = server.maker.first(job, 1)
    for count, devices in ((2, 4), (4, 4), (6, 6)):
        deltas = drawn(count, 3)
        reference = Reference(server.values(first), 0.5, devices)
        reference.round(deltas)
        np.testing.assert_allclose(server.values(server.next(job, first, deltas)), reference.theta, atol=1e-5)


def test_with_full_participation_clients_that_stand_still_move_the_model_on_along_h(server: Server) -> None:
    job = spec(clients=2, min_clients=2)
    first = server.maker.first(job, 1)
    (delta,) = drawn(1, 4)
    second = server.next(job, first, [delta, delta])
    third = server.next(job, second, [0 * delta, 0 * delta])
    np.testing.assert_allclose(server.values(second), server.values(first) + 2 * delta, atol=1e-5)
    np.testing.assert_allclose(server.values(third), server.values(second) + delta, atol=1e-5)


def test_a_state_belongs_to_one_job_and_its_arguments(server: Server) -> None:
    job, deltas = spec(), drawn(4, 5)
    model = server.next(job, server.maker.first(job, 1), deltas)
    anew = server.next(job, replace(model, transforms_blob=""), deltas)
    assert server.next(job, model, deltas).digest != anew.digest
    assert server.next(job, model, deltas, job_id=2).digest == anew.digest
    other, alone = spec(alpha=0.25), replace(model, transforms_blob="")
    assert server.next(other, model, deltas).digest == server.next(other, alone, deltas).digest
    # A job without it leaves none, so one after that begins anew, too.
    plain = vector_job(model_args={"size": SIZE})
    assert server.next(plain, model, deltas).transforms_blob == ""


def test_an_encoded_download_is_made_of_the_model_that_feddyn_wants(server: Server) -> None:
    job, deltas = spec(download_encoding="int8"), drawn(4, 6)
    first = server.maker.first(job, 1)
    exact = server.values(server.next(spec(), first, deltas))
    made = server.next(job, first, deltas)
    assert made.delta_blob
    assert made.transforms_blob
    residual = np.frombuffer(read_checked(server.blobs, made.residual_blob), "<f4")
    np.testing.assert_allclose(server.values(made) + residual, exact, atol=1e-5)


def test_a_damaged_state_is_the_damage_of_its_model(server: Server) -> None:
    job, deltas = spec(), drawn(4, 7)
    model = server.next(job, server.maker.first(job, 1), deltas)
    flip(server.root / "blobs" / model.transforms_blob)
    with pytest.raises(DamagedModel, match="does not hold what was written"):
        server.next(job, model, deltas)


def test_values_that_grow_beyond_float32_make_no_model(server: Server) -> None:
    job, huge = spec(size=3, alpha=1e30), [np.full(3, 1e30)] * 4
    first = server.maker.first(job, 1)
    before = set(server.root.rglob("*"))
    with pytest.raises(CodecError, match="h of feddyn does not fit") as caught:
        server.next(job, first, huge)
    assert caught.value.reason == "non_finite"
    assert set(server.root.rglob("*")) == before


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"weights": "samples"}, 'transforms: feddyn needs weights = "uniform", and it is "samples"'),
        ({"aggregation": {"rule": "median"}}, 'feddyn needs aggregation.rule = "mean", and it is "median"'),
        ({"mu": 0.1}, "feddyn needs mu = 0.0, and it is 0.1"),
        ({"scaffold": True, "momentum": 0.0}, "feddyn needs scaffold = false, and it is true"),
        ({"update_clip": 1.0}, "feddyn needs update_clip = 0.0, and it is 1.0"),
        ({"update_clip_factor": 1.0}, "feddyn needs update_clip_factor = 0.0, and it is 1.0"),
        ({"normalize_steps": True}, "feddyn needs normalize_steps = false, and it is true"),
        ({"server_optimizer": {"name": "Adam", "args": {}}}, "feddyn does not go with the table [server_optimizer]"),
        ({"dp": {"noise_multiplier": 1.0, "adaptive": False}}, "feddyn does not go with the table [dp]: leave one"),
        ({"sample_dp": {"noise_multiplier": 1.0}}, "feddyn does not go with the table [sample_dp]"),
        (
            {"secure_aggregation": {}, "min_clients_to_aggregate": 3},
            "feddyn does not go with the table [secure_aggregation]",
        ),
        ({"clients": 3}, "feddyn: clients = 3 are all clients, and min_clients = 4 take part: raise clients"),
        ({"alpha": 0.0}, "transforms: feddyn: alpha: must be greater than 0, not 0"),
        ({"transforms": [{"name": "feddyn"}]}, "transforms: feddyn: alpha: must be given"),
        ({"transforms": [{"name": "feddyn", "args": {"alpha": 1, "beta": 2}}]}, "transforms: feddyn: beta"),
        ({"transforms": [{"name": "fedyn"}]}, "transforms: there is no transform fedyn: did you mean feddyn?"),
        ({"transforms": [{"name": "os"}]}, "transforms: there is no transform os: choose from feddyn"),
    ],
)
def test_jobs_that_it_does_not_go_with_are_refused_when_they_are_queued(
    server: Server, keys: dict[str, Any], sentence: str
) -> None:
    checks = JobChecks(ServerConfig.model_validate({}), server.maker)
    checks.check(spec(size=3), [], runs_next=True)
    with pytest.raises(ConfigError) as caught:
        checks.check(spec(size=3, **keys), [], runs_next=True)
    assert sentence in str(caught.value)
    assert str(caught.value).startswith("transforms: ")


async def test_a_server_keeps_the_state_from_round_to_round_and_from_start_to_start(tmp_path: Path) -> None:
    job = spec(size=8, clients=2, min_clients=2, min_clients_to_aggregate=2, rounds=3)
    deltas = [drawn(2, seed, 8) for seed in range(3)]
    async with running(tmp_path) as host:
        sessions = [host.join(name) for name in ("a", "b")]
        row, _ = await host.jobs.start(job, "")
        for both in deltas:
            for session, delta in zip(sessions, both, strict=True):
                command = await host.command(session)
                await host.push(session, command, delta.astype(np.float32))
        assert await host.ended(row.job_id) == "completed"
        newest, *older, first = host.store.models.newest(10)
        with host.blobs.reader(newest.blob) as blob:
            made = ModelReader(blob).vectors().parameters
        with host.blobs.reader(first.blob) as blob:
            reference = Reference(ModelReader(blob).vectors().parameters.astype(np.float64), 0.5, 2)
    for both in deltas:
        reference.round(both)
    np.testing.assert_allclose(made, reference.theta, atol=1e-5)
    assert newest.transforms_blob
    assert [model.transforms_blob for model in older[1:]] == [""] * len(older[1:])  # only the next round reads it


async def test_h_takes_in_what_abandoned_rounds_have_accepted(tmp_path: Path) -> None:
    job = spec(size=8, clients=2, min_clients=2, min_clients_to_aggregate=2, rounds=4)
    deltas = drawn(4, 0, 8)
    async with running(tmp_path) as host:
        a, b = (host.join(name) for name in ("a", "b"))
        row, _ = await host.jobs.start(job, "")
        for session, delta in ((a, deltas[0]), (b, deltas[1])):
            await host.push(session, await host.command(session), delta.astype(np.float32))
        await host.push(a, await host.command(a), deltas[2].astype(np.float32))
        await abandon(host.rounds, host.round, "barrier_timeout")
        await host.command(b)
        for session, delta in ((a, deltas[3]), (b, deltas[0])):
            await host.push(session, await host.command(session), delta.astype(np.float32))
        for session in (a, b):
            await host.push(session, await host.command(session), deltas[1].astype(np.float32))
        assert await host.ended(row.job_id) == "completed"
        newest, first = host.store.models.newest(10)[0], host.store.models.newest(10)[-1]
        with host.blobs.reader(newest.blob) as blob:
            made = ModelReader(blob).vectors().parameters
        with host.blobs.reader(first.blob) as blob:
            reference = Reference(ModelReader(blob).vectors().parameters.astype(np.float64), 0.5, 2)
    reference.round(deltas[:2])
    reference.h -= 0.5 / 2 * deltas[2]  # the client has moved, and the model has not
    reference.round([deltas[3], deltas[0]])
    reference.round([deltas[1], deltas[1]])
    np.testing.assert_allclose(made, reference.theta, atol=1e-5)


def test_clients_that_delivered_in_an_abandoned_round_count_as_all_if_they_are_more(server: Server) -> None:
    job, deltas = spec(min_clients=2), drawn(6, 10)
    base = server.maker.first(job, 1)
    rows = [update_of(f"client-{number}", delta) for number, delta in enumerate(deltas)]
    made = server.next(job, base, [0 * deltas[0]] * 2, past=FixedPast(updates=rows))
    np.testing.assert_allclose(server.h(made), server.h(server.next(job, base, deltas)), atol=1e-6)


def test_updates_of_abandoned_rounds_may_come_in_any_order(server: Server) -> None:
    job, deltas = spec(), drawn(4, 11)
    base, far = server.maker.first(job, 1), 1e15 * deltas[0]
    rows = [update_of(f"client-{number}", delta) for number, delta in enumerate((far, deltas[1], -far))]
    orders = (rows, rows[::-1], [rows[0], rows[2], rows[1]])
    assert len({server.next(job, base, deltas, past=FixedPast(updates=order)).digest for order in orders}) == 1


@pytest.mark.parametrize(("where", "name"), [(feddyn.NextH, "begin"), (RoundPast, "uncounted")])
async def test_a_state_for_which_the_memory_does_not_suffice_ends_its_round_and_not_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: type, name: str
) -> None:
    def needs_memory(*_: object) -> None:
        raise MemoryError

    async with running(tmp_path) as host:
        session = host.join("a")
        with monkeypatch.context() as patched:
            patched.setattr(where, name, needs_memory)
            row, _ = await host.jobs.start(spec(size=8, min_clients=1, rounds=1, max_abandoned=1), "")
            await host.push(session, await host.command(session), drawn(1, 0, 8)[0].astype(np.float32))
            assert await host.ended(row.job_id) == "failed"
        assert host.store.rounds.newest(1)[0].reason == "out_of_memory"
        row, _ = await host.jobs.start(spec(size=8, min_clients=1, rounds=1), "")
        await host.push(session, await host.command(session), drawn(1, 0, 8)[0].astype(np.float32))
        assert await host.ended(row.job_id) == "completed"


def test_weights_of_an_abandoned_round_count_as_their_difference_from_the_base(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, deltas = spec(), drawn(4, 8)
    base = server.next(job, server.maker.first(job, 1), deltas)
    weights = update_of("client-0", server.values(base) + deltas[0], kind="weights")
    delta = update_of("client-0", deltas[0])
    made = [server.next(job, base, deltas, past=FixedPast(updates=[row])) for row in (weights, delta)]
    np.testing.assert_allclose(server.values(made[0]), server.values(made[1]), atol=1e-5)
    assert server.next(job, base, deltas).digest != made[1].digest
    opened, open_ = list[str](), BaseFiles.open

    def noted(files: BaseFiles, name: str) -> CheckedReader:
        opened.append(name)
        return open_(files, name)

    monkeypatch.setattr(BaseFiles, "open", noted)
    server.next(job, base, deltas, past=FixedPast(updates=[replace(weights, client_id=name) for name in "abc"]))
    assert opened == [base.blob] * 2  # once for all of them, and once for the new model


@pytest.mark.parametrize("place", [0, -1])
def test_a_damaged_update_of_an_abandoned_round_is_left_out_with_a_line(
    server: Server, caplog: pytest.LogCaptureFixture, place: int
) -> None:
    job, deltas = spec(), drawn(4, 9)
    base = server.next(job, server.maker.first(job, 1), deltas)
    whole, sound = update_of("client-1", deltas[0]), update_of("client-0", deltas[1])
    broken = bytearray(whole.payload)
    broken[place] ^= 1
    damaged = replace(whole, payload=bytes(broken))
    made = server.next(job, base, deltas, past=FixedPast(updates=[damaged]))
    assert made.digest == server.next(job, base, deltas).digest
    assert "h of feddyn lacks an update of client-1 in an abandoned round" in caplog.text
    others = [server.next(job, base, deltas, past=FixedPast(updates=rows)) for rows in ([sound, damaged], [sound])]
    assert others[0].digest == others[1].digest != made.digest


def test_updates_of_abandoned_rounds_are_read_piece_by_piece(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    job, deltas = spec(), drawn(4, 9)
    base = server.maker.first(job, 1)
    small = update_of("client-0", deltas[0])
    partial = server.blobs.open_partial("upload")
    partial.write(small.payload)
    server.blobs.seal_many([partial])
    large = replace(small, blob=small.digest, payload=b"")
    sizes, range_reader = list[int](), FileBlobs.range_reader

    def noting(blobs: FileBlobs, digest: str) -> Callable[[int, int], bytes]:
        read = range_reader(blobs, digest)

        def noted(offset: int, size: int) -> bytes:
            sizes.append(size)
            return read(offset, size)

        return noted

    monkeypatch.setattr(FileBlobs, "range_reader", noting)
    made = server.next(job, base, deltas, past=FixedPast(updates=[large]))
    assert sum(sizes) == large.total_bytes  # once
    assert max(sizes) < large.total_bytes / 2
    assert made.digest == server.next(job, base, deltas, past=FixedPast(updates=[small])).digest
    (server.root / "blobs" / large.blob).unlink()
    lacking = server.next(job, base, deltas, past=FixedPast(updates=[large]))
    assert lacking.digest == server.next(job, base, deltas).digest


def test_a_simulation_knows_what_abandoned_rounds_have_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    losses, uncounted = list[Tensor](), list[list[str]]()

    def fails_at_the_fourth_step(outputs: Tensor, labels: Tensor) -> Tensor:
        losses.append(cross_entropy(outputs, labels))
        if len(losses) == 4:
            raise ArithmeticError("once")
        return losses[-1]

    class Noting(feddyn.NextH):
        def __init__(self, alpha: float, clients: int, given: Sequence[UpdateRow]) -> None:
            super().__init__(alpha, clients, given)
            uncounted.append([row.client_id for row in given])

        def read(self, base: ModelRow, files: BaseFiles) -> None:
            super().read(base, files)
            assert (self._moved is not None) == bool(self._uncounted)

    monkeypatch.setattr(feddyn, "NextH", Noting)
    job = {"weights": "uniform", "min_clients": 2, "rounds": 4, "subset_size": 32, "batch_size": 32, "evaluate": False}
    job |= {"evaluate_on_server": False, "min_clients_to_aggregate": 2, "loss": fails_at_the_fourth_step}
    with_it = {**job, "transforms": [{"name": "feddyn", "args": {"alpha": 0.1}}]}
    report = simulate(with_it, clients=2, workers=1, threads=1)
    assert ["reason" in row for row in report["rounds"]] == [False, True, False, False]
    assert uncounted == [[], ["client-0"], []]


def test_a_simulation_runs_the_same_server_half() -> None:
    job = {"weights": "uniform", "min_clients": 2, "rounds": 2, "subset_size": 32, "seed": 3}
    plain, with_it = (
        simulate({**job, "transforms": each}, clients=2, workers=1, threads=1)
        for each in ([], [{"name": "feddyn", "args": {"alpha": 0.1}}])
    )
    assert plain["model_sha256"] != with_it["model_sha256"]
