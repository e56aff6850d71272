"""Simulations without daemons: what is drawn, kept, told and refused."""

import errno
import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from fedring.client.transfer.kept import Section
from fedring.codec import CodecError, Encoding, encode
from fedring.codec.digest import name_of, update_name
from fedring.codec.schema import Entry, Schema
from fedring.control.failure import Failure
from fedring.daemon.config import ConfigError
from fedring.daemon.exits import Exit
from fedring.rpc.errors import BadUpdate, FedringError
from fedring.server.aggregation.terms import Terms
from fedring.server.model.making import ModelMaker
from fedring.server.state.rows import ModelRow, UpdateRow
from fedring.server.update.admission import DecodedOffer, open_offer
from fedring.simulation import simulate
from fedring.simulation.groups import groups_of
from fedring.simulation.plain_updates import SharedForm
from fedring.simulation.vectors import ClientSections, pack, unpack
from fedring.simulation.worker import admit
from fedring.train.device import threads_for
from fedring.train.evaluation import NO_SAMPLES
from fedring.train.jobs.job import Job
from fedring.train.tensors import files
from fedring.v1 import federation_pb2 as pb

Call = Callable[..., tuple[int, str, str]]
JOB = {"rounds": 2, "model_args": {"hidden": 8}, "batch_size": 16}
HERE = "user_simulation"


@pytest.fixture(autouse=True)
def _users_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "fixtures_user_code"))


def alone(clients: int = 6, per_round: int | None = None, **keys: Any) -> dict[str, Any]:
    """Simulate with one worker in this process."""
    return simulate({**JOB, **keys}, clients=clients, per_round=per_round, workers=1, threads=1)


def untimed(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items() if not key.endswith(("seconds", "_max"))} for row in report["rounds"]
    ]


def test_a_client_that_changes_frozen_tensors_fails_and_does_not_reach_the_next_one() -> None:
    report = alone(model=f"{HERE}:half_frozen", model_args={}, trainer=f"{HERE}:thaws", evaluate=False)
    for row in report["rounds"]:
        assert row["metrics"]["train/frozen"] == 0.0  # as the others found it
        assert 0 < len(row["failures"]) < 6
        assert all("frozen_changed" in text for text in row["failures"])


def test_the_same_simulation_gives_the_same_model_and_another_seed_another_one() -> None:
    first, second = (simulate(JOB, clients=6, per_round=3, workers=1) for _ in range(2))
    other = simulate(JOB, clients=6, per_round=3, workers=1, seed=1)
    assert untimed(first) == untimed(second)
    assert first["model_sha256"] == second["model_sha256"] != other["model_sha256"]


@pytest.mark.programs
def test_the_model_does_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    keys = {**JOB, "encoding": "packed", "data": f"{HERE}:drawn", "model": f"{HERE}:normed", "model_args": {}}
    one, two = (simulate(keys, clients=7, per_round=5, workers=n, threads=1, out=tmp_path) for n in (1, 2))
    assert one["model_sha256"] == two["model_sha256"]
    assert [row["accuracy"] for row in one["rounds"]] == [row["accuracy"] for row in two["rounds"]]
    assert json.loads((tmp_path / "report.json").read_text()) == two
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "report.json"]
    assert multiprocessing.active_children() == []


def test_a_client_without_samples_is_not_drawn_and_the_report_counts_it() -> None:
    report = alone(clients=3000, per_round=60, partition="dirichlet", alpha=0.1, rounds=1, evaluate=False)
    assert report["clients_without_samples"] == 3000 - 1437
    assert report["clients_drawn"] == report["rounds"][0]["clients"] == 60
    assert report["rounds"][0]["failures"] == []


def test_each_round_draws_as_many_clients_as_was_asked_for() -> None:
    report = alone(clients=40, per_round=3, rounds=4)
    assert [row["clients"] for row in report["rounds"]] == [3] * 4
    assert 3 < report["clients_drawn"] <= 12
    assert report["updates"] == 12


def test_a_users_trainer_trains_and_its_figures_are_told() -> None:
    report = alone(trainer=f"{HERE}:add_number", evaluate=False)
    assert report["rounds"][1]["metrics"] == {"train/loss": 1.0, "train/rounds": 2.0}
    assert report["accuracy"] is None


def test_the_round_goes_on_without_clients_that_fail_and_tells_why() -> None:
    report = alone(clients=12, trainer=f"{HERE}:fails_for_some", rounds=1)
    row = report["rounds"][0]
    assert 0 < row["clients"] < row["selected"] == 12
    assert len(row["failures"]) == min(10, 12 - row["clients"])
    assert all(text.startswith("client-") and "an odd seed" in text for text in row["failures"])


def test_a_simulation_ends_when_too_many_rounds_have_no_update() -> None:
    with pytest.raises(Failure, match=r"round 2 is abandoned, .*0 of 6 clients.*: client-\d: .*never works") as caught:
        alone(trainer=f"{HERE}:fails", rounds=5, max_abandoned=2)
    assert caught.value.exit_code == Exit.FAILED


@pytest.mark.programs
def test_a_users_evaluator_sees_all_test_samples_at_once_whatever_the_number_of_workers() -> None:
    keys = {**JOB, "rounds": 1, "evaluator": f"{HERE}:median_label"}
    one, two = (simulate(keys, clients=4, workers=workers) for workers in (1, 2))
    assert one["rounds"][0]["metrics"]["eval/samples"] == 360
    assert {name: value for name, value in one["rounds"][0]["metrics"].items() if name.startswith("eval/")} == {
        name: value for name, value in two["rounds"][0]["metrics"].items() if name.startswith("eval/")
    }


def test_each_client_has_the_samples_that_a_data_function_returns_for_it() -> None:
    keys: Any = {"data": f"{HERE}:own_digits", "partition": "dirichlet"}
    report = alone(clients=4, **keys)
    (models, rows) = (report["model_sha256"], untimed(report))
    assert alone(clients=4, **keys, evaluate=False)["model_sha256"] == models
    two = simulate({**JOB, **keys}, clients=4, workers=2, threads=1)
    assert (two["model_sha256"], [row["accuracy"] for row in two["rounds"]]) == (
        models,
        [row["accuracy"] for row in rows],
    )
    assert all(4 * row["accuracy"] == round(4 * row["accuracy"]) for row in rows)  # of the four clients' test samples
    assert alone(clients=4)["model_sha256"] != models


def test_the_server_evaluates_on_the_samples_that_a_server_would_load() -> None:
    keys: Any = {"data": f"{HERE}:own_digits", "evaluate_on_server": True}
    both, alone_ = (alone(clients=4, **keys, evaluate=evaluate) for evaluate in (True, False))
    for row, own in zip(both["rounds"], alone_["rounds"], strict=True):
        told = row["metrics"]
        assert told["server/accuracy"] in (0.0, 1.0)  # of one sample, that of part 0
        assert told["eval/loss"] != told["server/loss"] == own["metrics"]["server/loss"] == own["loss"]
        assert (row["loss"], "eval/loss" in own["metrics"]) == (told["eval/loss"], False)
    whole = alone(clients=4, evaluate_on_server=True)["rounds"][-1]["metrics"]
    assert whole["server/loss"] == whole["eval/loss"]
    broken = alone(clients=4, data=f"{HERE}:own_but_whole", evaluate_on_server=True)["rounds"][-1]
    assert broken["warnings"] == ["The data cannot be loaded: ValueError: this is the data of everybody."]
    assert broken["accuracy"] is not None  # that of the clients


def test_a_worker_in_this_process_computes_with_all_cores_and_puts_the_number_of_threads_back() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        keys = {**JOB, "trainer": f"{HERE}:tells_threads", "evaluate": False, "rounds": 1}
        report = simulate(keys, clients=2, workers=1)
        assert report["rounds"][0]["metrics"]["train/threads"] == threads_for(1)
        with pytest.raises(Failure):
            alone(data=f"{HERE}:no_data")
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_simulation_does_not_wait_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    assert alone(rounds=1)["updates"] == 6
    assert synced == []


@pytest.mark.parametrize("name", ["report.json", "model.safetensors", "model.safetensors.its-name.part"])
def test_results_that_cannot_be_written_end_the_simulation_with_one_sentence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "token_hex", lambda _: "its-name")
    (tmp_path / name / "not empty").mkdir(parents=True)  # a folder in the place of the file
    with pytest.raises(Failure, match=r"the simulation cannot go on: .*directory") as caught:
        simulate({**JOB, "rounds": 1}, clients=4, workers=1, threads=1, out=tmp_path)
    assert "\n" not in str(caught.value)


def test_a_full_disk_ends_the_simulation_with_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pread", full)
    with pytest.raises(Failure, match=r"No space left on device"):
        simulate({**JOB, "encoding": "packed"}, clients=4, workers=1, threads=1, out=tmp_path)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.programs)])
def test_an_evaluation_that_fails_is_told_and_the_simulation_goes_on(workers: int) -> None:
    report = simulate({**JOB, "rounds": 2, "evaluator": f"{HERE}:no_evaluation"}, clients=6, workers=workers)
    text = "the model cannot be evaluated: RuntimeError: nothing to compare with"
    assert [row["warnings"] for row in report["rounds"]] == [[text], [text]]
    assert [row["clients"] for row in report["rounds"]] == [6, 6]
    assert (report["accuracy"], report["loss"]) == (None, None)


def test_data_without_test_samples_are_told() -> None:
    report = alone(rounds=1, data="user_evaluators:untested")
    assert report["rounds"][0]["warnings"] == [NO_SAMPLES]


@pytest.mark.programs
def test_a_worker_that_dies_ends_the_simulation_with_one_sentence() -> None:
    with pytest.raises(Failure, match=r"worker 1 of the simulation ended with exit code 3"):
        simulate({**JOB, "trainer": f"{HERE}:dies"}, clients=6, workers=2)
    assert multiprocessing.active_children() == []


def test_a_job_with_patience_ends_when_its_model_gets_no_better() -> None:
    report = alone(trainer=f"{HERE}:add_number", rounds=20, patience=3, best_by="min train/rounds")
    assert len(report["rounds"]) == 4


def test_patience_counts_what_is_better_by_more_than_min_delta_after_min_rounds() -> None:
    keys: dict[str, Any] = {"trainer": f"{HERE}:add_number", "rounds": 8, "patience": 2, "best_by": "max train/rounds"}
    assert len(alone(**keys)["rounds"]) == 8  # each round is better by 1
    assert len(alone(**keys, min_delta=0.5)["rounds"]) == 8
    assert len(alone(**keys, min_delta=10)["rounds"]) == 3
    assert len(alone(**keys, min_delta=10, min_rounds=5)["rounds"]) == 5


def test_progress_is_shown_after_each_client_and_each_round() -> None:
    seen: list[tuple[float, int]] = []
    simulate(
        JOB, clients=6, per_round=2, workers=1, show=lambda share, row: seen.append((share, row["round"] if row else 0))
    )
    assert seen == [(0.25, 0), (0.5, 0), (0.5, 1), (0.75, 1), (1.0, 1), (1.0, 2)]


def test_a_simulation_starts_from_the_file_that_the_job_names(tmp_path: Path) -> None:
    simulate(JOB, clients=4, workers=1, threads=1, out=tmp_path)
    keys: dict[str, Any] = {"trainer": f"{HERE}:add_number", "rounds": 1, "evaluate": False, "encoding": "fp32"}
    fresh, later = alone(**keys), alone(**keys, start=str(tmp_path / "model.safetensors"))
    assert fresh["model_sha256"] != later["model_sha256"]


WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"clients": 0}, "clients=0 is not within 1 and"),
    ({}, {"clients": 1}, "min_clients=2 is more than clients=1"),
    ({}, {"clients": 4, "per_round": 5}, "per_round=5 is more than clients=4"),
    ({}, {"clients": 4, "per_round": 0}, "per_round=0 is not within 1 and"),
    ({}, {"clients": 4, "seed": -1}, "seed=-1 is not within 0 and"),
    ({}, {"clients": 4, "workers": 0}, "workers=0 is not within 1 and"),
    ({}, {"clients": 4, "threads": 0}, "threads=0 is not within 1 and"),
    ({}, {"clients": 4, "data_root": "/nowhere"}, "data_root=/nowhere is not a folder"),
    ({}, {"clients": 4, "secret": bytes(31)}, "secret has 31 bytes: give at least 32"),
    ({}, {"clients": 4, "engine": "spark"}, "engine='spark' is none of local, batched, auto, ray"),
    ({"mode": "data_parallel"}, {"clients": 4}, "mode = 'data_parallel' cannot be simulated"),
    ({"start": "best"}, {"clients": 4}, "start = 'best' names a version"),
    ({"start": "nowhere/x.pt"}, {"clients": 4}, "nowhere/x.pt, which is not there"),
    ({"model": "no_such_module:net"}, {"clients": 4}, "There is no module no_such_module"),
    ({"trainer": "no_such_module:train"}, {"clients": 4}, "There is no module no_such_module"),
    ({"data": "fedring.data:mnist"}, {"clients": 4}, "MNIST is not part of fedring"),
    (
        {"optimizer_args": {"x": 1}},
        {"clients": 4},
        "optimizer_args: fedring.train.optimizers:sgd cannot be called with",
    ),
    ({"server_optimizer": {"name": "SGD", "args": {"lr": 1.0, "x": 2}}}, {"clients": 4}, "server_optimizer"),
    ({"min_clients": 1500}, {"clients": 1600}, "1437 of clients=1600 have samples"),
    ({"private": ["*.bias"]}, {"clients": 4}, "shared and private cannot be simulated"),
    ({"clients": {"site": "eu"}}, {"clients": 4}, "clients = .* all simulated clients take part"),
    ({"override": [{"where": {"gpu": "yes"}, "epochs": 2}]}, {"clients": 4}, "no simulated client has gpu=yes"),
    ({}, {"clients": 4, "labels": [{"gpu": "a b"}]}, "labels: gpu in it must be text of 1 to 64 of"),
    ({"min_clients_to_aggregate": 3}, {"clients": 4}, "min_clients_to_aggregate must be at most min_clients=2"),
]


@pytest.mark.parametrize(("keys", "options", "sentence"), WRONG)
def test_wrong_input_is_refused_with_one_sentence(keys: dict[str, Any], options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(Failure, match=sentence) as caught:
        simulate({**JOB, **keys}, **{"workers": 1, **options})
    assert caught.value.exit_code == Exit.CONFIG
    assert "\n" not in str(caught.value)


ALGORITHMS: list[dict[str, Any]] = [
    {"normalize_steps": True, "momentum": 0.5},
    {"scaffold": True, "momentum": 0.0, "weights": "uniform"},
    {"mu": 0.1, "personal": {"mu": 0.5}},
]


@pytest.mark.parametrize("keys", ALGORITHMS)
def test_an_override_for_all_clients_is_the_key_of_the_job(keys: dict[str, Any]) -> None:
    """Whatever depends on how a client trains, here and on the server, follows its own settings."""
    job = {**JOB, **keys, "rounds": 3, "partition": "dirichlet", "alpha": 0.2, "min_clients": 4, "sample_clients": 3}
    others = {"epochs": 2, "batch_size": 9, "lr": {"schedule": "linear", "start": 0.2, "end": 0.1}, "clip_norm": 2.0}
    options: dict[str, Any] = {"clients": 4, "workers": 1, "threads": 1}

    def model(keys: dict[str, Any], labels: list[dict[str, str]]) -> object:
        return simulate({**job, **keys}, labels=labels, **options)["model_sha256"]

    gpu = {"gpu": "yes"}
    by_label = model({"override": [{"where": gpu, "epochs": 7}, {"where": gpu, **others}]}, [gpu])
    assert by_label == model(others, [])
    assert by_label != model({"override": [{"where": gpu, **others}]}, [gpu, {}])


def test_an_unknown_key_of_the_job_is_refused() -> None:
    with pytest.raises(ConfigError, match="batchsize"):
        simulate({"batchsize": 3}, clients=4)


def test_flctl_simulate_writes_report_model_and_plot(flctl: Call, tmp_path: Path) -> None:
    job, out = tmp_path / "job.toml", tmp_path / "out"
    job.write_text('rounds = 2\nmodel_args = {hidden = 8}\npartition = "shards"\n')
    options = ("--clients", 1500, "--per-round", 4, "--workers", 1, "--out", out)
    code, text, told = flctl("simulate", job, "batch_size=4", *options)
    assert code == 0
    assert "1,500 clients" in text
    assert "63 of the clients have no samples" in told
    assert sorted(path.name for path in out.iterdir()) == ["model.safetensors", "report.json", "rounds.png"]
    job.write_text(f'{job.read_text()}[[override]]\nwhere = {{ gpu = "yes", site = "eu" }}\nepochs = 2\n')
    labels = ("--labels", "gpu=yes, site=eu", "--labels", "")
    code, text, _ = flctl("simulate", job, "batch_size=4", *options, *labels, "--output", "json")
    assert code == 0
    assert json.loads(text) == json.loads((out / "report.json").read_text())


def test_flctl_simulate_refuses_labels_without_values(flctl: Call, tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text("rounds = 1\n")
    code, _, told = flctl("simulate", job, "--labels", "gpu", "--out", tmp_path / "out")
    assert (code, told) == (Exit.USAGE, "flctl: --labels 'gpu' is not of the form NAME=VALUE\n")


def test_flctl_simulate_ends_with_78_if_the_input_is_wrong(flctl: Call, tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text('mode = "pipeline"\n')
    code, _, told = flctl("simulate", job, "--workers", 1, "--out", tmp_path / "out")
    assert (code, told.count("\n")) == (Exit.CONFIG, 1)
    assert told.startswith("flctl: mode = 'pipeline' cannot be simulated")


def test_the_report_has_the_accuracy_of_the_last_model_although_the_last_round_was_abandoned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = ModelMaker.next

    def next_once(self: ModelMaker, base: ModelRow, *arguments: Any, **options: Any) -> ModelRow:
        if base.version > 1:
            raise CodecError("non_finite")
        return made(self, base, *arguments, **options)

    monkeypatch.setattr(ModelMaker, "next", next_once)
    report = simulate({**JOB, "rounds": 2}, clients=4, workers=1)
    assert report["accuracy"] == report["rounds"][0]["accuracy"] is not None
    assert report["rounds"][1]["reason"]


def test_residuals_are_kept_for_each_client_and_forgotten_with_the_update_that_leaves_none(tmp_path: Path) -> None:
    residuals = {client: np.full(5, client, np.float32) for client in (0, 128)}
    with ClientSections(tmp_path / "kept", 5) as kept:
        for client, values in residuals.items():
            assert kept.get(client) == {}
            own = Section({"weight": torch.full((2, 2), client, dtype=torch.bfloat16)}, {"line": "x"})
            kept.put(client, pack({"residual": Section({"residual": torch.from_numpy(values)}), "own": own}, 5))
        for client, values in residuals.items():
            found = unpack(kept.get(client))
            np.testing.assert_array_equal(found["residual"].tensors["residual"].numpy(), values)
            assert found["own"].tensors["weight"].tolist() == [[client] * 2] * 2
            assert found["own"].words == {"line": "x"}
        kept.put(0, {})
        assert (kept.get(0), kept.section(0, "residual")) == ({}, None)
        assert kept.section(128, "own") is not None


def offered(size: int) -> tuple[DecodedOffer, bytes, Terms]:
    """Return the offer of an update of a model with `size` parameters, its payload, and the terms of its round."""
    schema = Schema((Entry("w", (size,), "float32", "parameter"),))
    payload = encode(np.ones(size, np.float32), Encoding("fp32"))
    packet = pb.Packet(
        vector=pb.VECTOR_PARAMETERS, kind=pb.KIND_DELTA, encoding="fp32", bytes=len(payload), num_samples=7
    )
    header = pb.UpdateHeader(
        run_id="simulation", epoch=1, round=1, client_id="client-3", schema_hash=schema.hash, base_digest="base",
        packets=[packet], total_bytes=len(payload),
    ).SerializeToString()  # fmt: skip
    digest = name_of(payload)
    return (
        open_offer(pb.UpdateOffer(header=header, payload_digest=digest, name=update_name(header, digest))),
        payload,
        Terms("base", 10**9, schema),
    )


@pytest.mark.parametrize("size", [10, 600_000])
def test_the_servers_checks_pass_a_good_update(size: int) -> None:
    offer, payload, terms = offered(size)
    row = admit("client-3", offer, payload, terms, epoch=1)
    assert (row.client_id, row.num_samples, row.payload, row.epoch) == ("client-3", 7, payload, 1)
    assert row.norm == pytest.approx(size**0.5)


def test_the_servers_checks_refuse_what_the_server_would_refuse() -> None:
    offer, payload, terms = offered(10)
    bad = payload[:-4] + np.array([np.nan], "<f4").tobytes()
    with pytest.raises(CodecError, match="non_finite"):
        admit("client-3", offer, bad, terms, epoch=1)
    with pytest.raises(FedringError, match="not the declared"):
        admit("client-3", offer, payload + b"x", terms, epoch=1)
    with pytest.raises(FedringError, match="cannot speak for another client"):
        admit("client-4", offer, payload, terms, epoch=1)
    with pytest.raises(BadUpdate, match="starts from another model"):
        admit("client-3", offer, payload, Terms("other", 10**9, terms.schema), epoch=1)


def test_a_job_object_is_simulated_too() -> None:
    assert simulate(Job.model_validate({"rounds": 1}), clients=2, workers=1)["updates"] == 2


SECURE: dict[str, Any] = {
    "weights": "uniform",
    "evaluate": False,
    "evaluate_on_server": True,
    "min_clients": 6,
    "min_clients_to_aggregate": 5,
    "secure_aggregation": {},
}


def test_clients_with_secure_aggregation_learn_as_others_do_and_send_few_bytes() -> None:
    keys: dict[str, Any] = {"rounds": 6, "model_args": {"hidden": 64}}
    plain = alone(**{**SECURE, **keys, "secure_aggregation": None, "encoding": "fp32"})
    secure = alone(**{**SECURE, **keys})
    assert abs(secure["accuracy"] - plain["accuracy"]) < 0.05
    assert secure["rounds"][-1]["upload_bytes"] < 0.24 * plain["rounds"][-1]["upload_bytes"]
    assert secure["rounds"][-1]["metrics"].keys() == {"server/accuracy", "server/loss"}


@pytest.mark.parametrize(
    "keys",
    [
        {"secure_aggregation": {"keep_ratio": 0.3, "block": 16}},
        {"weights": "samples"},
        {"update_clip": 0.5},
        {"secure_aggregation": {"group_size": 3}, "min_clients": 9, "aggregation": {"rule": "median"}},
    ],
    ids=["blocks", "weights", "clip", "groups"],
)
def test_secure_aggregation_is_simulated_in_all_its_forms(keys: dict[str, Any]) -> None:
    fixed: dict[str, Any] = {"rounds": 3, "model_args": {"hidden": 32}, "min_clients": 9, "min_clients_to_aggregate": 7}
    report = alone(clients=9, **{**SECURE, **fixed, **keys})
    assert [row["clients"] for row in report["rounds"]] == [9] * 3
    assert report["accuracy"] > 0.3


@pytest.mark.parametrize(
    ("table", "wanted"),
    [({"keep_ratio": 0.5, "block": 16, "first_norm": 20.0}, 1.0), ({"first_norm": 1e-6}, 0.0)],
    ids=["a change that waits for its turn is not made twice", "zeros are sent if steps are much too small"],
)
def test_what_clients_keep_is_simulated(table: dict[str, Any], wanted: float, tmp_path: Path) -> None:
    keys = {
        **SECURE,
        "model": "fedring.train.models:vector",
        "model_args": {"size": 400},
        "trainer": f"{HERE}:fills_with_ones",
        "evaluate_on_server": False,
        "secure_aggregation": {"step": 0.25, **table},
    }
    simulate({**JOB, **keys}, clients=6, workers=1, out=tmp_path)
    (values,) = load_file(tmp_path / "model.safetensors").values()
    np.testing.assert_allclose(values, wanted, atol=1e-6)


def test_a_group_that_too_few_clients_are_left_of_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def some(client: str, *arguments: Any, **keys: Any) -> Any:
        if int(client.rpartition("-")[2]) % 2:
            raise BadUpdate("the update does not arrive")
        return admit(client, *arguments, **keys)

    monkeypatch.setattr("fedring.simulation.worker.admit", some)
    keys = {**SECURE, "rounds": 1, "max_abandoned": 1}
    with pytest.raises(Failure, match="0 clients are left in groups that can be unmasked, and 5 are needed"):
        alone(clients=12, **keys)


def test_groups_are_of_equal_size_and_drawn_anew_for_each_round() -> None:
    names = [f"client-{number}" for number in range(11)]
    job = Job.model_validate({**SECURE, "secure_aggregation": {"group_size": 3}})
    one, two = (groups_of(job, names, seed) for seed in (1, 2))
    assert sorted(map(len, one)) == [3, 4, 4]
    assert sorted(client for group in one for client in group) == sorted(names)
    assert one != two
    assert one == groups_of(job, names, 1)


@pytest.mark.parametrize(
    ("keys", "options"),
    [
        ({}, {}),
        ({"update_clip": 0.5, "mu": 0.1}, {}),  # a guard acts on the norm
        ({"override": [{"where": {"slow": "yes"}, "batch_size": 4}]}, {"labels": [{"slow": "yes"}, {}]}),
        ({"model_args": {"hidden": 2000}, "update_clip": 0.1}, {}),  # of which the norm has two blocks
        ({"lr": 1e33, "batch_size": 512, "max_abandoned": 1}, {}),  # all are refused
    ],
)
@pytest.mark.parametrize("engine", ["local", "batched"])
def test_updates_of_the_shared_form_are_those_that_are_made_and_checked_one_by_one(
    engine: str, keys: dict[str, Any], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> tuple[object, ...]:
        everything = {**JOB, "encoding": "fp32", "evaluate": False, **keys}
        try:
            report = simulate(everything, clients=6, workers=1, threads=1, engine=engine, **options)
        except Failure as failure:
            return (str(failure),)
        return report["model_sha256"], untimed(report)

    made = list[str]()
    row = SharedForm.row

    def counted(form: SharedForm, client: str, *rest: Any) -> UpdateRow | None:
        made.append(client)
        return row(form, client, *rest)

    monkeypatch.setattr(SharedForm, "row", counted)
    shared = run()
    assert made
    monkeypatch.setattr(SharedForm, "of", lambda *_: None)
    assert run() == shared


def test_noise_of_the_clients_is_simulated() -> None:
    dp = {"noise_multiplier": 1.0, "noise_by": "clients", "adaptive": False}
    report = alone(
        dp=dp, secure_aggregation={}, weights="uniform", min_clients=6, min_clients_to_aggregate=5, evaluate=False
    )
    assert [row["clients"] for row in report["rounds"]] == [6, 6]
