"""Signed jobs with real daemons, and a server in an attacker's hands: whatever it changes, the sites refuse it."""

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from fedring.client.consent.audit import FOLDER
from fedring.control.calls import Events
from fedring.control.failure import Failure
from fedring.control.signing import sign_job
from fedring.daemon.chain import read_chain
from fedring.v1 import control_pb2
from fedring.v1 import federation_pb2 as pb
from tests.call_proxy import CallProxy
from tests.fleets import Control, Fleet, run_job, until_watching
from tests.pki import Pki, flctl

JOB: dict[str, Any] = {
    "model": "fedring.train.models:digits_mlp",
    "data": "fedring.data:digits",
    "start": "fresh",
    "rounds": 1,
    "min_clients": 2,
    "min_clients_to_aggregate": 2,
    "max_abandoned": 1,
    "batch_size": 256,
}
LABELS = {"site": "north"}
NAMES = ("client-0", "client-1")

Change = Callable[[pb.ServerEvent], object]


class Taken(Fleet):
    """A fleet whose server is in the hands of somebody else, who changes what it tells the clients."""

    change: Change = staticmethod(lambda event: None)
    proxy: CallProxy | None = None

    def start(self) -> None:
        (self.directory / "logs").mkdir(parents=True, exist_ok=True)
        (self.directory / "state").mkdir(parents=True, exist_ok=True)
        self.start_server()
        # Calls to a Unix socket are in plaintext also with tls.ca, as behind a proxy that has the server's key.
        address = f"unix:{self.directory}/wire"
        self.proxy = CallProxy(self.listen, change=self._changed, address=address)
        for client in self.clients:
            client.settings["server"] = address
            client.start()

    def stop(self) -> None:
        super().stop()
        if self.proxy is not None:
            self.proxy.__exit__(None, None, None)

    def _changed(self, method: str, message: bytes) -> bytes:
        if method != "Watch":
            return message
        event = pb.ServerEvent.FromString(message)
        self.change(event)
        return event.SerializeToString()


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    made = Pki(tmp_path_factory.mktemp("pki"))
    for name in ("ann", "eve"):
        flctl("certs", "issue", made.folder, name, "--role", "operator")
    flctl("certs", "revoke", made.folder, "server")  # which makes the list
    return made


@pytest.fixture(scope="module")
def fleet(pki: Pki, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Taken]:
    site = {
        "labels": LABELS,
        "tls": {"ca": str(pki.folder / "ca.crt"), "crl": str(pki.folder / "ca.crl")},
        "approval": {"allowed_operators": ["ann", "eve"]},
        "audit": {"chain": True},
    }
    server = {"trusted": ["fedring", "strategies"], "idle_heartbeat_seconds": 0.3}
    code = tmp_path_factory.mktemp("code")
    (code / "strategies.py").write_text(
        "from fedring.offers import offers\n"
        "@offers('rule')\n"
        "class Warm:\n"
        "    def configure(self, history):\n"
        "        return {'lr': 0.02 * (len(history) + 1)}\n"
    )
    with Taken(tmp_path_factory.mktemp("taken"), server, [site, site], code=[code]) as started:
        with Control(started.control) as control:
            until_watching(control, 2)
        yield started


@pytest.fixture
def operator(fleet: Taken, pki: Pki) -> Iterator[Control]:
    fleet.change = lambda event: None
    with Control(fleet.control) as control:
        control.tls = pki.tls("ann")
        yield control


def run_signed(control: Control, job: Mapping[str, Any]) -> control_pb2.Job:
    """Run a signed job, and return it when it has ended."""
    events = control.events()
    job_id = control.start_signed(sign_job(control, job)).job_id
    list(control.follow_job(job_id, events))
    return control.job(job_id)


def noted(fleet: Taken, since: Mapping[str, int]) -> list[Mapping[str, Any]]:
    """Return what both sites have noted after these lines of their logs."""
    lines = [(name, line) for name in NAMES for line in read_chain(audit(fleet, name))]
    return [line.facts for name, line in lines if line.number > since[name]]


def refusals(fleet: Taken, since: Mapping[str, int]) -> set[str]:
    """Return for what reasons the sites have refused, which have done nothing else.

    A round may end with the first refusal, before the other site has looked at it.
    """
    lines = noted(fleet, since)
    assert not [facts for facts in lines if facts["what"] in ("trains", "sends", "evaluates")]
    return {str(facts["reason"]) for facts in lines if facts["what"] == "refuses"}


def audit(fleet: Taken, name: str = NAMES[0]) -> Path:
    return fleet.directory / "state" / name / FOLDER


def newest(fleet: Taken) -> dict[str, int]:
    return {name: read_chain(audit(fleet, name))[-1].number for name in NAMES}


KINDS: dict[str, dict[str, Any]] = {
    "schedule": {"rounds": 2, "lr": {"schedule": "linear", "start": 0.1, "end": 0.05}},
    "overrides": {"override": [{"where": LABELS, "epochs": 2}]},
    "strategy": {"rounds": 2, "lr": 0.05, "aggregation": {"rule": "strategies:Warm"}, "bounds": {"lr": [0.01, 0.1]}},
    "scaffold": {"scaffold": True, "momentum": 0.0, "weights": "uniform", "evaluate": False},
    "asynchronous": {
        "rounds": 6,
        "asynchronous": {"concurrency": 2, "buffer": 1},
        "min_clients_to_aggregate": 1,
        "weights": "uniform",
        "evaluate": False,
    },
    "data_parallel": {"mode": "data_parallel", "subset_size": 512},
    "pipeline": {"mode": "pipeline", "subset_size": 512, "pipeline": {"stages": 2}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_jobs_of_all_modes_run_at_sites_that_check_signatures(fleet: Taken, operator: Control, kind: str) -> None:
    before = newest(fleet)
    ended = run_signed(operator, JOB | KINDS[kind])
    assert (ended.state, ended.reason) == ("completed", "")
    trained = [facts["operator"] for facts in noted(fleet, before) if facts["what"] == "trains"]
    assert set(trained) == {"ann"}
    if kind != "asynchronous":  # in which the two are asked for as many rounds as it has, together
        assert len(trained) == 2 * int((JOB | KINDS[kind])["rounds"])


def test_a_job_that_nobody_has_signed_starts_nothing(fleet: Taken, operator: Control) -> None:
    before = newest(fleet)
    ended = run_job(operator, JOB)
    assert ended.state == "failed"
    assert "flctl run --sign" in ended.reason
    assert refusals(fleet, before) == {"not_signed"}


def in_training(**fields: Any) -> Change:
    def change(event: pb.ServerEvent) -> None:
        if event.HasField("train"):
            for key, value in fields.items():
                setattr(event.train, key, value)

    return change


def in_job(**fields: Any) -> Change:
    def change(event: pb.ServerEvent) -> None:
        if event.HasField("train"):
            for key, value in fields.items():
                setattr(event.train.job, key, value)

    return change


def in_text(text: bytes) -> Change:
    return lambda event: setattr(event.train.job.signed, "text", text)


ATTACKS: dict[str, tuple[str, Change, str]] = {
    "another learning rate": ("schedule", in_training(lr=0.09), "changed_command"),
    "a strategy beyond its bounds": ("strategy", in_training(lr=0.11), "changed_command"),
    "a setting without bounds": ("strategy", in_training(batch_size=1), "changed_command"),
    "the override of other sites": ("overrides", in_training(epochs=1), "changed_command"),
    "other samples": ("schedule", in_training(seed=77), "changed_command"),
    "a round beyond the last": ("schedule", in_training(job_round=3), "too_many_rounds"),
    "more rounds": ("schedule", in_job(rounds=1000), "changed_job"),
    "other data": ("schedule", in_job(data="fedring.data:mnist"), "changed_job"),
    "another trainer": ("schedule", in_job(trainer="site:train"), "changed_job"),
    "no correction": ("scaffold", lambda event: event.train.ClearField("control"), "changed_command"),
    "no signature": ("schedule", lambda event: event.train.job.ClearField("signed"), "not_signed"),
    "a signature of another text": ("schedule", in_text(b"{}"), "bad_signature"),
    "a group's batches": ("data_parallel", in_training(batch_size=1), "changed_command"),
    "a pipeline's loss": ("pipeline", in_job(loss="fedring.train.losses:other"), "changed_job"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_server_in_other_hands_changes_nothing(fleet: Taken, operator: Control, attack: str) -> None:
    kind, change, reason = ATTACKS[attack]
    before, job = newest(fleet), JOB | KINDS[kind]

    def attacked(event: pb.ServerEvent) -> None:
        if event.HasField("train"):
            change(event)

    fleet.change = attacked
    ended = run_signed(operator, job)
    assert ended.state == "failed"
    assert refusals(fleet, before) == {reason}


def test_a_signed_job_cannot_be_started_again(fleet: Taken, operator: Control) -> None:
    paper = sign_job(operator, JOB)
    for state in ("completed", "failed"):
        before, events = newest(fleet), operator.events()
        job_id = operator.start_signed(paper).job_id
        list(operator.follow_job(job_id, events))
        assert operator.job(job_id).state == state
    assert refusals(fleet, before) == {"replayed"}


def test_a_job_starts_from_the_signed_model_only(fleet: Taken, operator: Control) -> None:
    assert run_signed(operator, JOB).state == "completed"
    trained, fresh, *_ = operator.models()
    ended = run_signed(operator, JOB | {"start": str(trained.version)})
    assert ended.state == "completed"

    def swapped(event: pb.ServerEvent) -> None:
        if event.HasField("train"):
            event.train.ClearField("model")
            event.train.model_digest = fresh.digest if event.train.model_digest == trained.digest else trained.digest

    fleet.change = swapped
    before = newest(fleet)
    ended = run_signed(operator, JOB | {"start": str(trained.version)})
    assert refusals(fleet, before) == {"other_start"}
    ended = run_signed(operator, JOB)  # a model that follows from the job's seed
    assert ended.state == "failed"
    assert "was signed to start fresh" in ended.reason


def test_a_signed_job_goes_on_after_kills_of_both_sides(fleet: Taken, operator: Control) -> None:
    events = operator.events()
    job_id = operator.start_signed(sign_job(operator, JOB | {"rounds": 1_000_000})).job_id
    until_round(events, 2)
    fleet.restart_server()
    with Control(fleet.control) as control:
        events = control.events()
        until_round(events, 4)
        fleet.restart(0)
        until_round(events, control.job(job_id).rounds_done + 3)
        control.stop_job(job_id)
        assert control.job(job_id).rounds_done > 4


def until_round(events: Events, number: int) -> None:
    """Read events until a round has published its model, or a later one has."""
    for event in events:
        if event.kind == "round_published" and event.state.job_round >= number:
            return


def test_what_cannot_be_signed_is_told(operator: Control, pki: Pki) -> None:
    for keys, says in (
        ({"start": "newest"}, "left to the server"),
        ({"start": "9999"}, "no such version"),
        ({"lr": -1}, "lr"),
    ):
        with pytest.raises(Failure, match=says):
            sign_job(operator, JOB | keys)
    operator.tls = pki.tls("server")
    with pytest.raises(Failure, match="no operator's certificate"):
        sign_job(operator, JOB)


def test_a_revoked_operator_is_out_in_mid_job(fleet: Taken, operator: Control, pki: Pki) -> None:
    operator.tls = pki.tls("eve")
    lock = threading.Lock()
    told: list[int] = []

    def revoked(event: pb.ServerEvent) -> None:
        if event.HasField("train") and event.train.job_round == 2:
            with lock:  # neither site is asked before
                if not told:
                    flctl("certs", "revoke", pki.folder, "eve")
                told.append(event.train.round)

    fleet.change = revoked
    before = newest(fleet)
    ended = run_signed(operator, JOB | {"rounds": 3})
    assert (ended.state, ended.rounds_done) == ("failed", 1)
    lines = noted(fleet, before)
    assert {facts.get("reason") for facts in lines if facts["what"] == "refuses"} == {"revoked_operator"}
    assert sum(facts["what"] == "trains" for facts in lines) == 2
