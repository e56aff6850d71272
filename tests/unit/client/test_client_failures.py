"""A server with secure aggregation learns nothing of clients whose training fails."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import numpy as np
import pytest
import torch
from tests.honest_clients import STEP, new_model
from tests.kept import kept_of, kept_residual
from tests.secure_server import SecureServer
from tests.secure_sums import peers_of
from tests.unit.failing_clients import (
    HOLDER,
    NAMES,
    SAMPLES,
    Clients,
    account,
    ask,
    check_nothing_seen,
    end,
    finish,
    holds,
    job,
    overflowing,
    running,
    samples_of,
    weighed,
)
from tests.unit.training_client import plug_in
from torch import Tensor, nn

from fedring.client import Federation, UpdateRefused, connect
from fedring.client.task import Task
from fedring.data import Samples, Split
from fedring.train.losses import cross_entropy
from fedring.v1 import federation_pb2 as pb


@pytest.fixture
def clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clients]:
    """Clients that are stopped in the end."""
    with running(tmp_path, monkeypatch) as clients:
        yield clients


@pytest.fixture
def server(clients: Clients) -> SecureServer:
    """Their server."""
    return clients.server


@pytest.fixture
def module(clients: Clients) -> ModuleType:
    """The module of the user."""
    return clients.module


# What fails: the model that the server sends, or code of the site, on samples of one class


DP = '{"noise_multiplier": 1.0, "clip": 0.5, "adaptive": false}'


def failing_loss(error: type[Exception]) -> Callable[..., Any]:
    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        if holds(labels):
            raise error("Jane Doe")
        return cross_entropy(outputs, labels)

    return loss


def failing_trainer(way: str) -> Callable[..., Any]:
    def trainer(model: nn.Linear, samples: Any, plan: Any) -> Any:
        with torch.no_grad():
            model.bias.add_(STEP)
            if holds(samples.labels) and way == "non_finite":
                model.bias[0] = torch.nan
        if holds(samples.labels) and way == "wrong_schema":
            model.bias = nn.Parameter(torch.zeros(8))
        return "nonsense" if holds(samples.labels) and way == "bad_result" else len(samples)

    return trainer


WAYS: dict[str, tuple[str, Callable[..., Any] | None]] = {
    "diverged": ("", None),
    "train_error": ("loss", failing_loss(KeyError)),
    "out_of_memory": ("loss", failing_loss(MemoryError)),
    "non_finite": ("trainer", failing_trainer("non_finite")),
    "bad_result": ("trainer", failing_trainer("bad_result")),
    "wrong_schema": ("trainer", failing_trainer("wrong_schema")),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_failure_looks_like_any_other_update_and_changes_nothing(
    server: SecureServer, clients: Clients, module: ModuleType, way: str
) -> None:
    part, code = WAYS[way]
    keys = {part: plug_in(module, code)} if code else {}
    federations = clients.start_all(**keys)
    ask(server, 1, model=overflowing() if way == "diverged" else None)
    check_nothing_seen(server)
    total = finish(server, 1)
    check_nothing_seen(server)
    assert total[-1] == 3 * SAMPLES  # the full weight of all three
    if part == "trainer":
        steps = np.rint(total[:-1].reshape(-1) / SAMPLES)[35:]
        assert (steps == 2).all()  # of the two that have trained
    counted = {name: hidden(federation, way) for name, federation in federations.items()}
    assert counted == {"ann": 0, "bob": 0, "cat": 1}


def hidden(federation: Federation, reason: str) -> float | None:
    value = "fl_client_hidden_failures_total"
    return federation._link.metrics.registry.get_sample_value(value, {"reason": reason})


def test_while_a_client_waits_for_others_its_progress_does_not_tell_that_it_has_failed(
    server: SecureServer, clients: Clients
) -> None:
    clients.start_all()
    server.begin(1, NAMES, model=overflowing(), job=job(), secure=weighed())
    server.share(1)
    server.until(lambda: all(server.progress[name][-1:] == [1.0] for name in NAMES))
    assert server.failures == {}


def test_a_trainer_that_fails_reports_no_progress_either(
    server: SecureServer, clients: Clients, module: ModuleType
) -> None:
    federations = clients.start_all(trainer=plug_in(module, failing_trainer("bad_result")))
    server.begin(1, NAMES, job=job(), secure=weighed())
    server.share(1)
    server.until(lambda: hidden(federations[HOLDER], "bad_result") == 1)
    before = len(server.progress[HOLDER])
    server.until(lambda: len(server.progress[HOLDER]) >= before + 2)
    assert {share for name in NAMES for share in server.progress[name]} == {0.0}


def test_if_all_fail_the_sum_is_zero_with_their_full_weight(
    server: SecureServer, clients: Clients, module: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        raise ValueError("Jane Doe")

    clients.start_all(loss=plug_in(module, loss))
    ask(server, 1, subset_size=5)
    total = finish(server, 1)
    check_nothing_seen(server)
    assert total.tolist() == [0] * 42 + [3 * 5]  # as many samples as the round asks for
    assert "Jane Doe" in caplog.text


def test_a_trainer_that_fails_counts_for_as_many_samples_as_before(
    server: SecureServer, clients: Clients, module: ModuleType
) -> None:
    def trainer(model: nn.Module, samples: Any, plan: Any) -> int:
        if plan.round == 2 and holds(samples.labels):
            raise KeyError("Jane Doe")
        return 9

    clients.start_all(trainer=plug_in(module, trainer))
    for round_ in (1, 2):
        ask(server, round_)
        assert end(server, round_)[-1] == 3 * 9
    check_nothing_seen(server)


def test_uniform_updates_have_no_weight(server: SecureServer, clients: Clients) -> None:
    clients.start_all()
    ask(server, 1, model=overflowing(), secure=weighed(max_weight=0))
    assert len(finish(server, 1)) == 42
    check_nothing_seen(server)


def test_a_failure_gets_noise_and_is_charged_like_any_update(server: SecureServer, clients: Clients) -> None:
    noise = '{"noise_multiplier": 1.0, "clip": 0.5, "adaptive": false, "noise_by": "clients"}'
    clients.start_all()
    ask(server, 1, model=overflowing(), job=job(dp=noise), secure=weighed(max_weight=0, clip=0.5))
    check_nothing_seen(server)
    charged = [account(clients.folder / name)["rounds"] for name in NAMES]
    assert charged[0] == charged[1] == charged[2] != {}
    assert len({server.payloads[1, name] for name in NAMES}) == 3


def test_a_failure_is_sent_again_after_a_restart_as_the_same_bytes(server: SecureServer, clients: Clients) -> None:
    clients.start_all()
    server.refuse_updates.set()
    server.begin(1, NAMES, model=overflowing(), job=job(), secure=weighed())
    server.share(1)
    for name in NAMES:
        server.step(name, 1, peers=peers_of(server.of(server.shares, 1), name))
    server.until(lambda: server.offered.keys() == set(NAMES))
    clients.stop(HOLDER)
    server.refuse_updates.clear()
    clients.start(HOLDER)
    server.train(HOLDER, server.commands[1])
    server.await_all(server.payloads, 1, NAMES)
    assert {name: len(offered) for name, offered in server.offered.items()} == dict.fromkeys(NAMES, 1)
    assert server.failures == {}
    assert finish(server, 1)[-1] == 3 * SAMPLES
    assert account(clients.folder / HOLDER)["jobs"] == [
        {"run": "run-1", "job": 1, "failed": 1, "samples": 0, "epoch": 0, "round": 1}
    ]


def test_a_disk_that_is_full_is_told_and_ends_no_client(
    server: SecureServer, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on the device of Jane Doe")

    clients.start_all()
    with monkeypatch.context() as patch:
        patch.setattr("fedring.client.policy.ledger.Ledger.note_failed", full)
        ask(server, 1, model=overflowing())
    assert ("Failure", "disk_failed", "the log of this client says more") in server.seen[HOLDER]
    ask(server, 2)
    assert finish(server, 2)[-1] == 3 * SAMPLES


def test_an_update_that_cannot_be_charged_is_not_sent_and_the_server_need_not_wait_for_it(
    server: SecureServer, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on the device of Jane Doe")

    monkeypatch.setattr("fedring.client.policy.ledger.Ledger.charge", full)
    clients.start(HOLDER)
    command = server.command(1, job=job(secure_aggregation="", dp=DP), encoding=pb.Encoding(name="fp32"))
    command.ClearField("secure")
    server.train(HOLDER, command)
    assert server.failure(1, HOLDER) == "disk_failed"
    assert server.offered == {}


# What a client keeps


def test_what_past_updates_left_out_stays(server: SecureServer, clients: Clients) -> None:
    clients.start_all()
    ask(server, 1)
    end(server, 1)
    folder = clients.folder / HOLDER
    server.until(lambda: kept_residual(folder) is not None)
    before = kept_residual(folder)
    assert before is not None
    assert np.abs(before).max() > 0
    ask(server, 2, model=overflowing())
    finish(server, 2)
    check_nothing_seen(server)
    np.testing.assert_array_equal(kept_residual(folder), before)


def test_a_client_s_own_model_stays(server: SecureServer, clients: Clients) -> None:
    own = '{"method": "ditto", "mu": 0.1, "epochs": 1}'
    clients.start_all()
    ask(server, 1, job=job(personal=own))
    end(server, 1)
    folder = clients.folder / HOLDER
    server.until(lambda: kept_of(folder, "personal") is not None)
    before = kept_of(folder, "personal")
    assert before is not None
    ask(server, 2, model=overflowing(), job=job(personal=own))
    finish(server, 2)
    check_nothing_seen(server)
    after = kept_of(folder, "personal")
    assert after is not None
    assert all(torch.equal(after.tensors[name], values) for name, values in before.tensors.items())


# Until a client takes no further part


def test_a_client_stops_after_so_many_failures_in_a_row_and_says_no_more(
    server: SecureServer, clients: Clients, caplog: pytest.LogCaptureFixture
) -> None:
    keys = {"privacy": {"max_failed_rounds": 2}}
    clients.start_all(**keys)
    for round_, model in ((1, overflowing()), (2, None), (3, overflowing()), (4, overflowing())):
        ask(server, round_, model=model)
        end(server, round_)
    check_nothing_seen(server)
    for round_ in (5, 6):
        server.train(HOLDER, server.command(round_, job=job(), secure=weighed()))
        assert server.failure(round_, HOLDER) == "failed_rounds"
        clients.stop(HOLDER)  # the count outlives the process
        clients.start(HOLDER, **keys)
    told = "this client has failed in 2 rounds of this job in a row: its privacy.max_failed_rounds"
    assert server.seen[HOLDER][-1] == ("Failure", "failed_rounds", told)
    assert "3 rounds have failed at this client, and the server got zeros for them" in caplog.text
    for round_ in (7, 8, 9):  # of another job, on the same day
        ask(server, round_, model=overflowing(), job=job(2))
        end(server, round_)
    ask(server, 10, job=job(2))
    finish(server, 10)
    assert [seen for seen in server.seen[HOLDER] if seen[0] == "Failure"] == [("Failure", "failed_rounds", told)] * 2


def test_a_client_without_a_limit_goes_on(server: SecureServer, clients: Clients) -> None:
    clients.start_all(privacy={"max_failed_rounds": 0})
    for round_ in range(1, 13):
        ask(server, round_, model=overflowing())
        end(server, round_)
    check_nothing_seen(server)


# What may be told


def test_what_fails_before_the_model_is_there_is_told_without_the_text_of_errors(
    server: SecureServer, clients: Clients, module: ModuleType
) -> None:
    def data_of_nobody(root: Any, download: bool) -> Split:
        raise ValueError("could not convert string to float: 'Jane Doe'")

    def empty(root: Any, download: bool) -> Split:
        return Split(Samples(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64)), samples_of("ann"), 7)

    def uneven(root: Any, download: bool) -> Split:
        return Split(Samples(torch.zeros(41, 5), torch.zeros(42)), samples_of("ann"), 7)

    clients.start("ann", data=plug_in(module, data_of_nobody))
    clients.start("bob", data=plug_in(module, empty))
    clients.start("cat", data=plug_in(module, uneven))
    server.begin(1, NAMES, job=job())
    assert server.failure(1, "ann") == server.failure(1, "bob") == "no_data"
    assert server.failure(1, "cat") == "bad_samples"
    server.begin(2, NAMES, job=job(loss="os:getcwd"))
    assert server.failure(2, "bob") == "not_offered"
    assert ("Failure", "no_data", "ValueError; the log of this client says more") in server.seen["ann"]
    assert ("Failure", "bad_samples", "DataError; the log of this client says more") in server.seen["cat"]
    assert "Jane Doe" not in str(server.seen)
    assert "41 inputs" not in str(server.seen)


def test_without_masks_and_noise_a_failure_is_told(server: SecureServer, clients: Clients) -> None:
    clients.start(HOLDER)
    command = server.command(1, overflowing(), job=job(secure_aggregation=""), encoding=pb.Encoding(name="fp32"))
    command.ClearField("secure")
    server.train(HOLDER, command)
    assert server.failure(1, HOLDER) == "diverged"
    assert not (clients.folder / HOLDER / "privacy.json").exists()


# Scripts


class Script:
    """A user's script in a thread, which fails in its second round.

    Args:
        server: its server.
        folder: where its state folder is.
        way: how it fails.
        samples: what it tells load_into() of its samples.
    """

    def __init__(self, server: SecureServer, folder: Path, way: str, samples: int = 0) -> None:
        self._federation = connect(server=server.address, client_id=HOLDER, state_dir=folder / HOLDER)
        self._way, self._samples = way, samples
        self.raised: list[str] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._federation.close()
        self._thread.join()

    def _run(self) -> None:
        try:
            with self._federation as federation:
                for task in federation:
                    self._train(task)
        except KeyError as error:
            self.raised.append(repr(error))

    def _train(self, task: Task) -> None:
        model = new_model()
        if task.round == 1:
            task.load_into(model)
            task.submit(model, samples=7)
            return
        if self._way != "before":
            task.load_into(model, samples=self._samples)
        match self._way:
            case "fail" | "before":
                task.fail("no_data", "Jane Doe is not among my patients")
                task.fail("again", "which changes nothing")
            case "raise":
                raise KeyError("Jane Doe")
            case "not finite":
                nn.init.constant_(next(model.parameters()), torch.nan)
                with pytest.raises(UpdateRefused, match="non_finite"):
                    task.submit(model, samples=7)
            case "no array":
                with pytest.raises(ValueError, match="weight is of the kind"):
                    task.submit({"weight": np.zeros(3, np.int64)}, samples=7)
            case "nonsense":
                with pytest.raises(ValueError, match="samples is 0"):
                    task.submit(model, samples=0)


@pytest.mark.parametrize("way", ["fail", "nothing", "raise", "not finite", "no array", "nonsense"])
@pytest.mark.parametrize(("samples", "weight"), [(0, 7), (5, 5)], ids=["as-before", "as-told"])
def test_a_script_that_fails_delivers_zeros_too(
    server: SecureServer, clients: Clients, way: str, samples: int, weight: int
) -> None:
    for name in NAMES[:2]:
        clients.start(name)
    with Script(server, clients.folder, way, samples) as script:
        ask(server, 1)
        end(server, 1)
        ask(server, 2)
        check_nothing_seen(server)
        if way != "raise":  # else the script is gone
            assert finish(server, 2)[-1] == 2 * SAMPLES + weight
    assert script.raised == (["KeyError('Jane Doe')"] if way == "raise" else [])


def test_a_script_that_fails_before_the_model_is_there_says_so(server: SecureServer, clients: Clients) -> None:
    for name in NAMES[:2]:
        clients.start(name)
    with Script(server, clients.folder, "before"):
        ask(server, 1)
        end(server, 1)
        ask(server, 2)
        assert server.failures == {(2, HOLDER): "again"}
