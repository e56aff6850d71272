"""Models of masked updates, with rules, optimizers and encodings, and the steps that follow from them."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.closed_rounds import next_model, secure_round_of
from tests.damage import flip
from tests.masked_groups import masked

from fedring.codec.digest import name_of
from fedring.daemon.config import ConfigError
from fedring.secure.levels import open_blocks, to_integers
from fedring.secure.limits import bits_of_sum
from fedring.secure.masks import MASKED
from fedring.server.aggregation.modelfile import ModelReader
from fedring.server.config import ServerConfig
from fedring.server.model.masked_sum import GroupMasks
from fedring.server.model.models import Models
from fedring.server.model.transforms.masked import Pace, Spread, pace_in, secure_round
from fedring.server.operator.job_checks import JobChecks
from fedring.server.state.blobs import FileBlobs
from fedring.server.state.checked import read_checked
from fedring.server.state.facts import Facts
from fedring.server.state.failures import DamagedModel, DamagedUpdates
from fedring.server.state.rows import ModelRow, UpdateRow, lay_out
from fedring.server.state.sql.store import Store
from fedring.train.jobs.job import Job
from fedring.train.jobs.secure_table import SecureAggregation
from fedring.v1.secure_pb2 import SecureRound

SIZE = 5000
CODE = "tests.fixtures_user_code.user_simulation"
CLIENTS = [f"client-{number}" for number in range(8)]
TABLE: dict[str, Any] = {"block": 64, "step": 0.5, "first_norm": 5.0}


def spec(table: Mapping[str, Any] | None = None, **keys: Any) -> Job:
    return Job.model_validate(
        {
            "model": "fedring.train.models:vector",
            "model_args": {"size": SIZE},
            "secure_aggregation": {**TABLE, **(table or {})},
            "min_clients": len(CLIENTS),
            "min_clients_to_aggregate": 6,
            "weights": "uniform",
            "evaluate": False,
            **keys,
        }
    )


class Rounds:
    """Rounds with secure aggregation, without a network."""

    def __init__(self, root: Path) -> None:
        self.root, self.blobs = root, FileBlobs(root)
        self.facts = Facts(Store("sqlite://"), self.blobs, threads=2)
        self.models = Models(self.blobs, self.facts.pool, ServerConfig.model_validate({"state_dir": root}), "run-1")
        self.deltas: dict[str, NDArray[np.float32]] = {}
        self.sums: dict[str, NDArray[np.float64]] = {}  # by group, without masks
        self.weights: dict[str, int] = {}

    def first(self, job: Job) -> ModelRow:
        return self.models.maker.first(job, 1)

    def values(self, row: ModelRow) -> NDArray[np.float32]:
        with self.blobs.reader(row.blob) as blob:
            return ModelReader(blob).vectors().parameters

    def run(
        self,
        job: Job,
        base: ModelRow,
        groups: Sequence[Sequence[str]] = (CLIENTS,),
        lost: Sequence[str] = (),
        damage: str = "",
    ) -> ModelRow:
        """Make the next model of updates that are drawn by the base's version."""
        secure = secure_round_of(self.models.maker, base, job)
        rng, rows, told = np.random.default_rng(base.version), list[UpdateRow](), list[GroupMasks]()
        for group in groups:
            masks, made = self._group(group, secure, rng, lost)
            told.append(masks)
            rows += [self._row(client, payload, damaged=client == damage) for client, payload in made.items()]
        kept = {client for masks in told for client in masks.clients}
        updates = [row for row in rows if row.client_id in kept]
        return next_model(
            self.models.maker, base, updates, job, 1, base.version + 1, seed=3, groups=told, secure=secure
        )

    def _group(
        self, clients: Sequence[str], secure: SecureRound, rng: np.random.Generator, lost: Sequence[str]
    ) -> tuple[GroupMasks, dict[str, bytes]]:
        blocks, weighted = open_blocks(secure, SIZE), secure.max_weight > 0
        integers, total, weight = {}, np.zeros(blocks.count, np.int64), 0
        bits = bits_of_sum(len(clients), secure.levels, max(1, secure.max_weight))
        for number, client in enumerate(clients):
            values, own = (rng.standard_normal(SIZE) * 0.05).astype(np.float32), number + 1 if weighted else 1
            integers[client] = to_integers(values, secure, own).integers
            if client not in lost:
                total += integers[client][: blocks.count]
                weight += own
        masks, payloads = masked(integers, bits, [client for client in clients if client in lost])
        sums = np.zeros(SIZE)
        places = (blocks.indices[:, None] * blocks.block + np.arange(blocks.block)).reshape(-1)
        sums[places[places < SIZE]] = total * np.repeat(blocks.scales.astype(np.float64), blocks.block)[: len(total)]
        self.sums[masks.name], self.weights[masks.name] = sums, weight
        return masks, {client: payload.data for client, payload in payloads.items()}

    def _row(self, client: str, payload: bytes, *, damaged: bool) -> UpdateRow:
        partial = self.blobs.open_partial("update")
        partial.write(payload)
        (blob,) = self.blobs.seal_many([partial])
        if damaged:
            flip(self.root / "blobs" / blob, -1 + 8 * len(payload))
        packets = lay_out([("parameters", "delta", MASKED, len(payload))])
        name = name_of(client.encode())
        return UpdateRow(1, client, blob, name, packets, 1, len(payload), 0.0, 0.0, 2.0, blob=blob)


@pytest.fixture
def rounds(tmp_path: Path) -> Iterator[Rounds]:
    rounds = Rounds(tmp_path)
    yield rounds
    rounds.facts.close()


def moved(base: NDArray[np.float32], sums: NDArray[np.float64], weight: float) -> NDArray[np.float32]:
    return (base + sums / weight).astype(np.float32)


@pytest.mark.parametrize("ratio", [1.0, 0.1], ids=["dense", "blocks"])
@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_the_next_model_is_the_base_and_the_exact_mean(rounds: Rounds, weights: str, ratio: float) -> None:
    job = spec({"keep_ratio": ratio, "max_weight": 20}, weights=weights)
    base = rounds.first(job)
    made = rounds.run(job, base, lost=CLIENTS[6:])
    wanted = moved(rounds.values(base), rounds.sums["client-0"], rounds.weights["client-0"])
    np.testing.assert_array_equal(rounds.values(made), wanted)
    changed = np.count_nonzero(rounds.values(made) != rounds.values(base))
    assert changed > (0.5 * SIZE if ratio == 1 else 0)
    assert changed <= np.ceil(ratio * 79) * 64


def test_the_mean_of_groups_is_that_of_all_their_clients(rounds: Rounds) -> None:
    job = spec({"group_size": 3})
    base = rounds.first(job)
    made = rounds.run(job, base, [CLIENTS[:3], CLIENTS[3:]])
    total = sum(rounds.sums.values(), start=np.zeros(SIZE))
    np.testing.assert_allclose(rounds.values(made), moved(rounds.values(base), total, 8), rtol=1e-6)


def test_a_rule_sees_each_group_as_one_client(rounds: Rounds) -> None:
    job = spec({"group_size": 3}, aggregation={"rule": "median"}, min_clients=9, min_clients_to_aggregate=9)
    base = rounds.first(job)
    groups = [[f"a{number}" for number in range(4)], ["b0", "b1", "b2"], ["c0", "c1", "c2"]]
    made = rounds.run(job, base, groups, lost=["a3"])
    median = np.median([total / rounds.weights[name] for name, total in rounds.sums.items()], axis=0)
    np.testing.assert_allclose(rounds.values(made), moved(rounds.values(base), median, 1), rtol=1e-6)


def test_a_server_optimizer_and_an_encoded_download_take_the_sum_like_any_mean(rounds: Rounds) -> None:
    plain = spec()
    job = spec(server_optimizer={"name": "SGD", "args": {"lr": 1.0}}, download_encoding="uniform")
    base = rounds.first(job)
    one, other = rounds.run(plain, base), rounds.run(job, base)
    assert other.delta_blob
    assert other.optimizer_blob
    step = np.abs(rounds.values(other) - rounds.values(one)).max()
    assert step < 0.05
    assert pace_in(read_checked(rounds.blobs, one.spread_blob), SIZE, 64) is not None
    assert one.spread_blob == other.spread_blob


def test_a_damaged_update_is_named_and_nothing_is_made(rounds: Rounds) -> None:
    job = spec({"block": 16})
    base = rounds.first(job)
    with pytest.raises(DamagedUpdates) as caught:
        rounds.run(job, base, damage="client-2")
    assert "client-2" in str(caught.value)


def test_masks_belong_to_jobs_with_secure_aggregation_only(rounds: Rounds) -> None:
    job = spec()
    base = rounds.first(job)
    with pytest.raises(ValueError, match="groups belong to jobs"):
        next_model(rounds.models.maker, base, [], job, 1, 2)


def test_steps_follow_the_last_aggregate_of_each_block(rounds: Rounds) -> None:
    job = spec()
    base = rounds.first(job)
    first = secure_round_of(rounds.models.maker, base, job)
    np.testing.assert_allclose(open_blocks(first, SIZE).scales, 0.5 * 5 / np.sqrt(SIZE), rtol=1e-6)
    made = rounds.run(job, base)
    delta = np.pad(rounds.sums["client-0"] / 8, (0, 79 * 64 - SIZE)).reshape(79, 64)
    rms = np.sqrt((delta**2).sum(axis=1) / np.minimum(64, SIZE - 64 * np.arange(79)))
    second = open_blocks(secure_round_of(rounds.models.maker, made, job), SIZE)
    np.testing.assert_allclose(second.scales, 0.5 * rms, rtol=1e-6)


def test_the_same_round_has_the_same_steps_and_blocks_after_a_restart(rounds: Rounds) -> None:
    job = spec({"keep_ratio": 0.1})
    base = rounds.run(job, rounds.first(job))
    again = Models(rounds.blobs, rounds.facts.pool, ServerConfig.model_validate({"state_dir": rounds.root}), "run-1")
    told = secure_round_of(rounds.models.maker, base, job)
    assert (
        secure_round_of(again.maker, base, job)
        == told
        != secure_round_of(rounds.models.maker, rounds.run(job, base), job)
    )


def test_a_model_without_a_spread_for_these_blocks_starts_from_the_first_norm(rounds: Rounds) -> None:
    job, other = spec(), spec({"block": 128})
    base = rounds.run(job, rounds.first(job))
    assert pace_in(read_checked(rounds.blobs, base.spread_blob), SIZE, 128) is None
    scales = open_blocks(secure_round_of(rounds.models.maker, base, other), SIZE).scales
    np.testing.assert_allclose(scales, 0.5 * 5 / np.sqrt(SIZE), rtol=1e-6)


def test_a_damaged_spread_is_the_models_damage(rounds: Rounds) -> None:
    job = spec()
    base = rounds.run(job, rounds.first(job))
    rounds.models.versions.remember(base)
    flip(rounds.root / "blobs" / base.spread_blob)
    with pytest.raises(DamagedModel):
        secure_round_of(rounds.models.maker, base, job)


def row() -> ModelRow:
    return ModelRow(1, 0, "", "", "", SIZE, 0, 0.0)


def table_of(job: Job) -> SecureAggregation:
    assert job.secure_aggregation is not None
    return job.secure_aggregation


def round_of(job: Job, known: Pace | None) -> SecureRound:
    return secure_round(job, table_of(job), row(), known)


def pace(changes: NDArray[np.float64], waiting: int | NDArray[np.int64] = 1) -> Pace:
    return Pace(changes.astype(np.float32), np.broadcast_to(waiting, len(changes)).astype(np.uint32))


def read_pace(spread: Spread) -> Pace:
    changes, waiting = np.frombuffer(spread.data(), "<f4", offset=4).reshape(2, -1)
    return Pace(changes, waiting.view("<u4"))


def test_the_blocks_are_sent_in_which_most_should_have_gathered() -> None:
    job, changes, waiting = spec({"keep_ratio": 0.1}), np.linspace(1, 2, 79), np.ones(79, np.int64)
    waiting[:4] = 5
    blocks = open_blocks(round_of(job, pace(changes, waiting)), SIZE)
    assert blocks.indices.tolist() == [0, 1, 2, 3, 75, 76, 77, 78]
    np.testing.assert_allclose(blocks.scales, 0.5 * (changes * waiting)[blocks.indices], rtol=1e-6)


@pytest.mark.parametrize("weakest", [1.0, 0.0], ids=["even", "uneven"])
def test_each_block_gets_its_turn_even_if_it_never_changes(weakest: float) -> None:
    job, changes = spec({"keep_ratio": 0.1}), np.linspace(weakest, 1, 79)
    known, sent = None, np.zeros(79, np.int64)
    for _ in range(100):
        blocks = open_blocks(round_of(job, known), SIZE)
        assert len(blocks.indices) == 8
        spread, delta = Spread(table_of(job), blocks, known), np.zeros((79, 64))
        waited = np.ones(79) if known is None else known.waiting
        delta[blocks.indices] = (changes * waited)[blocks.indices, None]
        spread.watch(0, delta.ravel()[:SIZE])
        known = read_pace(spread)
        sent[blocks.indices] += 1
        assert (known.waiting == 1).sum() == 8
        if np.all(known.changes > 0) and weakest:
            assert known.waiting.max() <= 10
    assert sent.min() >= (10 if weakest else 2)
    assert weakest or sent[-1] > 3 * sent[0]


def test_blocks_that_were_never_sent_come_first_with_steps_like_the_others() -> None:
    changes = np.linspace(1, 2, 79)
    changes[:8] = 0
    blocks = open_blocks(round_of(spec({"keep_ratio": 0.1}), pace(changes, 3)), SIZE)
    assert blocks.indices.tolist() == [*range(8)]
    np.testing.assert_allclose(blocks.scales, 0.5 * 3 * np.sqrt(np.mean(changes[8:] ** 2)), rtol=1e-6)


def test_at_first_blocks_go_by_an_order_that_is_drawn_for_each_job() -> None:
    one, two, again = (
        open_blocks(round_of(spec({"keep_ratio": 0.1}, seed=seed), None), SIZE).indices.tolist() for seed in (1, 2, 1)
    )
    assert one == again != two
    assert one[-1] - one[0] > 8


def test_a_block_with_little_change_keeps_a_step_of_an_eighth_of_the_mean() -> None:
    changes = np.ones(79)
    changes[0] = 1e-20
    scales = open_blocks(round_of(spec(), pace(changes)), SIZE).scales
    assert scales[0] == pytest.approx(0.5 / 8, rel=0.01)


def test_after_a_first_step_that_was_too_large_the_next_one_is_an_eighth_of_it() -> None:
    job = spec()
    blocks = open_blocks(round_of(job, None), SIZE)
    spread = Spread(table_of(job), blocks, None)
    spread.watch(0, np.zeros(SIZE))
    finer = open_blocks(round_of(job, read_pace(spread)), SIZE)
    np.testing.assert_allclose(finer.scales, blocks.scales / 8, rtol=1e-6)


def test_steps_become_finer_when_all_levels_are_zero_and_stay_where_nothing_was_sent() -> None:
    job, before = spec({"keep_ratio": 0.1}), pace(np.linspace(1, 2, 79), 3)
    blocks = open_blocks(round_of(job, before), SIZE)
    spread = Spread(table_of(job), blocks, before)
    spread.watch(0, np.zeros(SIZE))
    wanted, waiting = before.changes.copy(), np.full(79, 4)
    wanted[blocks.indices] /= 8
    waiting[blocks.indices] = 1
    np.testing.assert_allclose(read_pace(spread).changes, wanted)
    np.testing.assert_array_equal(read_pace(spread).waiting, waiting)


def test_the_spread_does_not_depend_on_how_the_model_is_cut() -> None:
    job, delta = spec(), np.random.default_rng(0).standard_normal(SIZE)
    blocks = open_blocks(round_of(job, None), SIZE)
    one, two = Spread(table_of(job), blocks, None), Spread(table_of(job), blocks, None)
    one.watch(0, delta)
    two.watch(1000, delta[1000:])
    two.watch(0, delta[:1000])
    np.testing.assert_allclose(read_pace(one).changes, read_pace(two).changes, rtol=1e-6)


def test_the_clients_caps_are_those_of_the_job() -> None:
    assert round_of(spec(), None).max_weight == 0
    assert round_of(spec(weights="samples", max_samples=30), None).max_weight == 30
    assert round_of(spec(weights="samples"), None).max_weight == 1000
    assert round_of(spec(update_clip=2.5), None).clip == 2.5


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            {"model": f"{CODE}:normed", "model_args": {}},
            "secure_aggregation: the buffer",
        ),
        (
            {"model_args": {"size": 5_000_000}, "secure_aggregation": {"block": 16}},
            "secure_aggregation.block: 16 values share a step",
        ),
    ],
    ids=["buffers", "too-many-steps"],
)
def test_a_job_that_cannot_be_masked_is_refused_when_it_is_queued(
    rounds: Rounds, keys: dict[str, Any], sentence: str
) -> None:
    config = ServerConfig.model_validate({"state_dir": rounds.root, "trusted": ["fedring", CODE]})
    models = Models(rounds.blobs, rounds.facts.pool, config, "run-1")
    with pytest.raises(ConfigError, match=sentence):
        JobChecks(config, models.maker).check(replace_keys(spec(), keys), [], runs_next=True)


def replace_keys(job: Job, keys: Mapping[str, Any]) -> Job:
    return Job.model_validate({**job.model_dump(), **keys})
