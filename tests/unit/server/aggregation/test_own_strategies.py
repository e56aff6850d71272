"""Strategies of the user's own: what they choose and find, what is kept of it, and how they fail."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.closed_rounds import closed_round
from tests.journal_events import each_event
from tests.unit.host import SIZE, Host, running, spec
from torch import nn

from fedring.control.failure import Failure
from fedring.server.aggregation.strategy import (
    HISTORY,
    PastRound,
    Strategy,
    StrategyError,
    ask_metrics,
    ask_settings,
    make_strategy,
    past_round,
)
from fedring.server.model.guards import guard
from fedring.server.model.making import is_out_of_memory
from fedring.server.model.transforms.guarding import Guarded
from fedring.server.round.report import round_message
from fedring.server.state.rows import RoundRow, UpdateRow
from fedring.simulation import simulate
from fedring.train.errors import SeamError
from fedring.train.jobs.aggregation_table import Aggregation
from fedring.train.names.offered import collect

CODE = Path(__file__).parents[3] / "fixtures_user_code"
HERE = "user_strategies"
SMALL: dict[str, Any] = {"rounds": 1, "model_args": {"hidden": 8}, "evaluate": False, "max_abandoned": 1}


@pytest.fixture(autouse=True)
def _users_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(CODE))
    monkeypatch.setenv("FEDRING_SERVER_DATA_ROOT", str(tmp_path))
    monkeypatch.setenv("FEDRING_SERVER_TRUSTED", f'["fedring", "{HERE}"]')


def table(name: str, **args: Any) -> dict[str, Any]:
    return {"aggregation": {"rule": f"{HERE}:{name}", "args": args}}


def faulty(**args: str) -> Any:
    return make_strategy(Aggregation.model_validate(table("Faulty", **args)["aggregation"]), collect([HERE]))


FAULTS = {
    "raises": "failed: configure raised ZeroDivisionError: no rounds to divide by",
    "exits": "failed: configure raised CodeEnded: the job's code called sys.exit(3): ",
    "type": "failed: configure returned a float instead of a mapping",
    "nan": "failed: configure returned nan for 'lr'",
    "key": "failed: configure returned the key 'rounds': choose from lr, epochs, ",
    "value": "failed: configure returned settings that do not fit the job: lr: must be greater than 0",
    "text": "failed: configure returned a str for 'lr' instead of a number",
    "whole": "failed: configure returned settings that do not fit the job: epochs: must be",
    "large": "failed: configure returned a int for 'epochs' instead of a number",
    "tensor": "failed: configure returned a Tensor for 'lr' instead of a number",
}


@pytest.mark.parametrize(("fault", "text"), FAULTS.items())
def test_settings_that_cannot_be_used_are_refused_in_one_sentence(fault: str, text: str) -> None:
    with pytest.raises(StrategyError) as caught:
        ask_settings(faulty(configure=fault), spec(), [])
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("fault", ["raises", "type", "nan", "tensor", "text", "name"])
def test_figures_that_cannot_be_kept_are_refused_in_one_sentence(fault: str) -> None:
    with pytest.raises(StrategyError, match=f"the strategy {HERE}:Faulty failed: evaluate "):
        ask_metrics(faulty(evaluate=fault), nn.Linear(1, 1))


def test_a_class_without_any_of_the_methods_is_no_strategy() -> None:
    with pytest.raises(SeamError, match="let it return an object with coefficients, combine, configure, evaluate"):
        make_strategy(Aggregation.model_validate({"rule": f"{HERE}:Nothing"}), collect([HERE]))
    with pytest.raises(SeamError, match="has no rule for the buckets of bucketing = 2"):
        make_strategy(Aggregation.model_validate({"rule": f"{HERE}:Attentive", "bucketing": 2}), collect([HERE]))


async def one_round(host: Host, session: Any) -> Any:
    """Let a client answer the next command; return the command."""
    command = await host.command(session)
    await host.offer(host.update(command, session.client_id))
    return command


async def test_a_round_that_was_sent_keeps_its_settings_and_its_strategy_is_not_asked_again(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    commands = []
    async with running(tmp_path) as host:
        session = host.join("a")
        row, _ = await host.jobs.start(spec(rounds=3, **table("Recorded", file="calls")), "")
        commands.append(await one_round(host, session))
        commands.append(await host.command(session))  # the round was sent when the server ends
    async with running(tmp_path) as host:
        session = host.join("a")
        commands += [await one_round(host, session), await one_round(host, session)]
        assert await host.ended(row.job_id) == "completed"
        told = [dict(round_message(each).settings) for each in host.store.rounds.newest(10, row.job_id)]
    assert [command.round for command in commands] == [1, 2, 2, 3]
    assert [command.lr for command in commands] == pytest.approx([1, 1 / 2, 1 / 2, 1 / 3])
    assert {command.epochs for command in commands} == {2}
    assert told == [{"lr": pytest.approx(1 / number), "epochs": 2.0} for number in (3, 2, 1)]
    assert calls.read_text().split() == ["0", "1", "2"]  # the past rounds that each call was given


async def test_a_round_that_waits_for_clients_keeps_its_settings_too(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    async with running(tmp_path) as host:
        await host.jobs.start(spec(**table("Recorded", file="calls")), "")
        async for event in each_event(host.journal, 1):
            if event.kind == "round_waits":
                break
    async with running(tmp_path) as host:
        command = await one_round(host, host.join("a"))
    assert command.lr == 1.0
    assert calls.read_text().split() == ["0"]


async def test_a_strategy_that_fails_ends_its_round_and_the_last_model_stays(tmp_path: Path) -> None:
    async with running(tmp_path) as host:
        session = host.join("a")
        row, _ = await host.jobs.start(spec(rounds=2, max_abandoned=2, **table("Faulty", configure="key")), "")
        assert await host.ended(row.job_id) == "failed"
        assert [(each.phase, each.reason) for each in host.store.rounds.newest(10, row.job_id)] == [
            ("abandoned", "bad_strategy")
        ] * 2
        failed = host.store.jobs.get(row.job_id)
        assert failed is not None
        assert failed.reason.startswith("bad_strategy: the strategy user_strategies:Faulty failed: configure returned")
        assert host.rounds.latest is not None
        assert host.rounds.latest.version == 1
        row, _ = await host.jobs.start(spec(start="newest"), "")  # the server goes on
        await one_round(host, session)
        assert await host.ended(row.job_id) == "completed"


async def test_a_round_for_which_the_memory_does_not_suffice_is_abandoned_and_the_server_goes_on(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as host:
        session = host.join("a")
        row, _ = await host.jobs.start(spec(max_abandoned=1, **table("NeedsMemory")), "")
        await one_round(host, session)
        assert await host.ended(row.job_id) == "failed"
        (round_,), failed = host.store.rounds.newest(10, row.job_id), host.store.jobs.get(row.job_id)
        assert (round_.phase, round_.reason) == ("abandoned", "out_of_memory")
        assert failed is not None
        assert "the server has too little memory to combine 1 updates of 8 parameters" in failed.reason
        row, _ = await host.jobs.start(spec(start="newest"), "")
        await one_round(host, session)
        assert await host.ended(row.job_id) == "completed"


async def test_a_rule_that_wants_to_end_the_process_only_ends_its_round(tmp_path: Path) -> None:
    async with running(tmp_path) as host:
        session = host.join("a")
        row, _ = await host.jobs.start(spec(max_abandoned=1, **table("Exits")), "")
        await one_round(host, session)
        assert await host.ended(row.job_id) == "failed"
        assert host.store.rounds.newest(1)[0].reason == "bad_rule"


def test_an_allocation_of_torch_that_fails_is_a_lack_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("another fault"))


async def test_an_evaluation_that_fails_is_a_warning_of_the_round_and_the_model_stays(tmp_path: Path) -> None:
    async with running(tmp_path) as host:
        session = host.join("a")
        row, _ = await host.jobs.start(spec(**table("Faulty", evaluate="needs memory")), "")
        await one_round(host, session)
        assert await host.ended(row.job_id) == "completed"
        (round_,) = map(round_message, host.store.rounds.newest(10, row.job_id))
        newest = host.store.models.newest(1)[0]
    assert round_.phase == "published"
    assert list(round_.warnings) == [f"the strategy {HERE}:Faulty failed: evaluate raised MemoryError"]
    assert newest.round == round_.round


async def test_the_figures_of_a_new_model_are_kept_with_its_round(tmp_path: Path) -> None:
    async with running(tmp_path) as host:
        session = host.join("a")
        row, _ = await host.jobs.start(spec(best_by="max server/fine", patience=1, **table("Faulty")), "")
        await one_round(host, session)
        assert await host.ended(row.job_id) == "completed"
        (round_,) = host.store.rounds.newest(10, row.job_id)
        newest = host.store.models.newest(1)[0]
    assert round_.stats["metrics"]["server/fine"] == newest.metrics["server/fine"] == 1.0


async def test_a_strategy_without_a_rule_averages_by_samples(tmp_path: Path) -> None:
    async with running(tmp_path) as host:
        sessions = [host.join(name) for name in ("a", "b")]
        keys = {"min_clients": 2, "max_samples": 3, **table("Recorded", file="calls")}
        row, _ = await host.jobs.start(spec(**keys), "")
        for session, value, samples in zip(sessions, (1.0, 9.0), (1, 100), strict=True):
            partial, update = host.update(
                await host.command(session), session.client_id, np.full(SIZE, value, np.float32)
            )
            await host.offer((partial, replace(update, num_samples=samples)))
        assert await host.ended(row.job_id) == "completed"
        newest, first = host.store.models.newest(2)
        values = [host.parts.models.maker.ask_metrics(model, spec(**table("Sum"))) for model in (newest, first)]
        (round_,) = host.store.rounds.newest(10, row.job_id)
    assert values[0]["sum"] - values[1]["sum"] == pytest.approx(SIZE * (1 + 3 * 9) / 4)
    assert round_.stats["capped"] == ["b"]


def test_the_history_has_the_newest_rounds_and_cannot_be_changed() -> None:
    seen: list[PastRound] = []

    class Curious:
        def configure(self, history: Any) -> Mapping[str, float]:
            seen.extend(history)
            return {}

    assert HISTORY == 100
    facts = {"num_samples": 3, "train_seconds": 0.5, "metrics": {"loss": 2.0}}
    stats = {
        "seconds": 1.5,
        "settings": {"lr": 0.5},
        "metrics": {"train/loss": 2.0},
        "clients": {"a": facts, "b": {**facts, "num_samples": 0}},
    }
    row = RoundRow(7, 1, 2, "published", 0.0, model_version=9, ended_at=1.0, stats=stats)
    ask_settings(Strategy("here", configure=Curious().configure), spec(), [past_round(row)])
    (past,) = seen
    assert (past.number, past.published, past.reason, past.seconds) == (2, True, "", 1.5)
    assert (dict(past.settings), dict(past.metrics)) == ({"lr": 0.5}, {"train/loss": 2.0})
    assert {name: client.num_samples for name, client in past.clients.items()} == {"a": 3}
    with pytest.raises(TypeError):
        past.metrics["train/loss"] = 1.0  # type: ignore[index]  # it is read-only


async def test_updates_that_a_strategy_averages_are_normalised_by_their_weights(tmp_path: Path) -> None:
    rows = [
        UpdateRow(1, name, "", "", (), samples, 1, 1.0, 1.0, 1.0) for name, samples in (("a", 10), ("b", 20), ("c", 90))
    ]
    keys = {"normalize_steps": True, "batch_size": 10, "momentum": 0.0}
    async with running(tmp_path) as host:
        steps = host.parts.models.maker.prepare(closed_round(spec(**keys, **table("Attentive")), rows)).steps
    (by_own,) = (step.found for step in steps if isinstance(step, Guarded))
    assert by_own.factors == guard(spec(**keys), rows).factors
    assert by_own.factors != guard(spec(**keys, **table("Attentive")), rows).factors  # as if it had a rule


def test_a_simulation_keeps_warnings_and_abandons_rounds_as_a_server_does() -> None:
    report = simulate({**SMALL, **table("Faulty", evaluate="raises")}, clients=4, workers=1)
    assert [row["warnings"] for row in report["rounds"]] == [
        [f"the strategy {HERE}:Faulty failed: evaluate raised ZeroDivisionError: no rounds to divide by"]
    ]
    with pytest.raises(Failure, match="round 1 is abandoned, because the strategy user_strategies:Faulty failed: conf"):
        simulate({**SMALL, **table("Faulty", configure="nan")}, clients=4, workers=1)
    with pytest.raises(Failure, match="the server has too little memory to combine 4 updates of 610 parameters"):
        simulate({**SMALL, **table("NeedsMemory")}, clients=4, workers=1)
