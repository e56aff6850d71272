"""fl-server's metrics: every series exists from the start, and every round and every reason is counted."""

import ast
import asyncio
from collections.abc import Iterator
from math import isnan
from pathlib import Path

import pytest
from tests.unit.host import running, spec

import fedring.codec
import fedring.server
from fedring.codec.errors import CodecError
from fedring.rpc import errors
from fedring.rpc.errors import FedringError, OtherUpdate, Stalled, Unavailable
from fedring.server.guard.auth import REASONS, AuthCounts
from fedring.server.operator.metrics import Metrics
from fedring.server.round import machine as rd
from fedring.server.round.events import (
    Abandoned,
    Closed,
    Delivered,
    Event,
    Finished,
    Joined,
    Lost,
    Matched,
    Phase,
    Published,
    Resumed,
    Round,
    RoundOpened,
    RoundRules,
    RoundState,
    Started,
)
from fedring.server.state.rows import UpdateRow
from fedring.server.update.metrics import REJECTIONS

OTHERS = {
    "bad_evaluation",
    "bad_schema",
    "bad_ranges",
    "unknown_model",
    "unknown_job",
    "several_jobs",
    "unknown_token",
    "no_residual",
}  # no upload is refused for these reasons
OTHERS |= {
    "other_job",
    "unknown_method",
    "unreadable",
    "unknown_client",
    "client_is_here",
    "no_accountant",
    "bad_model",
    "wrong_state",
}
OTHERS |= {"other_message", "bad_secure_message"}
OTHERS |= {
    "come_back",
    "in_line",
    "no_session",
    "superseded",
    "gone",
    "stalled",
    "unavailable",
    "damaged",
    "standby",
    "old_term",
}  # after these, the upload continues


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


def value(metrics: Metrics, name: str, **labels: str) -> float:
    found = metrics.registry.get_sample_value(name, labels)
    assert found is not None, name
    return found


def reasons_in(path: Path) -> Iterator[str]:
    """Yield the reasons of the errors that a file creates: an argument `reason`, or the first one of some errors."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        given = [keyword.value for keyword in node.keywords if keyword.arg == "reason"]
        given += node.args[:1] if node.func.id.endswith(("CodecError", "StorageError")) else []
        for word in (each for value in given for each in ast.walk(value)):
            if isinstance(word, ast.Constant) and isinstance(word.value, str):
                yield word.value


def test_every_reason_for_a_refusal_has_a_series() -> None:
    codec, server = (Path(package.__path__[0]) for package in (fedring.codec, fedring.server))
    files = [path for path in codec.glob("*.py") if path.stem != "gradient"]  # gradients are not updates
    files += [path for room in ("update", "model", "state") for path in (server / room).glob("*.py")]
    files += [
        server / "service" / "uploads.py",
        server / "service" / "upload_calls.py",
        server / "round" / "eligibility.py",
    ]
    found = {reason for path in files for reason in reasons_in(path)}
    assert {"bad_indices", "bad_chunk", "non_finite", "missing_blob", "not_selected"} <= found
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, FedringError)]
    found |= {kind.reason for kind in kinds}
    assert found - OTHERS - set(REASONS) - set(REJECTIONS) == set()


def test_an_unknown_reason_is_counted_as_other(metrics: Metrics) -> None:
    metrics.updates.refused(CodecError("made_up_by_a_client"))
    assert value(metrics, "fl_server_updates_rejected_total", reason="other") == 1
    assert (
        metrics.registry.get_sample_value("fl_server_updates_rejected_total", {"reason": "made_up_by_a_client"}) is None
    )


def test_an_upload_that_the_client_continues_is_interrupted_and_not_rejected(metrics: Metrics) -> None:
    for error in (Stalled(), Unavailable(), asyncio.CancelledError()):
        metrics.updates.refused(error)
    assert value(metrics, "fl_server_updates_total", result="interrupted") == 3
    assert value(metrics, "fl_server_updates_total", result="rejected") == 0
    metrics.updates.refused(OtherUpdate())
    assert value(metrics, "fl_server_updates_total", result="rejected") == 1
    assert value(metrics, "fl_server_updates_rejected_total", reason="already_accepted_other") == 1


def test_every_series_exists_from_the_start(metrics: Metrics) -> None:
    for reason in REJECTIONS:
        assert value(metrics, "fl_server_updates_rejected_total", reason=reason) == 0
    for result in ("published", "abandoned"):
        assert value(metrics, "fl_server_rounds_total", result=result) == 0
    for phase in ("waiting", "training", "aggregating", "evaluating"):
        assert value(metrics, "fl_server_round_phase_seconds_count", phase=phase) == 0
    assert isnan(value(metrics, "fl_server_model_accuracy_ratio"))


def play(metrics: Metrics, *events: tuple[float, Event]) -> None:
    """Apply the events at their times, and report each state of the round to the metrics."""
    state = RoundState()
    for at, event in events:
        before, state = state, rd.apply(state, event, at)
        metrics.rounds.moved(before.round, state.round, at)


OPENED = RoundOpened(7, RoundRules(min_clients=3, deadline=90.0))
STARTED: list[tuple[float, Event]] = [
    (0.0, Joined("a")),
    (0.0, Matched("a")),
    (10.0, OPENED),
    (14.0, Started(frozenset("a"))),
]


def test_the_phases_of_a_published_round_are_measured(metrics: Metrics) -> None:
    ends: list[tuple[float, Event]] = [
        (20.0, Delivered({"a"})),
        (21.0, Closed()),
        (24.0, Published(frozenset())),
        (29.0, Finished()),
    ]
    play(metrics, *STARTED, *ends)
    phases = {"waiting": 4.0, "training": 7.0, "aggregating": 3.0, "evaluating": 5.0}
    for phase, seconds in phases.items():
        assert value(metrics, "fl_server_round_phase_seconds_count", phase=phase) == 1
        assert value(metrics, "fl_server_round_phase_seconds_sum", phase=phase) == seconds
    assert value(metrics, "fl_server_round_duration_seconds_sum") == 10.0
    assert value(metrics, "fl_server_rounds_total", result="published") == 1
    assert value(metrics, "fl_server_rounds_total", result="abandoned") == 0
    assert value(metrics, "fl_server_round_deadline_seconds") == 90.0
    assert value(metrics, "fl_server_round_min_clients") == 3
    assert value(metrics, "fl_server_round_last_completed_timestamp_seconds") > 0


def test_of_several_open_rounds_the_one_that_asks_for_most_is_shown(metrics: Metrics) -> None:
    """So a job of short rounds raises no alarm about another one, and hides none."""
    long = Round(7, RoundRules(min_clients=8, deadline=3600.0), Phase.WAITING, 0.0)
    short = Round(8, RoundRules(min_clients=2, deadline=60.0), Phase.WAITING, 0.0)
    shown: list[tuple[float, float]] = []
    for before, after in ((None, long), (None, short), (short, None), (long, None), (None, short)):
        metrics.rounds.moved(before, after, 1.0)
        names = ("fl_server_round_deadline_seconds", "fl_server_round_min_clients")
        shown.append((value(metrics, names[0]), value(metrics, names[1])))
    assert shown == [(3600.0, 8), (3600.0, 8), (3600.0, 8), (3600.0, 8), (60.0, 2)]


def test_a_job_that_has_ended_needs_no_clients_any_more(metrics: Metrics) -> None:
    metrics.rounds.expect(2)
    shown = [value(metrics, "fl_server_round_min_clients")]
    large, small = (Round(number, RoundRules(min_clients=number), Phase.WAITING, 0.0) for number in (50, 3))
    for before, after in ((None, large), (None, small), (large, None)):
        metrics.rounds.moved(before, after, 1.0)
        metrics.rounds.job_ended()  # another one, which is not told
        shown.append(value(metrics, "fl_server_round_min_clients"))
    metrics.rounds.moved(small, None, 1.0)
    shown.append(value(metrics, "fl_server_round_min_clients"))  # its next round may be about to open
    metrics.rounds.job_ended()
    shown.append(value(metrics, "fl_server_round_min_clients"))
    assert shown == [2, 50, 50, 3, 3, 2]


async def test_what_a_job_needs_is_shown_while_it_runs(tmp_path: Path) -> None:
    async with running(tmp_path) as host:
        shown = host.parts.metrics
        shown.rounds.expect(7)
        job, _ = await host.jobs.start(spec(min_clients=1, rounds=1), "")
        session = host.join("a")
        command = await host.command(session)
        assert value(shown, "fl_server_round_min_clients") == 1
        assert not await host.offer(host.update(command, "a"))
        assert await host.ended(job.job_id) == "completed"
        assert value(shown, "fl_server_round_min_clients") == 7


def test_a_round_that_one_client_can_start_needs_one(metrics: Metrics) -> None:
    play(metrics, (0.0, RoundOpened(7, RoundRules(min_clients=3, barrier="none"))))
    assert value(metrics, "fl_server_round_min_clients") == 1


def test_an_abandoned_round_is_counted_as_abandoned(metrics: Metrics) -> None:
    play(metrics, *STARTED, (50.0, Abandoned("too_few_clients")), (50.0, Finished()))
    assert value(metrics, "fl_server_rounds_total", result="abandoned") == 1
    assert value(metrics, "fl_server_rounds_total", result="published") == 0
    assert value(metrics, "fl_server_round_duration_seconds_count") == 0
    assert value(metrics, "fl_server_round_last_completed_timestamp_seconds") == 0


def test_a_round_that_a_restart_interrupted_is_counted_once(metrics: Metrics) -> None:
    round_ = Round(7, RoundRules(), Phase.TRAINING, 0.0, selected=frozenset("a"))
    play(metrics, (100.0, Resumed(round_, 30.0, 0.0)), (103.0, Closed()), (104.0, Published(frozenset())))
    assert value(metrics, "fl_server_rounds_total", result="published") == 1
    assert value(metrics, "fl_server_round_duration_seconds_sum") == 4.0


def test_an_accepted_update_that_was_lost_is_counted(metrics: Metrics) -> None:
    round_ = Round(7, RoundRules(), Phase.TRAINING, 0.0, selected=frozenset("ab"), delivered=frozenset("ab"))
    play(metrics, (100.0, Resumed(round_, 30.0, 0.0)), (103.0, Closed()), (104.0, Lost("a")))
    assert value(metrics, "fl_server_updates_lost_total") == 1


def test_the_size_and_the_norm_of_an_accepted_update_are_observed(metrics: Metrics) -> None:
    row = UpdateRow(1, "a", "d", "n", (), 10, 4000, 0.5, 2.5, 0.0)
    metrics.updates.accepted([row], norm=True)
    assert value(metrics, "fl_server_updates_total", result="accepted") == 1
    assert value(metrics, "fl_server_update_bytes_sum") == 4000
    assert value(metrics, "fl_server_update_norm_sum") == 2.5


def test_the_servers_own_evaluation_is_used_if_no_client_has_evaluated(metrics: Metrics) -> None:
    on_server = {"server/accuracy": 0.5, "server/loss": 2.0}
    metrics.rounds.evaluated({"metrics": on_server})
    assert value(metrics, "fl_server_model_accuracy_ratio") == 0.5
    metrics.rounds.evaluated({"metrics": {**on_server, "eval/accuracy": 0.9, "eval/loss": 0.5}})
    assert value(metrics, "fl_server_model_accuracy_ratio") == 0.9
    assert value(metrics, "fl_server_model_loss") == 0.5
    metrics.rounds.evaluated({"metrics": {"train/loss": 9.0}})  # it was not evaluated
    assert value(metrics, "fl_server_model_accuracy_ratio") == 0.9


def test_no_accuracy_is_shown_for_a_model_without_one(metrics: Metrics) -> None:
    metrics.rounds.evaluated({"metrics": {"eval/accuracy": 0.9, "eval/loss": 0.5}})
    metrics.rounds.evaluated({"metrics": {"eval/loss": 0.25}})
    assert isnan(value(metrics, "fl_server_model_accuracy_ratio"))
    assert value(metrics, "fl_server_model_loss") == 0.25


def test_named_figures_are_those_of_the_newest_round_and_cannot_create_series_without_end(metrics: Metrics) -> None:
    metrics.rounds.evaluated({"metrics": {"train/f1": 0.5, "eval/loss": 1.0}})
    assert value(metrics, "fl_server_round_metric", metric="train/f1") == 0.5
    for number in range(10):
        metrics.rounds.evaluated({"metrics": {f"train/{number}-{name}": 1.0 for name in range(32)}})
    names = {sample.labels["metric"] for family in metrics.rounds.named.collect() for sample in family.samples}
    assert names == set()  # all names were used up before
    metrics.rounds.evaluated({"metrics": {"train/f1": 0.75, "train/new": 1.0}})
    (family,) = metrics.rounds.named.collect()
    assert [(sample.labels["metric"], sample.value) for sample in family.samples] == [("train/f1", 0.75)]


def test_refusals_handshakes_and_connections_are_exported_as_the_guard_counted_them(metrics: Metrics) -> None:
    counts = AuthCounts()
    counts.refused["bad_token"] = 2
    counts.handshakes, counts.connections, counts.ended = 5, 3, 2
    metrics.guard.read(counts)
    assert value(metrics, "fl_server_auth_refusals_total", reason="bad_token") == 2
    assert value(metrics, "fl_server_auth_refusals_total", reason="not_operator") == 0
    assert value(metrics, "fl_server_handshakes_total") == 5
    assert value(metrics, "fl_server_connections_total") == 3
    assert value(metrics, "fl_server_ended_connections_total") == 2


def test_epsilon_is_not_known_at_first(metrics: Metrics) -> None:
    assert isnan(value(metrics, "fl_server_privacy_epsilon"))
