"""Jobs that wait for people at a site: what the server is told of them, and by which of its states."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from torch import nn

from fedring.client import connect
from fedring.client.consent.approval import Approval
from fedring.client.consent.cards import Cards, Decision
from fedring.client.consent.consent import Consent, Refusal
from fedring.client.errors import RoundOver
from fedring.client.session.tries import Tries
from fedring.client.transfer.upload import POLICY
from fedring.rpc.errors import Unavailable
from fedring.v1 import federation_pb2 as pb

if TYPE_CHECKING:
    from tests.scripted_server import ScriptedServer

SECONDS = 60.0


def decide(state_dir: Path, *, approved: bool) -> None:
    """Decide about all cards."""
    cards = Cards(state_dir)
    for kept in cards.all()[0]:
        cards.decide(kept, Decision(time.time(), 0, approved=approved))


@contextmanager
def asking(settings: dict[str, Any]) -> Iterator[None]:
    """Run a client whose site approves jobs first."""
    with connect(**settings, approval={"mode": "cards"}) as federation:
        thread = threading.Thread(target=lambda: list(federation))
        thread.start()
        yield
        federation.close()
        thread.join()


def report(server: "ScriptedServer", *, failed: bool) -> pb.WatchRequest:
    """Return the next report of the client, or the next one with a failure."""
    while True:
        found = server.reports.get(timeout=SECONDS)
        if not failed or found.HasField("failure"):
            return found


def test_a_refusal_names_the_job_though_it_was_approved_before_it_is_told(
    server: "ScriptedServer", settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = Consent.refusal

    def refuse_then_approve(self: Consent, command: pb.TrainCmd) -> Refusal | None:
        refused = refuse(self, command)
        decide(settings["state_dir"], approved=True)
        return refused

    monkeypatch.setattr(Consent, "refusal", refuse_then_approve)
    with asking(settings):
        server.joins.get(timeout=SECONDS)
        server.train(server.command(nn.Linear(2, 2), job=pb.JobSpec(mode="federated", job_id=7)))
        told = report(server, failed=True)
        assert (told.failure.reason, list(told.unapproved_jobs)) == ("not_approved", [7])
        assert report(server, failed=False).unapproved_jobs == []


@pytest.mark.parametrize(
    ("state", "jobs"),
    [({}, [7]), ({"run_id": "run-2"}, []), ({"epoch": 1}, [])],
    ids=["started again", "another server", "restored"],
)
def test_a_job_waits_at_the_state_of_the_server_that_has_asked(
    server: "ScriptedServer", settings: dict[str, Any], state: dict[str, Any], jobs: list[int]
) -> None:
    """A job of another state with the same number may be one that the site has approved."""
    with asking(settings):
        server.joins.get(timeout=SECONDS)
        server.train(server.command(nn.Linear(2, 2), job=pb.JobSpec(mode="federated", job_id=7)))
        assert report(server, failed=True).unapproved_jobs == [7]
        server.stop()
        while not server.reports.empty():
            server.reports.get()
        vars(server).update(state)
        server.start()
        assert report(server, failed=False).unapproved_jobs == jobs


@contextmanager
def asking_with_code_of_its_own(
    server: "ScriptedServer", settings: dict[str, Any], code: Path
) -> Iterator[pb.TrainCmd]:
    """Run such a client that trusts a module, and whose site has approved job 7; yield a command of it."""
    code.write_text("VALUE = 1\n")
    command, trusted = server.command(nn.Linear(2, 2), job=pb.JobSpec(mode="federated", job_id=7)), [code.stem]
    Consent(Approval.model_validate({"mode": "cards"}), settings["state_dir"], trusted, {}).refusal(command)
    decide(settings["state_dir"], approved=True)
    with asking({**settings, "trusted": trusted}):
        server.joins.get(timeout=SECONDS)
        yield command


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where to write a module that can be imported."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "site_module.py"


def test_a_job_waits_for_a_client_whose_installed_code_has_changed(
    server: "ScriptedServer", settings: dict[str, Any], code: Path
) -> None:
    """It refuses all rounds until it is started again, so the server must not ask it for them one after the other."""
    with asking_with_code_of_its_own(server, settings, code) as command:
        code.write_text("VALUE = 2\n")
        server.train(command)
        told = report(server, failed=True)
        assert (told.failure.reason, list(told.unapproved_jobs)) == ("not_approved", [7])
        assert report(server, failed=False).unapproved_jobs == [7]


def test_a_job_waits_no_longer_once_the_changed_code_is_put_back(
    server: "ScriptedServer", settings: dict[str, Any], code: Path
) -> None:
    """As by an installer that replaces files by the same ones: the client refuses no other job then."""
    with asking_with_code_of_its_own(server, settings, code) as command:
        code.unlink()
        server.train(command)
        assert report(server, failed=True).unapproved_jobs == [7]
        code.write_text("VALUE = 1\n")
        deadline = time.monotonic() + SECONDS
        while report(server, failed=False).unapproved_jobs:  # one may be on its way
            assert time.monotonic() < deadline


@pytest.mark.parametrize("begun", [False, True], ids=["before it is sent", "between two tries"])
def test_no_update_leaves_after_the_approval_was_revoked(
    server: "ScriptedServer", settings: dict[str, Any], begun: bool
) -> None:
    model, table, state_dir = nn.Linear(1000, 1000), {"mode": "cards"}, settings["state_dir"]
    command = server.command(model, job=pb.JobSpec(mode="federated", job_id=7))
    Consent(Approval.model_validate(table), state_dir, ["fedring"], {}).refusal(command)
    decide(state_dir, approved=True)

    def revoke(received: int) -> Unavailable:
        decide(state_dir, approved=False)
        return Unavailable("try again")

    with connect(**settings, approval=table) as federation:
        server.joins.get(timeout=SECONDS)
        server.train(command)
        task = next(federation)
        task.load_into(model)
        if begun:
            server.on_bytes = revoke
        else:
            revoke(0)
        with pytest.raises(RoundOver, match="not_approved"):
            task.submit(model, samples=1)
        told = report(server, failed=True)
        assert (told.failure.reason, list(told.unapproved_jobs)) == ("not_approved", [7])
    assert server.accepted.empty()
    assert server.offers.empty() != begun  # an offer tells figures of the training
    assert [len(received) > 0 for received in server._partial.values()] == [True] * begun


@pytest.mark.parametrize("size", [1000, 10], ids=["large", "small"])
def test_nothing_of_an_update_leaves_if_the_approval_is_revoked_while_it_waits_for_the_server(
    server: "ScriptedServer", settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    model, table, state_dir = nn.Linear(size, size), {"mode": "cards"}, settings["state_dir"]
    command = server.command(model, job=pb.JobSpec(mode="federated", job_id=7))
    Consent(Approval.model_validate(table), state_dir, ["fedring"], {}).refusal(command)
    decide(state_dir, approved=True)
    wait = Tries.wait

    async def revoke(self: Tries, **options: Any) -> None:
        if self._policy is POLICY:  # the first try of the upload has failed
            monkeypatch.setattr(Tries, "wait", wait)
            decide(state_dir, approved=False)
            server.start()
        await wait(self, **options)

    with connect(**settings, approval=table) as federation:
        server.joins.get(timeout=SECONDS)
        server.train(command)
        task = next(federation)
        task.load_into(model)
        server.stop()
        monkeypatch.setattr(Tries, "wait", revoke)
        with pytest.raises(RoundOver, match="not_approved"):
            task.submit(model, samples=1, metrics={"loss": 0.5})
        server.joins.get(timeout=SECONDS)
    assert server.offers.empty()


@pytest.mark.parametrize("revoked", [False, True])
def test_no_counts_leave_if_the_approval_is_revoked_during_the_evaluation(
    server: "ScriptedServer", settings: dict[str, Any], revoked: bool
) -> None:
    table, state_dir, job = {"mode": "cards"}, settings["state_dir"], pb.JobSpec(mode="federated", job_id=7)
    model = nn.Linear(2, 2)
    command = server.command(model, job=job)
    Consent(Approval.model_validate(table), state_dir, ["fedring"], {}).refusal(command)
    decide(state_dir, approved=True)

    def evaluate(model: nn.Module) -> tuple[int, int, float]:
        decide(state_dir, approved=not revoked)
        return 3, 4, 0.5

    with connect(**settings, approval=table, model=model, evaluate=evaluate) as federation:
        thread = threading.Thread(target=lambda: list(federation))
        thread.start()
        server.joins.get(timeout=SECONDS)
        server.send(pb.ServerEvent(evaluate=server.evaluation(1, job=job)))
        told = server.evaluations.get(timeout=SECONDS)
        federation.close()
        thread.join()
    assert (told.correct, told.total) == ((0, 0) if revoked else (3, 4))
    assert ("has approved no card" in told.failure) == revoked
