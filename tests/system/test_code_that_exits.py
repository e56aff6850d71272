"""Code of a job that calls sys.exit() or raises KeyboardInterrupt fails, and ends neither clients nor the server."""

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedring.control.failure import Failure
from fedring.job_code import AskedToExit, AskedToStop, CodeEnded, job_code
from fedring.simulation import simulate
from tests.conftest import ROOT, path_to
from tests.fleets import Control, Fleet, run_job, until_watching

CODE = ROOT / "tests" / "fixtures_user_code"
TRUSTED = {"trusted": ["fedring", "user_exits"]}
KEYS: dict[str, Any] = {"rounds": 1, "min_clients": 2, "subset_size": 32, "evaluate": False}
EXIT, INTERRUPT = "the job's code called sys.exit(", "the job's code raised KeyboardInterrupt"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Start a server and two clients that have the user's module."""
    parts = [{**TRUSTED, "partition_index": index, "partition_count": 2} for index in range(2)]
    with Fleet(tmp_path_factory.mktemp("exits"), TRUSTED, parts, env=path_to(CODE)) as fleet:
        with Control(fleet.control) as control:
            until_watching(control, 2)
        yield fleet


AT_CLIENTS: list[tuple[dict[str, Any], str]] = [
    ({"model": "user_exits:model"}, f"{EXIT}'usage: train [--lr LR]')"),
    ({"data": "user_exits:data"}, INTERRUPT),
    ({"data": "user_exits:loads"}, f"{EXIT}0)"),
    ({"loss": "user_exits:loss"}, f"{EXIT}0)"),
    ({"optimizer": "user_exits:optimizer"}, INTERRUPT),
    ({"trainer": "user_exits:trainer"}, f"{EXIT}0)"),
    ({"trainer": "user_exits:interrupts"}, INTERRUPT),
    ({"evaluate": True, "evaluator": "user_exits:evaluator"}, f"{EXIT})"),
    ({"evaluate": True, "evaluator": "user_exits:stops"}, INTERRUPT),
    ({"mode": "data_parallel", "loss": "user_exits:loss"}, f"{EXIT}0)"),
    ({"mode": "pipeline", "loss": "user_exits:loss", "pipeline": {"cut": [2, 2]}}, f"{EXIT}0)"),
]
AT_THE_SERVER: list[tuple[dict[str, Any], str]] = [
    ({"aggregation": {"rule": "user_exits:Rule"}}, f"{EXIT}3)"),
    ({"aggregation": {"rule": "user_exits:Strategy"}}, INTERRUPT),
    ({"evaluate_on_server": True, "evaluator": "user_exits:evaluator"}, f"{EXIT})"),
    ({"aggregation": {"rule": "fltrust", "data": "user_exits:loads"}}, f"{EXIT}0)"),
]


def ids(cases: list[tuple[dict[str, Any], str]]) -> list[str]:
    return [str(keys) for keys, _ in cases]


@pytest.mark.parametrize(("keys", "sentence"), AT_CLIENTS, ids=ids(AT_CLIENTS))
def test_a_client_survives_code_that_ends_the_process(fleet: Fleet, keys: dict[str, Any], sentence: str) -> None:
    with Control(fleet.control) as control:
        job = run_job(control, KEYS | keys)
        assert job.state == "failed"
        assert sentence in job.reason, job.reason
        assert [client.state for client in control.clients()] == ["watching", "watching"]
    assert [client.running for client in fleet.clients] == [True, True]


@pytest.mark.parametrize(("keys", "sentence"), AT_THE_SERVER, ids=ids(AT_THE_SERVER))
def test_the_server_survives_code_that_ends_the_process(fleet: Fleet, keys: dict[str, Any], sentence: str) -> None:
    with Control(fleet.control) as control:
        assert sentence in refusal(control, keys)
        assert control.status().clients_watching == 2


def refusal(control: Control, keys: dict[str, Any]) -> str:
    """Return why a job has failed, or was not queued."""
    try:
        job = run_job(control, KEYS | keys)
    except Failure as refused:
        return str(refused)
    assert job.state == "failed"
    return job.reason


@pytest.mark.parametrize("trainer", ["trainer", "interrupts"])
def test_a_simulation_survives_it_too(trainer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(CODE))
    with pytest.raises(Failure, match=r"client-0: CodeEnded: the job's code"):
        simulate({**KEYS, "trainer": f"user_exits:{trainer}"}, clients=2, workers=1)


def test_what_signals_ask_for_passes() -> None:
    for asked in (AskedToStop(), AskedToExit(143)):
        with pytest.raises(type(asked)), job_code():
            raise asked
    with pytest.raises(AskedToStop), job_code():
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="again"), job_code():
        raises_anew()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def raises_anew() -> None:
    """Do as code does that catches the interrupt of a person."""
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("again") from None


def test_a_thread_of_a_pool_is_never_interrupted_by_people() -> None:
    found: list[Exception] = []

    def call() -> None:
        try:
            with job_code():
                raise KeyboardInterrupt
        except RuntimeError as error:
            found.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert isinstance(found[0], CodeEnded)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_still_ends_a_client_whose_trainer_never_ends(tmp_path: Path, number: signal.Signals) -> None:
    with Fleet(tmp_path, TRUSTED, [TRUSTED], env=path_to(CODE)) as fleet, Control(fleet.control) as control:
        events = control.events()
        control.start_job({**KEYS, "min_clients": 1, "trainer": "user_exits:waits"})
        next(event for event in events if event.kind == "round_started")
        until_training(control)
        fleet.clients[0].send(number)
        assert fleet.clients[0].wait(60) == 0
        events.cancel()


def until_training(control: Control) -> None:
    """Wait until a client says that it trains."""
    while not any(client.activity == 2 for client in control.clients()):
        pass
