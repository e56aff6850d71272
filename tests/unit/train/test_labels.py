"""Labels of clients: their bounds, which clients a job takes, and what operators read while there are none."""

import asyncio
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tests.journal_events import each_event
from tests.opened_rounds import opened
from tests.unit.host import Host, running, spec

from fedring.client.config import ClientConfig
from fedring.daemon.config import ConfigError, explain, load_config
from fedring.rpc.errors import BadRequest
from fedring.rpc.identity import IDENTITY, LOCAL
from fedring.server.group import machine as gr
from fedring.server.round.events import (
    Abandoned,
    Event,
    Joined,
    Left,
    Matched,
    RoundOpened,
    RoundRules,
    RoundState,
    Start,
    Started,
)
from fedring.server.round.machine import apply, due, ready
from fedring.server.round.plan import rules_of
from fedring.server.round.progress import RoundProgress, why_abandoned
from fedring.server.running.replacements import replacements
from fedring.server.sessions.sessions import Sessions
from fedring.train.jobs.job import Job
from fedring.train.jobs.labels import MAX_LABELS, match, shown
from fedring.v1 import federation_pb2 as pb

EU, US = {"site": "eu"}, {"site": "us"}
RULES = RoundRules(min_clients=2, labels=EU)


def after(*events: Event, state: RoundState | None = None) -> RoundState:
    return reduce(lambda before, event: apply(before, event, 0.0), events, state or RoundState())


def here(**labels: dict[str, str]) -> RoundState:
    return after(*(event for name, its in labels.items() for event in (Joined(name, its), Matched(name))))


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [
        ({}, True),
        ({"site": "eu"}, True),
        ({"site": "us"}, False),
        ({"site": ["us", "eu"]}, True),
        ({"site": "eu", "device": "phone"}, True),
        ({"site": "eu", "device": "car"}, False),
        ({"floor": "1"}, False),
    ],
)
def test_a_client_needs_every_label_that_is_wanted(wanted: dict[str, Any], fits: bool) -> None:
    assert match({"site": "eu", "device": "phone"}, wanted) is fits


def test_labels_are_shown_in_one_line() -> None:
    assert shown({"site": ["eu", "us"], "device": "phone"}) == "device=phone,site=eu|us"


def test_only_clients_with_the_labels_are_selected() -> None:
    state = after(RoundOpened(1, RULES), state=here(a=EU, b=US, c=EU))
    assert ready(state, RULES) == ["a", "c"]
    assert due(state, 0) == Start(frozenset("ac"))


def test_a_client_that_is_left_out_is_not_selected_whatever_its_labels() -> None:
    rules = replace(RULES, left_out=frozenset("a"))
    state = after(RoundOpened(1, rules), state=here(a=EU, b=US, c=EU))
    assert ready(state, rules) == ["c"]
    assert due(state, 0) is None
    text = RoundProgress().news(state, "round 1 of job 1", 1.0)[0]
    assert text.endswith("; 1 of 3 clients here with site=eu; left out for wrong shares: a")
    reason = why_abandoned(opened(), after(Abandoned("barrier_timeout"), state=state), ("a",), "h:1")
    assert "left out for wrong shares: a; one more client is needed" in reason
    state = after(Joined("d", EU), Matched("d"), state=state)
    assert due(state, 0) == Start(frozenset("cd"))


def test_a_round_waits_until_enough_clients_have_the_labels() -> None:
    state = after(RoundOpened(1, RULES), state=here(a=EU, b=US))
    assert due(state, 0) is None
    text = RoundProgress().news(state, "round 1 of job 1", 1.0)[0]
    assert text.endswith("ready=1/2 (min=2, barrier matched); 1 of 2 clients here with site=eu")
    state = after(Joined("b", EU), Matched("b"), state=state)
    assert due(state, 0) == Start(frozenset("ab"))


def test_a_client_that_is_lost_and_back_keeps_its_labels() -> None:
    state = after(RoundOpened(1, RULES), Started(frozenset("ac")), state=here(a=EU, c=EU))
    state = after(Left("a"), Matched("a"), state=state)
    assert state.members["a"].labels == EU


def test_a_round_that_nobody_matches_says_so_and_how_to_start_a_client() -> None:
    state = after(RoundOpened(1, RULES), state=here(a=US, b=US))
    assert "no client here has site=eu" in RoundProgress().news(state, "round 1 of job 1", 1.0)[0]
    reason = why_abandoned(opened(), after(Abandoned("barrier_timeout"), state=state), ("zoe",), "h:1")
    assert reason == (
        "barrier_timeout: ready=0/2 (min=2, barrier matched); no client here has site=eu; 2 more clients are needed: "
        "`fl-client server=h:1 client_id=NAME labels.site=eu` starts one"
    )


def test_a_jobs_labels_reach_its_rounds() -> None:
    assert rules_of(Job.model_validate({"clients": {"site": ["eu"]}}), grace=1.0).labels == {"site": ["eu"]}


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        ({"site": "e u"}, "site in it must be text of 1 to 64"),
        ({"site": "x" * 65}, "site in it must be text of 1 to 64"),
        ({"a b": "x"}, "the name of a label must be text of 1 to 64"),
        ({str(number): "x" for number in range(MAX_LABELS + 1)}, "must have at most MAX_LABELS = 16 labels"),
    ],
)
def test_labels_out_of_bounds_are_refused_everywhere(labels: dict[str, str], sentence: str) -> None:
    with pytest.raises(ValidationError) as refused:
        ClientConfig.model_validate({"labels": labels})
    assert sentence in explain(refused.value, {}, ClientConfig)
    with pytest.raises(ValidationError) as refused:
        Job.model_validate({"clients": labels})
    assert sentence in explain(refused.value, {}, Job)
    IDENTITY.set(LOCAL)
    with pytest.raises(BadRequest) as not_joined:
        Sessions(3).join(pb.JoinRequest(client_id="a", labels=labels), "x")
    assert not_joined.value.reason == "bad_labels"
    assert sentence in str(not_joined.value)


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        ("eu", 'clients: must be a table of labels, such as { site = "eu" }'),
        ({"site": 1}, "clients: site in it must be text of 1 to 64"),
        ({"site": []}, "clients: site in it lists no value that a client could have"),
        ({"site": ["eu"] * 17}, "clients: must have at most MAX_LABELS = 16 values of site, and has 17"),
        ({"site": ["eu", {}]}, "clients: site in it must be text of 1 to 64"),
    ],
)
def test_what_a_job_cannot_ask_for_is_refused_in_one_sentence(wanted: object, sentence: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Job.model_validate({"clients": wanted})
    assert explain(refused.value, {}, Job).startswith(sentence)


def test_labels_are_read_from_the_command_line() -> None:
    assert load_config(ClientConfig, overrides=["labels.site=eu"]).config.labels == EU
    with pytest.raises(ConfigError, match=r"labels.floor.*must be text"):
        load_config(ClientConfig, overrides=["labels.floor=1"])


async def told(host: Host, kind: str) -> None:
    """Wait until the journal has told an event of this kind."""
    async with asyncio.timeout(60):
        async for event in each_event(host.journal, 1):
            if event.kind == kind:
                return


async def test_only_clients_with_the_labels_train_and_replace_lost_workers(tmp_path: Path) -> None:
    async with running(tmp_path) as host:
        sessions = {name: host.join(name, labels) for name, labels in (("a", EU), ("b", US), ("c", EU), ("d", EU))}
        keys = {"mode": "data_parallel", "clients": EU, "min_clients": 3, "sample_clients": 2}
        job, _ = await host.jobs.start(spec(**keys), "")
        await told(host, "round_started")
        open_ = host.round
        selected = set(open_.row.selected)
        assert len(selected) == 2
        assert "b" not in selected
        assert open_.group is not None
        open_.group.state = gr.GroupState(gr.GroupRules(2, 1, 10.0), frozenset(selected), has_run=True)
        assert replacements(open_, host.rounds, host.sessions) == []
        host.sessions.drop(sessions[min(selected)])
        assert replacements(open_, host.rounds, host.sessions) == sorted({"a", "c", "d"} - selected)
        await host.jobs.stop(job.job_id)
        assert await host.ended(job.job_id) == "stopped"


async def test_only_clients_with_the_labels_are_asked_to_evaluate(tmp_path: Path) -> None:
    async with running(tmp_path) as host:
        eu, _ = host.join("a", EU), host.join("b", US)
        await host.jobs.start(spec(clients=EU, evaluate=True), "")
        await host.offer(host.update(await host.command(eu), "a"))
        await told(host, "round_published")
        assert host.round.state.round is not None
        assert host.round.state.round.evaluators == {"a"}


def test_a_session_keeps_the_labels_that_its_client_claims() -> None:
    IDENTITY.set(LOCAL)
    assert Sessions(3).join(pb.JoinRequest(client_id="a", labels=EU), "x").labels == EU
