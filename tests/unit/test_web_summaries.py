"""What the page is told: short, finite, and of what the state machines hold."""

import json
import time
from dataclasses import replace
from math import nan

from fedring.rpc.identity import NOBODY
from fedring.server.group import machine as gr
from fedring.server.group.rendezvous import Rendezvous
from fedring.server.group.returns import Returns
from fedring.server.operator.summaries import (
    activity_name,
    client_summaries,
    event_summary,
    group_summary,
    job_summary,
    model_summary,
    round_summary,
    wait_summary,
)
from fedring.server.round.events import Member, Phase, Presence, Round, Rules, State
from fedring.server.round.open_round import OpenRound
from fedring.server.round.sessions import Session, Sessions
from fedring.server.state.rows import JobRow, ModelRow, RoundRow
from fedring.train.job import Job
from fedring.v1 import control_pb2 as pb
from fedring.v1 import federation_pb2 as fed

JOB = JobRow(3, "digits", {"mode": "data_parallel", "encoding": "packed"}, 5, 0.0, rounds_done=2)
ROUND = Round(4, Rules(min_clients=3, deadline=60), Phase.TRAINING, 0.0, selected=frozenset("abc"))


def an_open_round() -> OpenRound:
    base = ModelRow(1, 0, "aa", "bb", "cc", 10, 40, 0.0)
    return OpenRound(RoundRow(4, 3, 1, "training", 0.0), Job.model_validate({}), fed.TrainCmd(), base)


def a_state(round_: Round, *here: str) -> State:
    now = time.monotonic()
    return State({name: Member(Presence.MATCHED, now) for name in here}, replace(round_, since=now))


def test_a_round_is_told_by_its_sums() -> None:
    clients = [
        pb.RoundClient(client_id="a", upload_bytes=10, encoding="packed", metrics={"bytes_sent": 7.0}),
        pb.RoundClient(client_id="b", upload_bytes=20, encoding="packed", metrics={"bytes_sent": nan}),
        pb.RoundClient(client_id="c", upload_bytes=5, metrics={"bytes_sent": -3.0}),
        pb.RoundClient(client_id="d", encoding="fp32"),
    ]
    told = round_summary(pb.Round(round=4, eval_correct=3, eval_total=4, eval_loss_sum=2.0, clients=clients))
    assert told["upload_by_encoding"] == {"packed": 30, "none": 5}
    assert told["peer_bytes"] == 7
    assert (told["accuracy"], told["loss"], told["server_accuracy"]) == (0.75, 0.5, None)


def test_a_loss_that_is_no_number_is_not_told_as_one() -> None:
    told = round_summary(pb.Round(eval_total=4, eval_loss_sum=nan, server_accuracy=0.5, server_loss=float("inf")))
    assert (told["accuracy"], told["loss"], told["server_accuracy"], told["server_loss"]) == (0.0, None, 0.5, None)


def test_everything_can_be_sent_as_json() -> None:
    session = Session("a", "s", "soft", "here", NOBODY, progress=nan)
    told = [
        job_summary(JOB),
        round_summary(pb.Round(phase=Phase.TRAINING)),
        model_summary(ModelRow(1, 0, "aa", "bb", "cc", 10, 40, 0.0), None),
        event_summary(pb.Event(id=2**60, text="t")),
        client_summaries([session], {"b": 2}, ROUND),
        wait_summary(a_state(ROUND, *"abc"), an_open_round()),
    ]
    assert json.loads(json.dumps(told, allow_nan=False)) == told


def test_clients_that_are_away_follow_those_that_are_here() -> None:
    here = Session("b", "s", "soft", "here", NOBODY, matched=True, activity=2)
    sessions = [here, Session("c", "t", "soft", "there", NOBODY)]
    round_ = replace(ROUND, delivered=frozenset("b"), failed=frozenset("c"))
    told = client_summaries(sessions, {"z": 9, "b": 1}, round_)
    assert [(one["client_id"], one["state"], one["part"], one["updates"]) for one in told] == [
        ("b", "watching", "delivered", 1),
        ("c", "joined", "failed", 0),
        ("a", "away", "asked", 0),
        ("z", "away", "", 9),
    ]
    assert [one["activity"] for one in told] == ["training", "", "", ""]
    assert activity_name(99) == activity_name(0) == ""


def test_what_a_round_waits_for_follows_its_phase() -> None:
    open_ = an_open_round()
    told = wait_summary(a_state(replace(ROUND, phase=Phase.WAITING), "a"), open_)
    assert told is not None
    assert (told["what"], told["have"], told["need"], told["clients"]) == ("clients", 1, 3, [])
    told = wait_summary(a_state(replace(ROUND, delivered=frozenset("a")), *"abc"), open_)
    assert told is not None
    assert (told["what"], told["have"], told["need"], told["clients"]) == ("updates", 1, 3, ["b", "c"])
    told = wait_summary(a_state(replace(ROUND, phase=Phase.AGGREGATING)), open_)
    assert told is not None
    assert told["what"] == "aggregation"
    published = replace(ROUND, phase=Phase.PUBLISHED, evaluators=frozenset("ab"), evaluated=frozenset("b"))
    told = wait_summary(a_state(published, *"abc"), open_)
    assert told is not None
    assert (told["what"], told["have"], told["need"], told["clients"]) == ("evaluations", 1, 2, ["a"])
    assert wait_summary(a_state(replace(ROUND, phase=Phase.ABANDONED)), open_) is None
    assert wait_summary(State(), None) is None


def test_a_group_is_told_by_rank_with_what_each_worker_is() -> None:
    rendezvous = Rendezvous(Returns())
    sessions = Sessions(9)
    assert group_summary(rendezvous, sessions, JOB) is None
    workers = {
        "a": gr.Worker(2, "x", 40, joined=True),
        "c": gr.Worker(2, "z", 40, joined=True, digest=b"d"),
        "d": gr.Worker(2, "w", 40),
    }
    rendezvous.state = gr.State(
        gr.Rules(3), frozenset("abcde"), generation=2, phase=gr.Phase.RUNNING, workers=workers, members=("a", "b", "c")
    )
    told = group_summary(rendezvous, sessions, JOB)
    assert told is not None
    assert (told["mode"], told["generation"], told["phase"], told["steps"]) == ("data_parallel", 2, "running", 40)
    assert [(one["client_id"], one["state"]) for one in told["members"]] == [
        ("a", "joined"),
        ("b", "lost"),
        ("c", "done"),
    ]
    assert [(one["client_id"], one["state"]) for one in told["others"]] == [("d", "ready"), ("e", "lost")]
    assert group_summary(rendezvous, sessions, replace(JOB, spec={"mode": "federated"})) is None
    piped = group_summary(rendezvous, sessions, replace(JOB, spec={"mode": "pipeline"}))
    assert piped is not None
    assert piped["mode"] == "pipeline"
