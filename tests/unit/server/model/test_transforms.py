"""The list of a job's transforms: how algorithms are found, made and applied, and what each feature demands."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.closed_rounds import FixedPast, closed_round
from tests.unit.host import SIZE, running, spec

from fedring.codec import Entry, Schema
from fedring.codec.errors import CodecError
from fedring.daemon.config import ConfigError
from fedring.secure.masks import Width
from fedring.server.aggregation.combining import Combination
from fedring.server.aggregation.modelfile import ModelReader
from fedring.server.aggregation.terms import Terms
from fedring.server.config import ServerConfig
from fedring.server.model.transforms import named
from fedring.server.model.transforms.listing import algorithms, transforms_of
from fedring.server.model.transforms.masked import MaskedForm
from fedring.server.model.transforms.states import read_states, write_states
from fedring.server.operator.job_checks import JobChecks
from fedring.server.startup_checks import check
from fedring.server.state.checked import read_checked
from fedring.server.state.rows import UpdateRow
from fedring.simulation.server import SimulatedPast
from fedring.train.errors import SeamError
from fedring.train.jobs.job import Job
from fedring.v1 import federation_pb2 as pb
from fedring.v1.secure_pb2 import SecureRound

SCHEMA = Schema((Entry("w", (SIZE,), "float32", "parameter"),))
TERMS = Terms("", 1000, SCHEMA)
PRIVATE: dict[str, Any] = {"weights": "uniform", "evaluate": False, "min_clients": 4}
HALVED: dict[str, Any] = {"transforms": [{"name": "halved", "args": {"by": 4}}]}


@pytest.fixture
def with_halved(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put one more module into the room of algorithms."""
    folder = Path(__file__).parents[3] / "fixtures_transforms"
    monkeypatch.setattr(named, "__path__", [*named.__path__, str(folder)])
    yield
    sys.modules.pop(f"{named.__name__}.halved", None)


def terms_of(members: int = 0, command: pb.TrainCmd | None = None, **keys: Any) -> Terms:
    return transforms_of(spec(**keys)).terms(TERMS, command or pb.TrainCmd(), members)


def test_the_algorithms_are_those_of_the_room() -> None:
    assert list(algorithms()) == ["feddyn"]


@pytest.mark.usefixtures("with_halved")
def test_a_module_in_the_room_is_all_that_an_algorithm_needs_on_the_server() -> None:
    assert sorted(algorithms()) == ["feddyn", "halved"]
    transforms_of(spec(**HALVED))
    with pytest.raises(SeamError, match="halved: by: must be greater than 0, not 0") as caught:
        transforms_of(spec(transforms=[{"name": "halved", "args": {"by": 0}}]))
    assert caught.value.reason == "bad_transform"


@pytest.mark.usefixtures("with_halved")
async def test_an_algorithm_is_applied_and_keeps_its_state(tmp_path: Path) -> None:
    async with running(tmp_path) as host:
        session = host.join("a")
        row, _ = await host.jobs.start(spec(rounds=2, **HALVED), "")
        for _ in range(2):
            command = await host.command(session)
            await host.push(session, command, np.full(SIZE, 8, np.float32))
        assert await host.ended(row.job_id) == "completed"
        last, _, first = host.store.models.newest(3)
        values = []
        for model in (first, last):
            with host.blobs.reader(model.blob) as blob:
                values.append(ModelReader(blob).vectors().parameters)
        states, owners = read_states(read_checked(host.blobs, last.transforms_blob))
    np.testing.assert_array_equal(values[1] - values[0], np.full(SIZE, 2 * 8 / 4))
    assert states["halved"]["rounds"].tolist() == [2.0]
    assert owners == {"halved": f'[{row.job_id}, {{"by": 4.0}}]'}


@pytest.mark.usefixtures("with_halved")
async def test_an_impossible_order_is_refused(tmp_path: Path) -> None:
    feddyn = {"name": "feddyn", "args": {"alpha": 1.0}}
    async with running(tmp_path) as host:
        checks = JobChecks(host.config, host.parts.models.maker)
        keys = {"weights": "uniform", "transforms": [feddyn, *HALVED["transforms"]]}
        checks.check(spec(**keys), [], runs_next=True)
        with pytest.raises(ConfigError, match="feddyn needs the plain mean of updates: let it stand before halved"):
            checks.check(spec(**{**keys, "transforms": keys["transforms"][::-1]}), [], runs_next=True)


@pytest.mark.parametrize(("name", "found"), [("feddin", "did you mean feddyn?"), ("feddyn", "alpha: must be given")])
def test_a_server_does_not_start_with_transforms_that_it_cannot_make(name: str, found: str, tmp_path: Path) -> None:
    config = ServerConfig.model_validate({"state_dir": tmp_path, "job": {"transforms": [{"name": name}]}})
    with pytest.raises(ConfigError, match=r"job\.transforms") as caught:
        check(config)
    assert found in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "demands"),
    [
        ({}, {}),
        ({"update_clip": 1.0}, {"deltas_only": True}),
        ({"update_clip_factor": 1.0}, {"deltas_only": True}),
        (PRIVATE | {"dp": {"noise_multiplier": 1, "adaptive": False}}, {"deltas_only": True, "bare": True}),
        (PRIVATE | {"sample_dp": {"noise_multiplier": 1}}, {"bare": True, "silent": True}),
        ({"server_optimizer": {}, "download_encoding": "int8"}, {}),
    ],
)
def test_a_feature_demands_of_an_update_what_it_needs(keys: dict[str, Any], demands: dict[str, Any]) -> None:
    assert terms_of(**keys) == replace(TERMS, **demands)


def test_an_update_must_have_used_the_control_variate_of_its_round() -> None:
    command = pb.TrainCmd(control=pb.Control(line="1.7"))
    scaffold: dict[str, Any] = {"scaffold": True, "momentum": 0.0, "weights": "uniform"}
    assert terms_of(command=command, **scaffold) == replace(TERMS, control_line="1.7")
    assert terms_of(command=command) == TERMS


def test_a_masked_update_is_as_wide_as_its_group_is_large() -> None:
    keys = PRIVATE | {"secure_aggregation": {"block": 16, "levels": 7}, "min_clients_to_aggregate": 3}
    command = pb.TrainCmd(secure=SecureRound(block=16, levels=7, scales=np.ones(1, "<f4").tobytes()))
    assert terms_of(4, command, **keys) == replace(TERMS, bare=True, opaque=MaskedForm(Width(SIZE, 6)))
    assert terms_of(40, command, **keys).opaque == MaskedForm(Width(SIZE, 10))


def test_noise_by_clients_sets_the_width_by_its_plan() -> None:
    dp = {"noise_multiplier": 1.0, "adaptive": False, "noise_by": "clients"}
    keys = PRIVATE | {"dp": dp, "secure_aggregation": {}, "min_clients_to_aggregate": 3}
    command = pb.TrainCmd(job=pb.JobSpec(min_results=3))
    job = spec(**keys)
    assert job.dp is not None
    plan = job.dp.plan(4, SIZE, 3)
    wanted = replace(TERMS, bare=True, opaque=MaskedForm(Width(plan.padded, plan.bits)))
    assert terms_of(4, command, **keys) == wanted


def test_groups_belong_to_features_that_open_them() -> None:
    row = UpdateRow(1, "a", "", "", (), 1, 1, 1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="groups belong to jobs whose updates only sums open"):
        transforms_of(Job.model_validate({})).close(closed_round(Job.model_validate({}), [row], groups=[]), None)


def test_states_that_are_no_file_of_states_are_an_error_and_those_that_are_come_back() -> None:
    state = {"a": {"x": np.arange(3, dtype=np.float32)}, "b": {}}
    data = write_states(state, {"b": "1", "a": "2"})
    assert data == write_states(state, {"a": "2", "b": "1"})
    states, owners = read_states(data)
    assert states["a"]["x"].tolist() == [0, 1, 2]
    assert owners == {"a": "2", "b": "1"}
    for damaged in (b"", data[:20], data[8:]):
        with pytest.raises(CodecError, match="states cannot be read") as caught:
            read_states(damaged)
        assert caught.value.reason == "bad_model"
    with pytest.raises(CodecError, match="a/x has a value that is not finite"):
        write_states({"a": {"x": np.array([np.inf], np.float32)}}, {})


DP: dict[str, Any] = PRIVATE | {"dp": {"noise_multiplier": 0.1, "delta": 1e-3}}
MASKED: dict[str, Any] = PRIVATE | {"secure_aggregation": {}, "min_clients_to_aggregate": 3}
OWN_NOISE = MASKED | {"dp": {"noise_multiplier": 1.0, "adaptive": False, "noise_by": "clients", "delta": 1e-3}}


def updates(*norms: float) -> list[UpdateRow]:
    return [UpdateRow(1, f"c{number}", "", "", (), 1, 1, 1.0, norm, 1.0) for number, norm in enumerate(norms)]


@pytest.mark.parametrize(
    ("keys", "hidden"), [({}, False), (DP, True), (MASKED, True), (OWN_NOISE, True), ({"scaffold": False}, False)]
)
def test_norms_of_single_updates_are_shown_unless_they_are_private(keys: dict[str, Any], hidden: bool) -> None:
    assert transforms_of(spec(**keys)).hide_norms is hidden


def test_guards_follow_the_median_norm_of_the_last_round() -> None:
    job = spec(update_clip_factor=2.0)
    steps = transforms_of(job).close(closed_round(job, updates(1.0, 8.0), past=FixedPast({"median_norm": 3.0})), None)
    assert steps.stats() == {"update_clip": 6.0, "median_norm": 1.0, "clipped": ["c1"]}
    assert steps.charge() is None


def test_noise_of_the_server_goes_on_from_the_last_clip_and_is_charged_with_the_model() -> None:
    job = spec(**DP | {"min_clients": 8})
    for clip, used in ((0.0, 0.1), (0.7, 0.7)):  # the job's own clip at first
        steps = transforms_of(job).close(closed_round(job, updates(*[0.5] * 8), 5, past=FixedPast(clip=clip)), None)
        found, charge = steps.stats()["dp"], steps.charge()
        assert (found["noise_by"], found["clip"], found["clients"]) == ("server", used, 8.0)
        assert charge is not None
        assert (charge.round, charge.job_id, charge.noise_multiplier) == (5, 1, 0.1)
        assert charge.next_clip == found["next_clip"] != used


def test_the_servers_noise_is_on_each_piece_of_the_mean_over_those_that_were_drawn() -> None:
    job = spec(**PRIVATE | {"dp": {"noise_multiplier": 3.0, "adaptive": False, "clip": 0.5, "delta": 1e-3}})
    steps = transforms_of(job).close(closed_round(job, updates(*[0.5] * 8)), None).steps
    delta, how = np.zeros(100_000), Combination()
    for step in steps:
        step.piece(0, delta)
        how = step.combination(how)
    assert delta.std() == pytest.approx(3.0 * 0.5 / 8, rel=0.02)
    assert how.divisor == 8.0


def test_noise_of_clients_costs_nothing_when_the_model_is_published() -> None:
    job = spec(**OWN_NOISE)
    steps = transforms_of(job).close(closed_round(job, updates(0.0, 0.0, 0.0), groups=[]), None)
    assert steps.stats()["dp"]["noise_by"] == "clients"
    assert steps.charge() is None


def test_a_simulation_goes_on_from_the_figures_of_its_last_round() -> None:
    past = SimulatedPast({"median_norm": 2.0, "dp": {"next_clip": 0.3}})
    assert (past.last_stats()["median_norm"], past.last_clip()) == (2.0, 0.3)
    assert SimulatedPast({}).last_clip() == 0.0
    assert past.noise_secret() != past.noise_secret()


async def test_a_job_is_checked_by_all_of_its_transforms(tmp_path: Path) -> None:
    async with running(tmp_path) as host:
        small = JobChecks(host.config.model_copy(update={"max_update_bytes": 4}), host.parts.models.maker)
        with pytest.raises(ConfigError, match="encoding: an update as int8 has at least 8 bytes"):
            small.check(spec(encoding="int8"), [], runs_next=True)
        small.check(spec(**MASKED, encoding="int8"), [], runs_next=True)  # its group decides
        with pytest.raises(ConfigError, match=r"server_optimizer: SGD takes no rl"):
            small.check(spec(encoding="uniform", server_optimizer={"args": {"rl": 1.0}}), [], runs_next=True)
