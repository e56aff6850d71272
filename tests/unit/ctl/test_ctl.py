"""flctl's verbs, called against a small scripted ControlService on a real socket."""

import asyncio
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2
from safetensors.torch import load_file
from tests.control_server import ROUND, SECONDS, Server

from fedring.control.calls import Control
from fedring.control.failure import Failure
from fedring.ctl.main import main
from fedring.ctl.operate.event_display import display
from fedring.ctl.output import Output
from fedring.daemon.exits import Exit
from fedring.rpc.channel import make_server
from fedring.rpc.errors import (
    BadRequest,
    ClientInUse,
    FedringError,
    NoEpsilon,
    NoSuchJob,
    NotAllowed,
    OtherJob,
    Overloaded,
    Unavailable,
)
from fedring.train.tensors import files
from fedring.v1 import control_pb2 as pb
from fedring.v1.privacy_pb2 import SecureProgress

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    served = Server()
    monkeypatch.setenv("FLCTL_SERVER", served.address)
    yield served
    served.stop()


def test_start_round_sends_the_keys_and_prints_the_job(server: Server, flctl: Call) -> None:
    code, out, err = flctl("start-round", "lr=0.1", "encoding=int8", "--output", "json")
    assert (code, json.loads(out), err) == (0, {"job_id": 1, "already": False, "warning": "", "after": []}, "")
    assert server.script.started[0][1] == {"start": "newest", "lr": 0.1, "encoding": "int8"}


@pytest.mark.parametrize("where", ["the file", "the command line"])
def test_run_starts_where_it_is_told_to(server: Server, flctl: Call, tmp_path: Path, where: str) -> None:
    job = tmp_path / "job.toml"
    job.write_text('start = "best"\n' if where == "the file" else "")
    flctl("run", job, "--no-wait", *(["start=best"] if where == "the command line" else []))
    flctl("start-round", "start=11")
    assert [sent for _, sent in server.script.started] == [{"start": "best"}, {"start": 11}]


def test_the_same_key_again_starts_nothing(server: Server, flctl: Call) -> None:
    flctl("start-round", "--key", "nightly")
    code, out, _ = flctl("start-round", "--key", "nightly", "--output", "json")
    assert (code, json.loads(out)) == (0, {"job_id": 1, "already": True, "warning": "", "after": []})


def test_every_call_has_a_new_key_by_default(server: Server, flctl: Call) -> None:
    flctl("start-round")
    flctl("start-round")
    assert len(server.script.jobs) == 2


def test_a_call_that_finds_no_server_is_retried_with_the_same_key(server: Server, flctl: Call) -> None:
    server.script.refuse = [Unavailable("restarting")]
    assert flctl("start-round")[0] == 0
    (first, _), (second, _) = server.script.started
    assert first == second != ""


def test_run_prints_one_json_line_per_event(server: Server, flctl: Call, tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text("rounds = 3\nlr = 0.5\n")
    code, out, err = flctl("run", job, "lr=0.25", "--output", "json")
    kinds = [json.loads(line)["kind"] for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert kinds == ["job_started", "round_started", "round_published", "round_evaluated", "job_ended"]
    assert server.script.started[0][1] == {"start": "fresh", "rounds": 3, "lr": 0.25}


def test_run_prints_plain_lines_where_there_is_no_terminal(server: Server, flctl: Call, tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text("{}")
    code, out, _ = flctl("run", tmp_path / "job.json")
    assert code == 0
    assert out.splitlines()[0] == "job_started now"
    assert out.splitlines()[-1] == "job 1 completed: 1 round, accuracy 90.00 %"


def test_run_returns_at_once_with_no_wait(server: Server, flctl: Call, tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text("{}")
    assert flctl("run", tmp_path / "job.json", "--no-wait")[:2] == (0, "job 1 queued\n")


def test_a_failed_job_fails_the_call_and_says_why(server: Server, flctl: Call) -> None:
    server.script.outcome = ("failed", "too_few_clients")
    code, _, err = flctl("start-round", "--wait")
    assert (code, err) == (Exit.FAILED, "flctl: job 1 failed: too_few_clients\n")


def test_waiting_for_a_job_that_has_ended_returns(server: Server, flctl: Call) -> None:
    flctl("start-round", "--key", "k")
    assert flctl("start-round", "--key", "k", "--wait")[0] == 0


@pytest.mark.parametrize(
    ("newest", "shown"),
    [
        ({"job_round": 41, "phase": "training"}, "40/50"),
        ({"job_round": 41, "phase": "abandoned", "reason": "stopped"}, "41/50"),
        ({"job_round": 41, "phase": "abandoned", "reason": "not_approved"}, "40/50"),  # it is opened again
        ({}, "0/50"),
    ],
)
def test_the_bar_of_a_job_under_way_begins_with_the_rounds_that_have_ended(
    server: Server, flctl: Call, monkeypatch: pytest.MonkeyPatch, newest: dict[str, Any], shown: str
) -> None:
    flctl("start-round", "--key", "k")
    server.script.jobs["k"].rounds = 50
    server.script.rounds = [pb.Round(round=77, job_id=1, **newest)] if newest else []
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "400")
    code, _, err = flctl("start-round", "--key", "k", "--wait")
    assert (code, set(re.findall("[0-9]+/50", err))) == (0, {shown})


def test_the_bar_counts_the_rounds_of_its_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "400")
    with display(Output.TABLE, rounds=50, label="job 1", newest=pb.Round(job_round=41, phase="training")) as show:
        show(pb.Event(kind="round_published", round=77, state=pb.Round(round=77, job_round=41, phase="published")))
        show(pb.Event(kind="round_waits", round=78, state=pb.Round(round=78, job_round=42, phase="waiting")))
        show(pb.Event(kind="round_abandoned", round=78, state=pb.Round(round=78, job_round=42, phase="abandoned")))
    assert re.findall("[0-9]+/50", capsys.readouterr().err)[-1] == "42/50"


def test_a_misspelt_key_in_a_file_is_a_configuration_error(flctl: Call, tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text("round = 3\n")
    code, out, err = flctl("run", job)
    assert (code, out) == (Exit.CONFIG, "")
    assert "did you mean 'rounds' or" in err


def test_a_wrong_value_in_a_file_is_a_configuration_error(flctl: Call, tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text("lr = -1.0\n")
    code, _, err = flctl("run", job)
    assert code == Exit.CONFIG
    assert err.startswith(f"flctl: lr (from {job}): ")


@pytest.mark.parametrize("override", ["round=3", "lr=-1", "lr"])
def test_a_wrong_key_or_value_on_the_command_line_is_a_usage_error(flctl: Call, override: str) -> None:
    code, out, err = flctl("start-round", override)
    assert (code, out) == (Exit.USAGE, "")
    assert len(err.splitlines()) == 1


def test_a_key_on_the_command_line_changes_a_schedule_in_the_file(server: Server, flctl: Call, tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text('lr = { schedule = "cosine", start = 0.1, end = 0.01 }\n')
    assert flctl("run", job, "--no-wait", "lr.end=0.02")[0] == 0
    assert server.script.started[0][1]["lr"] == {"schedule": "cosine", "start": 0.1, "end": 0.02}
    code, _, err = flctl("run", job, "--no-wait", "lr.end=-1")
    assert (code, "lr.end: must be greater than 0" in err) == (Exit.USAGE, True)


def test_a_missing_job_file_is_a_configuration_error(flctl: Call, tmp_path: Path) -> None:
    assert flctl("run", tmp_path / "none.toml")[0] == Exit.CONFIG


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BadRequest("rounds must be positive"), Exit.USAGE),
        (NotAllowed("operators only"), Exit.NOT_ALLOWED),
        (Overloaded("the queue is full"), Exit.TRY_AGAIN),
        (NoSuchJob("no job runs"), Exit.FAILED),
        (OtherJob("the key is another's"), Exit.USAGE),
    ],
)
def test_a_refusal_of_the_server_becomes_an_exit_code(
    server: Server, flctl: Call, error: FedringError, code: Exit
) -> None:
    server.script.refuse = [error]
    assert flctl("stop") == (code, "", f"flctl: {error}\n")


def test_naming_what_the_server_does_not_have_is_a_usage_error(server: Server, flctl: Call, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "model.safetensors")
    for verb in (["stop", "--job", "99"], ["models", "export", "77", *out], ["clients", "forget", "zoe"]):
        server.script.refuse = [NoSuchJob("there is none")]
        assert flctl(*verb) == (Exit.USAGE, "", "flctl: there is none\n")
    server.script.refuse = [NoSuchJob("there is none yet")]
    assert flctl("models", "export", "0", *out)[0] == Exit.FAILED  # the user has named no version
    code, _, err = flctl("rounds", "99")
    assert (code, "see `flctl rounds`" in err) == (Exit.USAGE, True)


@pytest.mark.slow
def test_an_unreachable_server_is_one_sentence_and_exit_code_69(flctl: Call) -> None:
    code, out, err = flctl("status", "--server", "127.0.0.1:1")
    assert (code, out, len(err.splitlines())) == (Exit.UNAVAILABLE, "", 1)
    assert "cannot reach fl-server's control port at 127.0.0.1:1: is it running?" in err


def test_a_grpc_server_that_is_not_fl_server_is_recognised(flctl: Call, server: Server) -> None:
    other = server.run(_bare_server())
    code, _, err = flctl("clients", "--server", other[1])
    server.run(other[0].stop(None))
    assert code == Exit.FAILED
    assert "is not fl-server's control port" in err


async def _bare_server() -> tuple[grpc.aio.Server, str]:
    bare = make_server([], max_streams=4)
    address = f"127.0.0.1:{bare.add_insecure_port('127.0.0.1:0')}"
    await bare.start()
    return bare, address


def test_stop_says_what_it_stopped(server: Server, flctl: Call) -> None:
    assert flctl("stop", "--job", "3")[:2] == (0, "job 3 stopped, with round 2 of job 1\n")
    assert flctl("stop", "--round")[:2] == (0, "round 2 of job 1 ended\n")
    assert flctl("stop", "--round", "--job", "3")[:2] == (0, "round 2 of job 1 ended\n")


def test_a_client_that_is_forgotten_is_named(server: Server, flctl: Call) -> None:
    assert flctl("clients", "forget", "bob")[:2] == (0, "bob is forgotten, with 3 updates\n")
    forgotten = json.loads(flctl("clients", "forget", "bob", "--output", "json")[1])
    assert forgotten == {"client_id": "bob", "updates": 3}
    server.script.refuse = [ClientInUse("bob is in session: stop its fl-client first")]
    code, out, err = flctl("clients", "forget", "bob")
    assert (code, out, err) == (Exit.FAILED, "", "flctl: bob is in session: stop its fl-client first\n")
    code, out, err = flctl("clients", "--server", "127.0.0.1:1", "forget", "bob")  # not clear which verb gets --server
    assert (code, out) == (Exit.USAGE, "")
    assert "--server belongs behind forget" in err
    assert flctl("clients", "forget")[0] == Exit.USAGE


def test_spent_privacy_is_shown_for_each_job_and_in_all(server: Server, flctl: Call) -> None:
    code, out, _ = flctl("privacy", "--delta", "1e-6")
    assert code == 0
    assert "privacy spent, for delta = 1e-06" in out
    assert re.search(r"3 +wards +50 +5 +7\.08", out)
    assert "besides, 2 rounds of jobs without [dp] published models" in out
    spent = json.loads(flctl("privacy", "--output", "json")[1])
    assert (spent["epsilon"], spent["delta"], spent["jobs"][0]["job_id"]) == (7.08, 1e-5, 3)
    server.script.refuse = [NoEpsilon("install fedring[privacy]")]
    assert flctl("privacy")[::2] == (Exit.FAILED, "flctl: install fedring[privacy]\n")


def test_status_as_json_has_the_names_of_the_proto(server: Server, flctl: Call) -> None:
    code, out, _ = flctl("status", "--output", "json")
    status = json.loads(out)
    assert code == 0
    assert set(status) == {field.name for field in pb.Status.DESCRIPTOR.fields}
    assert (status["model_version"], status["job"], status["jobs_queued"]) == (8, None, 0)
    assert status["round"]["clients"][0]["upload_bytes"] == 1500
    assert status["round"]["server_accuracy"] is None


def test_status_as_a_table_is_for_people(server: Server, flctl: Call) -> None:
    out = flctl("status")[1]
    assert "2 of job 1 published, 2 of 2 clients delivered, accuracy 90.00 %" in out
    assert "none is running" in out


def test_every_list_is_one_json_object(server: Server, flctl: Call) -> None:
    lists = {
        name: json.loads(flctl(*name.split(), "--output", "json")[1]) for name in ("clients", "rounds", "models list")
    }
    assert [client["activity"] for client in lists["clients"]["clients"]] == [
        "training",
        "idle",
    ]
    assert lists["rounds"]["rounds"][0]["round"] == 7
    assert lists["models list"]["models"][0]["digest"] == "blake3-" + "ab" * 32


def test_tables_are_not_cut_off_where_there_is_no_terminal(server: Server, flctl: Call) -> None:
    assert "training 50.00 %" in " ".join(flctl("clients")[1].split())
    assert "1.50 kB" in flctl("rounds")[1]
    assert "abababababab" in flctl("models", "list")[1]


def test_a_round_is_shown_with_its_clients(server: Server, flctl: Call) -> None:
    out = flctl("rounds", "7")[1]
    assert "ann" in out
    assert "bob" in out
    assert json.loads(flctl("rounds", "7", "--output", "json")[1])["round"] == 7
    assert flctl("rounds", "6")[0] == flctl("rounds", "8")[0] == Exit.USAGE


def test_a_round_shows_the_settings_that_follow_a_schedule(server: Server, flctl: Call) -> None:
    assert "lr" not in flctl("rounds")[1].split()
    ROUND.settings["lr"] = 0.0125
    try:
        assert "0.0125" in flctl("rounds")[1].split()
        assert "0.0125" in flctl("rounds", "7")[1].split()
        assert json.loads(flctl("rounds", "7", "--output", "json")[1])["settings"] == {"lr": 0.0125}
    finally:
        ROUND.settings.clear()


@pytest.mark.parametrize("words", [("1.2",), ("--job", "1", "2"), ("--job", "1", "1.2"), ("7",)])
def test_a_round_is_named_as_lists_show_it_or_by_the_servers_number(
    server: Server, flctl: Call, words: tuple[str, ...]
) -> None:
    assert "1.2" in flctl("rounds")[1].split()
    assert json.loads(flctl("rounds", *words, "--output", "json")[1])["round"] == 7
    assert "round 2 of job 1 (number 7 of the server)" in flctl("rounds", *words)[1]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("1.1",), "job 1 has no round 1"),
        (("--job", "1", "7"), "job 1 has no round 7"),
        (("1.0",), "job 1 has no round 0"),
        (("--job", "2", "1.2"), "round 1.2 is not one of job 2"),
        (("twelve",), "give JOB.ROUND"),
        (("1.2.3",), "give JOB.ROUND"),
        (("0",), "there is no round with the number 0"),
    ],
)
def test_a_round_that_does_not_exist_is_a_usage_error(
    server: Server, flctl: Call, words: tuple[str, ...], sentence: str
) -> None:
    code, _, error = flctl("rounds", *words)
    assert code == Exit.USAGE
    assert sentence in error


def test_an_exported_model_has_its_own_dtypes(server: Server, flctl: Call, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    code, out, _ = flctl("models", "export", "3", "--out", path, "--output", "json")
    tensors = load_file(path)
    assert (code, json.loads(out)["version"], json.loads(out)["bytes"]) == (0, 3, path.stat().st_size)
    assert tensors["w"].dtype == torch.bfloat16
    assert torch.equal(tensors["w"], torch.arange(6).view(2, 3).bfloat16())
    assert torch.equal(tensors["seen"], torch.tensor(2**40))


def test_a_model_can_be_named_by_words(server: Server, flctl: Call, tmp_path: Path) -> None:
    def export(name: str) -> tuple[int, str, str]:
        return flctl("models", "export", name, "--out", tmp_path / "model.safetensors", "--output", "json")

    code, _, err = export("best")
    assert (code, "no model at 127.0.0.1" in err) == (Exit.FAILED, True)
    server.script.models += [pb.Model(version=version, best_of_job=version in (3, 5)) for version in (6, 5, 4, 3)]
    for name, version in (("best", 5), ("newest", 8), ("0", 8), ("4", 4)):
        assert json.loads(export(name)[1])["version"] == version
    assert export("bst") == (Exit.USAGE, "", "flctl: 'bst' names no version: give newest, best or a number\n")


def test_the_best_of_very_many_models_is_found(server: Server, flctl: Call, tmp_path: Path) -> None:
    older = [pb.Model(version=version, best_of_job=version == 3) for version in range(200, 0, -1)]
    server.script.models = older
    code, out, _ = flctl("models", "export", "best", "--out", tmp_path / "model.safetensors", "--output", "json")
    assert (code, json.loads(out)["version"]) == (0, 3)


def test_a_model_that_cannot_be_written_is_one_sentence(
    server: Server, flctl: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors.its-name.part").mkdir()
    monkeypatch.setattr(files, "token_hex", lambda _: "its-name")
    code, _, err = flctl("models", "export", "newest", "--out", tmp_path / "model.safetensors")
    assert (code, err.count("\n")) == (Exit.FAILED, 1)
    assert err.startswith(f"flctl: cannot write {tmp_path / 'model.safetensors'}: ")


@pytest.mark.parametrize("verb", ["rounds", "clients", "jobs", "models"])
def test_more_rows_than_a_message_can_ask_for_are_refused(server: Server, flctl: Call, verb: str) -> None:
    code, _, err = flctl(verb, "--limit", "5000000000")
    assert (code, "--limit" in err) == (Exit.USAGE, True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")
def test_a_full_disk_behind_stdout_is_one_sentence(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with suppress(OSError), Path("/dev/full").open("w") as full:  # closing it fails, too
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["status"]) == Exit.FAILED
    monkeypatch.undo()
    assert capsys.readouterr().err == "flctl: cannot write any more: No space left on device\n"


def test_a_model_that_was_damaged_in_transit_is_not_written(server: Server, flctl: Call, tmp_path: Path) -> None:
    server.script.damage = True
    code, _, err = flctl("models", "export", "0", "--out", tmp_path / "model.safetensors")
    assert code == Exit.TRY_AGAIN
    assert "damaged" in err
    assert not list(tmp_path.iterdir())


def test_watch_prints_one_line_per_event(server: Server, flctl: Call) -> None:
    server.script.break_after, server.script.break_with = 5, NotAllowed("enough")

    async def start_when_watched() -> None:
        await server.script.watched.wait()
        await server.script._start("key", {})

    started = asyncio.run_coroutine_threadsafe(start_when_watched(), server.loop)
    code, out, _ = flctl("watch")
    started.result(SECONDS)
    assert code == Exit.NOT_ALLOWED
    assert out.splitlines()[0] == "job_started now"
    assert len(out.splitlines()) == 5


def test_a_live_watch_goes_on_if_the_server_is_restarting_when_it_is_asked(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def start_when_watched() -> None:
        await server.script.watched.wait()
        await server.script._start("key", {})

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    server.script.restarting = range(3, 7)  # it is asked twice before the first event, and up to four times for it
    server.script.break_after, server.script.break_with = 5, NotAllowed("enough")
    started = asyncio.run_coroutine_threadsafe(start_when_watched(), server.loop)
    code = main(["watch"])
    started.result(SECONDS)
    assert (code, server.script.asked > 6, capsys.readouterr().err) == (Exit.NOT_ALLOWED, True, "flctl: enough\n")


class CutOff(FedringError):
    """What a call gets that a server is still serving when it ends."""

    status, reason = grpc.StatusCode.CANCELLED, "cut_off"


@pytest.mark.parametrize("broken_with", [None, Unavailable("it stops"), CutOff("CANCELLED")])
def test_following_a_job_misses_nothing_when_the_stream_breaks(
    server: Server, broken_with: FedringError | None
) -> None:
    server.script.break_after, server.script.break_with = 2, broken_with
    with Control(server.address) as control:
        events = control.events()
        reply = control.start_job({"rounds": 1})
        server.script.jobs[server.script.started[0][0]].state = "running"
        kinds = [event.kind for event in control.follow_job(reply.job_id, events)]
    assert kinds == ["job_started", "round_started", "round_published", "round_evaluated", "job_ended"]


def test_following_ends_when_the_events_are_cancelled(server: Server) -> None:
    with Control(server.address) as control:
        events = control.events()
        events.cancel()
        with pytest.raises(Failure):
            list(control.follow_job(1, events))


def test_health_distinguishes_serving_not_serving_and_unreachable(server: Server, flctl: Call) -> None:
    patient = ("health", "--listen", server.address, "--timeout", SECONDS)
    code, out, _ = flctl(*patient, "--output", "json")
    assert (code, json.loads(out)["ok"]) == (0, True)
    server.set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
    server.script.not_serving = "nothing can be kept: No space left on device"
    code, _, err = flctl(*patient)
    assert (code, err.partition(" answers ")[2]) == (Exit.FAILED, f"not_serving: {server.script.not_serving}\n")
    assert json.loads(flctl(*patient, "--output", "json")[1])["why"] == server.script.not_serving
    assert f"no: {server.script.not_serving}" in flctl("status")[1]
    assert flctl("health", "--listen", "127.0.0.1:1", "--timeout", "1")[0] == Exit.UNAVAILABLE


def test_a_round_shows_its_secure_aggregation(server: Server, flctl: Call) -> None:
    assert "secure" not in flctl("status")[1]
    ROUND.secure.MergeFrom(SecureProgress(step="shares", groups=2, answered=3, asked=5, lost={"keys": 1}))
    try:
        assert "2 groups, shares: 3 of 5 clients have answered, lost 1 in keys" in flctl("status")[1]
        ROUND.secure.CopyFrom(SecureProgress(step="done", groups=1, seconds={"keys": 0.5}))
        out = flctl("rounds", "7")[1]
        assert "secure aggregation: 1 group, no client lost" in out
        assert "time of its steps: keys 0.50 s" in out
        assert "wrong shares" not in out
        ROUND.liars[:], ROUND.left_out[:] = ["ann"], ["bob", "cem"]
        out = flctl("rounds", "7")[1]
        assert "sent wrong shares (bad_share), and left out from now on: ann" in out
        assert "left out for wrong shares in an earlier round: bob, cem" in out
    finally:
        for field in ("secure", "liars", "left_out"):
            ROUND.ClearField(field)
