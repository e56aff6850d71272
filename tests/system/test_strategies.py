"""Guards and rules in real daemons: clients that lie, rules of the user's own, and rules that fail."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from fedring.control.failure import Failure
from fedring.v1 import control_pb2
from fedring.v1 import federation_pb2 as pb
from tests import forks
from tests.conftest import ROOT, path_to
from tests.fleets import Control, Fleet
from tests.metrics_page import Page
from tests.system.wire import SIZE, Refused, WireClient, outcome, parameters, payload_of, run

TRUSTED = {"trusted": ["fedring", "user_rules", "own_rule"], "metrics_listen": "127.0.0.1:0"}
NAMES = ("a", "b", "c", "d", "e")

Clients = Callable[..., list[WireClient]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Start a server that trusts the modules of rules."""
    code = f"{ROOT / 'tests' / 'fixtures_user_code'}{os.pathsep}{ROOT / 'docs' / 'examples'}"
    with Fleet(tmp_path_factory.mktemp("strategies"), TRUSTED, env=path_to(Path(code))) as fleet:
        yield fleet


def send(
    client: WireClient, value: float, *, samples: int = 10, kind: pb.Kind.ValueType = pb.KIND_DELTA
) -> pb.TrainCmd:
    """Answer the client's next command, which is returned, with an update of which all values are `value`."""
    command: pb.TrainCmd = client.expect("train")
    payload = payload_of(np.full(SIZE, value, np.float32))
    packet = pb.Packet(
        vector=pb.VECTOR_PARAMETERS,
        kind=kind,
        encoding="fp32",
        bytes=len(payload),
        num_samples=samples,
    )
    client.push(client.header(command, payload, packets=[packet]), payload)
    return command


def run_round(
    control: Control, clients: Sequence[WireClient], values: Sequence[float], **keys: object
) -> control_pb2.Job:
    """Run a job of one round in which each client sends its value; return the job when it has ended."""
    job_id, events = run(control, **{"min_clients": len(values), "start": "fresh", "max_abandoned": 1, **keys})
    for client, value in zip(clients, values, strict=True):
        send(client, value)
    return outcome(control, job_id, events)


def moved(control: Control, client: WireClient) -> float:
    """Return by how much the newest model differs from the first of its job, in each value."""
    newest = control.models(limit=1)[0]
    first = next(model for model in control.models(limit=100) if model.job_id == newest.job_id and not model.round)
    change = parameters(client, newest.version) - parameters(client, first.version)
    assert np.ptp(change) <= 1e-5 * np.abs(change).max()
    return float(change.mean(dtype=np.float64))


def test_a_client_that_claims_2_to_the_40_samples_and_a_huge_norm_has_a_bounded_share(
    server: Fleet, control: Control, clients: Clients
) -> None:
    norm, (first, second, liar) = SIZE**0.5, clients("a", "b", "c")
    page = Page(server.ready["metrics"])
    before = [page(f"fl_server_updates_{what}_total") for what in ("capped", "clipped")]
    job_id, events = run(control, min_clients=3, start="fresh", max_samples=30, update_clip=2 * norm)
    for client, value, samples in ((first, 1.0, 10), (second, 1.0, 20), (liar, 1e3, 1 << 40)):
        send(client, value, samples=samples)
    job = outcome(control, job_id, events)
    assert job.state == "completed", job.reason
    assert moved(control, first) == pytest.approx((10 + 20 + 30 * 2) / 60, rel=1e-6)
    round_ = control.rounds(job_id=job_id)[0]
    assert (list(round_.clipped), list(round_.capped)) == (["c"], ["c"])
    assert round_.update_clip == pytest.approx(2 * norm)
    page = Page(server.ready["metrics"])
    after = [page(f"fl_server_updates_{what}_total") for what in ("capped", "clipped")]
    assert [new - old for new, old in zip(after, before, strict=True)] == [1, 1]
    done = forks.run("fedring.ctl.main", "rounds", str(round_.round), "--server", server.control, timeout=60)
    assert "shortened to a norm of 63.2456: c" in done.stdout
    assert "counted for max_samples: c" in done.stdout


def test_the_adaptive_bound_follows_the_round_before(control: Control, clients: Clients) -> None:
    three = clients("a", "b", "c")
    job_id, events = run(control, min_clients=3, start="fresh", rounds=2, update_clip_factor=2.0, weights="uniform")
    for value in (1.0, 4.0):
        for client in three:
            send(client, value)
    assert outcome(control, job_id, events).state == "completed"
    second, first = control.rounds(job_id=job_id)
    assert (list(first.clipped), list(second.clipped)) == ([], ["a", "b", "c"])
    assert moved(control, three[0]) == pytest.approx(1 + 2, rel=1e-6)


def test_weights_instead_of_a_difference_are_refused_by_a_job_that_clips(control: Control, clients: Clients) -> None:
    (client,) = clients("a")
    job_id, events = run(control, min_clients=1, start="fresh", update_clip=1.0)
    with pytest.raises(Refused) as refused:
        send(client, 1.0, kind=pb.KIND_WEIGHTS)
    assert refused.value.reason == "bad_packets"
    control.stop_job(job_id)
    outcome(control, job_id, events)


@pytest.mark.parametrize(
    ("table", "result"),
    [
        ({"rule": "median"}, 3.0),
        ({"rule": "trimmed_mean", "beta": 0.2}, 10 / 3),
        ({"rule": "krum", "malicious": 1}, 3.0),
        ({"rule": "own_rule:Agreement"}, 250002.5),
        ({"rule": "own_rule:Agreement", "args": {"least": -2.0}}, 200001.6),
    ],
)
def test_a_rule_combines_what_real_clients_send(
    control: Control, clients: Clients, table: dict[str, object], result: float
) -> None:
    five = clients(*NAMES)
    job = run_round(control, five, (2.0, 3.0, 5.0, 1e6, -2.0), aggregation=table)
    assert job.state == "completed", job.reason
    assert moved(control, five[0]) == pytest.approx(result, rel=1e-6)


@pytest.mark.parametrize(
    ("table", "reason", "text"),
    [
        ({"rule": "user_rules:NotANumber"}, "bad_rule", "the rule user_rules:NotANumber failed: it returned a value"),
        ({"rule": "user_rules:Raises"}, "bad_rule", "Raises failed: it raised ZeroDivisionError: nothing agrees"),
        ({"rule": "fltrust", "data": "fedring.data:digits"}, "no_server_update", "the server cannot train: NotImpl"),
    ],
)
def test_a_rule_that_fails_abandons_the_round_and_the_last_model_stays(
    control: Control, clients: Clients, table: dict[str, object], reason: str, text: str
) -> None:
    five, ones = clients(*NAMES), [1.0] * 5
    run_round(control, five, ones)
    kept = control.models(limit=1)[0]
    job = run_round(control, five, ones, start="newest", aggregation=table)
    (round_,) = control.rounds(job_id=job.job_id)
    assert job.state == "failed"
    assert text in job.reason
    assert (round_.phase, round_.reason) == ("abandoned", reason)
    assert control.models(limit=1)[0].version == kept.version
    job = run_round(control, five, ones, start="newest")
    assert job.state == "completed", job.reason


def test_a_killed_server_sends_the_settings_of_a_round_again_without_asking_its_strategy(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    settings = {"trusted": ["fedring", "user_strategies"], "data_root": str(tmp_path)}
    table = {"rule": "user_strategies:Recorded", "args": {"file": "calls"}}
    with Fleet(tmp_path, settings, env=path_to(ROOT / "tests" / "fixtures_user_code")) as fleet:
        with Control(fleet.control) as control, WireClient(fleet.listen) as client:
            job_id, _ = run(control, rounds=2, aggregation=table)
            rates = [client.expect("train").lr]
        fleet.restart_server()
        with Control(fleet.control) as control, WireClient(fleet.listen) as client:
            events = control.follow_job(job_id)
            for value in (1.0, 2.0):
                rates.append(send(client, value).lr)
            assert outcome(control, job_id, events).state == "completed"
    assert rates == [1.0, 1.0, 0.5]
    assert calls.read_text().split() == ["0", "1"]  # the past rounds that each call was given


def test_a_round_with_too_few_updates_for_its_rule_is_abandoned(control: Control, clients: Clients) -> None:
    *four, fifth = clients(*NAMES)
    table = {"rule": "krum", "malicious": 1}
    job_id, events = run(control, min_clients=5, start="fresh", max_abandoned=1, aggregation=table)
    for client in four:
        send(client, 1.0)
    command = fifth.expect("train")
    fifth.say(
        pb.WatchRequest(matched=True, failure=pb.Failure(round=command.round, reason="no_data", detail="it has none"))
    )
    job = outcome(control, job_id, events)
    assert job.state == "failed"
    assert "krum with malicious = 1 needs 5 updates, and has 4" in job.reason


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"rule": "median_of_means"}, "there is no rule 'median_of_means'"),
        ({"rule": "krum", "malicious": 2}, "aggregation: krum with malicious = 2 needs 7 updates, and has 5"),
        ({"rule": "user_rules:Nothing"}, "aggregation.rule: user_rules:Nothing is not offered here as rule"),
        ({"rule": "os:system"}, "aggregation.rule: os:system is not offered here as rule"),
        (
            {"rule": "own_rule:Agreement", "args": {"most": 1}},
            "aggregation.rule: own_rule:Agreement cannot be called with",
        ),
        ({"rule": "fltrust", "data": "user_rules:unreadable"}, "aggregation.data: The data cannot be loaded: OSError"),
        ({"rule": "fltrust", "data": "os:listdir"}, "aggregation.data: os:listdir is not offered here as data"),
    ],
)
def test_a_job_whose_rule_cannot_work_is_refused_when_it_is_queued(
    control: Control, table: dict[str, object], text: str
) -> None:
    with pytest.raises(Failure) as failure:
        run(control, min_clients=5, aggregation=table)
    assert text in str(failure.value)
