"""The summaries that the page receives: short, in valid JSON, and in line with the state machines."""

import json
import time
from dataclasses import replace
from math import inf, nan

import pytest

from fedring.rpc.identity import NOBODY
from fedring.server.group import machine as gr
from fedring.server.group.rendezvous import Rendezvous
from fedring.server.operator.summaries import (
    activity_name,
    client_names,
    client_summaries,
    event_summary,
    group_summary,
    job_settings,
    job_summary,
    model_summary,
    privacy_summary,
    round_summary,
    wait_summary,
)
from fedring.server.round.events import Member, Phase, Presence, Round, RoundRules, RoundState
from fedring.server.round.open_round import OpenRound
from fedring.server.sessions.members import Members
from fedring.server.sessions.sessions import Session, Sessions
from fedring.server.state.rows import JobRow, ModelRow, RoundRow
from fedring.train.jobs.job import Job
from fedring.v1 import control_pb2 as pb
from fedring.v1 import federation_pb2 as fed
from fedring.v1.privacy_pb2 import SecureProgress

JOB = JobRow(3, "digits", {"mode": "data_parallel", "encoding": "packed"}, 5, 0.0, rounds_done=2)
ROUND = Round(4, RoundRules(min_clients=3, deadline=60), Phase.TRAINING, 0.0, selected=frozenset("abc"))


def an_open_round(state: RoundState) -> OpenRound:
    base = ModelRow(1, 0, "aa", "bb", "cc", 10, 40, 0.0)
    row = RoundRow(4, 3, 1, "training", 0.0)
    return OpenRound(row, Job.model_validate({}), fed.TrainCmd(), base, state=state)


def secure_progress() -> SecureProgress:
    lost = {"keys": 1}
    return SecureProgress(step="shares", groups=2, answered=3, asked=5, lost=lost, seconds={"keys": 1 / 3})


def a_state(round_: Round, *connected: str) -> RoundState:
    now = time.monotonic()
    return RoundState(Members((name, Member(Presence.MATCHED, now)) for name in connected), replace(round_, since=now))


def test_a_round_is_summarised_by_sums_over_its_clients() -> None:
    clients = [
        pb.RoundClient(client_id="a", upload_bytes=10, encoding="packed", metrics={"bytes_sent": 7.0}),
        pb.RoundClient(client_id="b", upload_bytes=20, encoding="packed", metrics={"bytes_sent": nan}),
        pb.RoundClient(client_id="c", upload_bytes=5, metrics={"bytes_sent": -3.0}),
        pb.RoundClient(client_id="d", encoding="fp32"),
    ]
    summary = round_summary(
        pb.Round(round=4, eval_correct=3, eval_total=4, eval_classified=4, eval_loss_sum=2.0, clients=clients)
    )
    assert summary["upload_by_encoding"] == {"packed": 30, "none": 5}
    assert summary["peer_bytes"] == 7
    assert (summary["accuracy"], summary["loss"], summary["server_accuracy"]) == (0.75, 0.5, None)


def test_a_loss_that_is_not_finite_is_left_out() -> None:
    summary = round_summary(pb.Round(eval_total=4, eval_loss_sum=nan, server_accuracy=0.5, server_loss=float("inf")))
    assert (summary["accuracy"], summary["loss"]) == (None, None)
    assert (summary["server_accuracy"], summary["server_loss"]) == (0.5, None)


def test_every_summary_can_be_sent_as_json() -> None:
    session = Session("a", "s", "soft", "here", NOBODY, progress=nan)
    summaries = [
        job_summary(JOB),
        round_summary(pb.Round(phase=Phase.TRAINING, secure=secure_progress())),
        privacy_summary(pb.Privacy(delta=1e-5, epsilon=inf, jobs=[pb.PrivacyOfJob(job_id=3, epsilon=inf)])),
        model_summary(ModelRow(1, 0, "aa", "bb", "cc", 10, 40, 0.0), None, None, best=False),
        event_summary(pb.Event(id=2**60, text="t")),
        client_summaries([session], {"b": 2}, ROUND),
        wait_summary(an_open_round(a_state(ROUND, *"abc"))),
    ]
    assert json.loads(json.dumps(summaries, allow_nan=False)) == summaries


@pytest.mark.parametrize(("barrier", "needed"), [("matched", 3), ("none", 1)])
def test_a_round_that_waits_for_clients_needs_those_that_decide(barrier: str, needed: int) -> None:
    waiting = replace(ROUND, rules=replace(ROUND.rules, barrier=barrier), phase=Phase.WAITING, selected=frozenset())
    summary = wait_summary(an_open_round(a_state(waiting)))
    assert summary is not None
    assert (summary["what"], summary["have"], summary["need"]) == ("clients", 0, needed)


def test_a_client_that_a_round_cannot_draw_has_a_reason() -> None:
    rules = replace(ROUND.rules, labels={"gpu": "yes"}, left_out=frozenset("c"))
    sessions = [
        Session("b", "s", "soft", "here", NOBODY, matched=True, labels={"gpu": "yes"}),
        Session("c", "t", "soft", "there", NOBODY, matched=True),
        Session("d", "u", "soft", "there", NOBODY, matched=True, labels={"gpu": "no"}),
        Session("e", "v", "soft", "there", NOBODY),
        Session("f", "w", "soft", "there", NOBODY, matched=True, late_since=1.0),
    ]
    why = {one["client_id"]: one["why"] for one in client_summaries(sessions, {}, replace(ROUND, rules=rules))}
    assert why.pop("b") == ""
    for name, part in {
        "a": "no session",
        "c": "shares",
        "d": "labels are gpu=no",
        "e": "stream",
        "f": "works on",
    }.items():
        assert part in why[name]


def test_clients_that_are_away_are_listed_after_those_in_session() -> None:
    watching = Session("b", "s", "soft", "here", NOBODY, matched=True, activity=2)
    sessions = [watching, Session("c", "t", "soft", "there", NOBODY)]
    round_ = replace(ROUND, delivered=frozenset("b"), failed=frozenset("c"))
    summaries = client_summaries(sessions, {"z": 9, "b": 1}, round_)
    assert [(one["client_id"], one["state"], one["part"], one["updates"]) for one in summaries] == [
        ("b", "watching", "delivered", 1),
        ("c", "joined", "failed", 0),
        ("a", "away", "asked", 0),
        ("z", "away", "", 9),
    ]
    assert [one["activity"] for one in summaries] == ["training", "", "", ""]
    assert activity_name(99) == activity_name(0) == ""


def test_what_a_round_waits_for_depends_on_its_phase() -> None:
    summary = wait_summary(an_open_round(a_state(replace(ROUND, phase=Phase.WAITING), "a")))
    assert summary is not None
    assert (summary["what"], summary["have"], summary["need"], summary["clients"]) == ("clients", 1, 3, [])
    summary = wait_summary(an_open_round(a_state(replace(ROUND, delivered=frozenset("a")), *"abc")))
    assert summary is not None
    assert (summary["what"], summary["have"], summary["need"], summary["clients"]) == ("updates", 1, 3, ["b", "c"])
    summary = wait_summary(an_open_round(a_state(replace(ROUND, phase=Phase.AGGREGATING))))
    assert summary is not None
    assert summary["what"] == "aggregation"
    published = replace(ROUND, phase=Phase.PUBLISHED, evaluators=frozenset("ab"), evaluated=frozenset("b"))
    summary = wait_summary(an_open_round(a_state(published, *"abc")))
    assert summary is not None
    assert (summary["what"], summary["have"], summary["need"], summary["clients"]) == ("evaluations", 1, 2, ["a"])
    assert wait_summary(an_open_round(a_state(replace(ROUND, phase=Phase.ABANDONED)))) is None
    assert wait_summary(None) is None


def test_a_group_lists_its_workers_by_rank_with_their_states() -> None:
    rendezvous = Rendezvous(4, gr.GroupRules(3), "abcde", {}, slowest=lambda: 0.0)
    sessions = Sessions(9)
    assert group_summary(None, sessions, JOB) is None
    workers = {
        "a": gr.Worker(2, "x", 40, joined=True),
        "c": gr.Worker(2, "z", 40, joined=True, digest=b"d"),
        "d": gr.Worker(2, "w", 40),
    }
    rendezvous.state = gr.GroupState(
        gr.GroupRules(3),
        frozenset("abcde"),
        generation=2,
        phase=gr.GroupPhase.RUNNING,
        workers=workers,
        members=("a", "b", "c"),
    )
    summary = group_summary(rendezvous, sessions, JOB)
    assert summary is not None
    assert (summary["mode"], summary["phase"]) == ("data_parallel", "running")
    assert (summary["generation"], summary["steps"]) == (2, 40)
    assert [(one["client_id"], one["state"]) for one in summary["members"]] == [
        ("a", "joined"),
        ("b", "lost"),
        ("c", "done"),
    ]
    assert [(one["client_id"], one["state"]) for one in summary["others"]] == [("d", "ready"), ("e", "lost")]
    assert group_summary(rendezvous, sessions, replace(JOB, spec={"mode": "federated"})) is None
    pipeline = group_summary(rendezvous, sessions, replace(JOB, spec={"mode": "pipeline"}))
    assert pipeline is not None
    assert pipeline["mode"] == "pipeline"


def test_the_settings_of_a_job_are_all_of_its_keys_and_which_of_them_are_not_the_defaults() -> None:
    spec = Job.model_validate({"lr": 0.5, "model_args": {"hidden": 8}, "data_parallel": {"hook": "dgc"}})
    told = job_settings(spec.model_dump(mode="json"))
    assert told["changed"] == ["model_args", "lr", "data_parallel.hook"]
    assert told["settings"]["model_args"] == {"hidden": 8}
    assert told["settings"]["encoding"] == spec.encoding
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert job_settings({"key_of_an_older_version": 1})["changed"] == ["key_of_an_older_version"]


def test_the_parts_of_the_clients_of_a_round_are_told_on_demand() -> None:
    metrics = {"loss": 0.25, "bad": nan}
    part = pb.RoundClient(num_samples=3, train_seconds=1.5, upload_bytes=10, metrics=metrics, encoding="packed")
    message = pb.Round(round=4, clients=[part] * 30)
    assert "clients" not in round_summary(message)
    told = round_summary(message, clients=True)["clients"]
    assert len(told) == 20
    assert told[0] == {
        "client_id": "",
        "num_samples": 3,
        "train_seconds": 1.5,
        "upload_bytes": 10,
        "download_bytes": 0,
        "metrics": {"loss": 0.25},
    }


def test_secure_aggregation_is_summarised_if_the_round_has_it() -> None:
    assert round_summary(pb.Round())["secure"] is None
    assert round_summary(pb.Round(secure=secure_progress()))["secure"] == {
        "step": "shares",
        "groups": 2,
        "answered": 3,
        "asked": 5,
        "lost": {"keys": 1},
        "seconds": {"keys": 0.333},
    }


def test_what_is_spent_of_the_privacy_is_summarised_by_job() -> None:
    spent = pb.Privacy(delta=1e-6, epsilon=3.5, rounds=4, jobs=[pb.PrivacyOfJob(job_id=3, rounds=4, epsilon=3.5)])
    jobs = {"3": {"rounds": 4, "epsilon": 3.5}}
    assert privacy_summary(spent) == {"delta": 1e-6, "epsilon": 3.5, "rounds": 4, "jobs": jobs}
    assert privacy_summary(None) is None
    assert job_summary(replace(JOB, spec={"dp": {"max_epsilon": 8.0}}))["max_epsilon"] == 8.0
    assert job_summary(replace(JOB, spec={"dp": None}))["max_epsilon"] == 0.0


def test_settings_of_tables_that_a_job_may_lack_are_told_by_their_names() -> None:
    told = job_settings(Job.model_validate({}).model_dump(mode="json") | {"dp": {"noise_multiplier": 2.0}})
    assert told["settings"]["dp.noise_multiplier"] == 2.0
    assert told["changed"] == ["dp.noise_multiplier"]
    assert told["settings"]["secure_aggregation"] is None


def test_clients_are_found_by_name_software_and_address_and_by_name_when_they_are_away() -> None:
    sessions = [Session("Ann", "s", "fedring/1", "ipv4:10.0.0.7", NOBODY), Session("bob", "t", "node/2", "x", NOBODY)]
    away = {"zoe-10.0.0.7": 3, "ann": 1}
    assert client_names(sessions, away, None) == ["Ann", "bob", "ann", "zoe-10.0.0.7"]
    found = {word: client_names(sessions, away, None, word) for word in ("ann", "node", "10.0.0.7", "nobody")}
    assert found == {"ann": ["Ann", "ann"], "node": ["bob"], "10.0.0.7": ["Ann", "zoe-10.0.0.7"], "nobody": []}
    page = client_summaries(sessions, away, None, names=["zoe-10.0.0.7", "bob"])
    assert [(one["client_id"], one["state"], one["updates"]) for one in page] == [
        ("zoe-10.0.0.7", "away", 3),
        ("bob", "joined", 0),
    ]
