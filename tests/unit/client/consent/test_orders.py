"""Signed jobs at a site: the server's own commands pass, and whatever is changed in them is refused, field by field."""

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tests.pki import Pki, flctl

from fedring.client.config import ClientConfig
from fedring.client.consent.approval import Approval
from fedring.client.consent.cards import Cards, Decision
from fedring.client.consent.consent import Consent
from fedring.client.consent.operators import Operators
from fedring.client.consent.orders import FILE, Orders
from fedring.control.signing import signed_by
from fedring.daemon.config import ConfigError
from fedring.daemon.durable import replace_with_digest, text_after_digest
from fedring.rpc.identity import Role
from fedring.rpc.tls import Tls
from fedring.server.aggregation.strategy import with_settings
from fedring.server.round.plan import round_command
from fedring.server.state.rows import ModelRow, RoundRow
from fedring.train.jobs.job import Job
from fedring.train.jobs.override_table import overrides_for, with_overrides
from fedring.train.orders.commands import client_command
from fedring.train.orders.signed_job import MAX_TEXT_BYTES, BadOrder, JobOrder, order_of
from fedring.train.orders.sums import secure_settings
from fedring.v1 import federation_pb2 as pb

RUN = "run-1"
LABELS = {"gpu": "yes"}
START = "blake3-" + "5" * 64
OTHER = "blake3-" + "6" * 64


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    made = Pki(tmp_path_factory.mktemp("pki"))
    flctl("certs", "issue", made.folder, "ann", "--role", "operator")
    made.issue("client-0")
    return made


def job_of(**keys: Any) -> Job:
    return Job.model_validate({"start": "fresh", "rounds": 3, **keys})


def command_of(
    job: Job, signed: pb.SignedJob, *, job_round: int = 1, settings: dict[str, float] | None = None
) -> pb.TrainCmd:
    """Return the command that fl-server makes of a job, for a client with LABELS."""
    stored = Job.model_validate(json.loads(json.dumps(job.model_dump(mode="json"), sort_keys=True)))
    configured = with_settings(stored, settings or {})
    row = RoundRow(6 + job_round, 4, job_round, "training", 0.0, base_version=2)
    base = ModelRow(2, 0, START, "", "00" * 32, 10, 40, 0.0)
    made = round_command(configured, row, base, run_id=RUN, epoch=1, most_bytes=0)
    if job.secure_aggregation is not None:  # as its transform does
        made.encoding.name = "masked"
        made.secure.CopyFrom(secure_settings(job))
    made.job.signed.CopyFrom(signed)
    return client_command(made, with_overrides(configured, overrides_for(LABELS, job.override)))


def signed(pki: Pki, job: Job, *, by: str = "ann", now: float = 0.0, run_id: str = RUN) -> pb.SignedJob:
    return signed_by(order_of(job, run_id, now or time.time()), pki.tls(by))


def orders(pki: Pki, folder: Path, *allowed: str, crl: bool = False) -> Orders:
    tls = Tls(ca=pki.folder / "ca.crt", crl=pki.folder / "ca.crl" if crl else None)
    return Orders(Operators(allowed or ("ann",), tls), LABELS, folder)


def reason(call: Callable[[], object]) -> str:
    with pytest.raises(BadOrder) as refused:
        call()
    assert len(str(refused.value)) < 900
    return refused.value.reason


def test_the_authority_of_operators_can_be_replaced_while_the_client_runs(pki: Pki, tmp_path: Path) -> None:
    other, ca = Pki(tmp_path / "other"), tmp_path / "ca.crt"
    other.issue("ann", role=Role.OPERATOR)
    old, new = ((each.folder / "ca.crt").read_bytes() for each in (pki, other))
    ca.write_bytes(old)
    site, job = Orders(Operators(["ann"], Tls(ca=ca)), LABELS, tmp_path / "state"), job_of()
    first, second = (command_of(job, signed(each, job)) for each in (pki, other))
    assert site.permit(first).operator == "ann"
    assert reason(lambda: site.permit(second)) == "unknown_operator"
    ca.write_bytes(old + new)
    assert [site.permit(each).operator for each in (first, second)] == ["ann", "ann"]
    ca.write_bytes(new)
    assert reason(lambda: site.permit(first)) == "unknown_operator"
    ca.write_bytes(new[: len(new) // 2])  # it is being written
    assert site.permit(second).operator == "ann"


SCHEDULED = {"lr": {"schedule": "cosine", "start": 0.1, "end": 0.01}, "epochs": 2}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "schedule": SCHEDULED,
    "overrides": {**SCHEDULED, "override": [{"where": LABELS, "epochs": 5}, {"where": {"gpu": "no"}, "epochs": 7}]},
    "strategy": {"aggregation": {"rule": "site:Rule"}, "bounds": {"lr": [0.01, 0.1]}},
    "scaffold": {"scaffold": True, "momentum": 0.0, "weights": "uniform"},
    "secure": {"secure_aggregation": {}, "evaluate": False, "min_clients": 3, "min_clients_to_aggregate": 3, "seed": 3},
    "personal": {"personal": {"method": "ditto"}, "model_args": {"b": 1.0, "a": [2]}},
    "data_parallel": {"mode": "data_parallel", "data_parallel": {"hook": "none"}},
    "pipeline": {"mode": "pipeline", "pipeline": {"stages": 2}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_command_of_an_honest_server_passes(pki: Pki, tmp_path: Path, kind: str) -> None:
    job = job_of(**KINDS[kind])
    site, paper = orders(pki, tmp_path), signed(pki, job)
    for job_round in (1, 2, 3):
        command = command_of(job, paper, job_round=job_round)
        if kind == "scaffold":
            command.control.line = "1.7"
        permit = site.permit(command)
        assert (permit.operator, permit.starts_fresh) == ("ann", job_round == 1)
        site.follow(permit)
        site.follow(site.permit(command))  # it is sent again
    assert permit.followed.rounds == 3


def _other(message: Any, field: Any) -> None:
    """Give a field another value of its type."""
    name = field.name
    if field.is_repeated:
        getattr(message, name).append("other")
    elif field.message_type is not None:
        found = getattr(message, name)
        if found.ByteSize():
            message.ClearField(name)
        else:
            found.SetInParent()
            _other(found, found.DESCRIPTOR.fields[0])
    elif field.cpp_type == field.CPPTYPE_STRING:
        setattr(message, name, b"other" if field.type == field.TYPE_BYTES else getattr(message, name) + "x")
    elif field.cpp_type == field.CPPTYPE_BOOL:
        setattr(message, name, not getattr(message, name))
    else:
        setattr(message, name, getattr(message, name) + 1)


LEFT_TO_THE_SERVER = {
    "round": "counts rounds; a lower one, or one more than was signed, is refused",
    "epoch": "as round",
    "model_version": "for people: model_digest names the model",
    "model_digest": "the first one is compared, if it is known; the others are made of what clients have sent",
    "schema_hash": "of the model; it stays the same in a job",
    "residual_after": "stays the same in a job",
    "residual_after_epoch": "as residual_after",
    "deadline_seconds": "how long the server waits",
    "max_update_bytes": "above it, the server refuses the update",
    "model": "has the digest model_digest",
    "traceparent": "for traces",
    "job.job_id": "the job of the first command",
    "job.frozen_digest": "of tensors that the client has; it stays the same in a job",
}
"""The fields of a first command that a signed job says nothing of."""


@pytest.mark.parametrize("kind", ["plain", "overrides", "secure", "data_parallel", "pipeline"])
def test_no_field_of_a_command_can_be_changed(pki: Pki, tmp_path: Path, kind: str) -> None:
    job = job_of(**KINDS[kind])
    paper = signed(pki, job)
    passed = set()
    for prefix, kind_of in (("", pb.TrainCmd), ("job.", pb.JobSpec)):
        for field in kind_of.DESCRIPTOR.fields:
            if prefix + field.name == "job":
                continue
            command = command_of(job, paper)
            _other(command.job if prefix else command, field)
            try:
                orders(pki, tmp_path).permit(command)
                passed.add(prefix + field.name)
            except BadOrder:
                pass
    assert passed == LEFT_TO_THE_SERVER.keys() - ({"job.frozen_digest"} if job.training.grouped else set())


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("lr", 0.5, "changed_command"),
        ("lr", float("nan"), "changed_command"),
        ("epochs", 3, "changed_command"),  # signed for clients with other labels, or for all
        ("epochs", 7, "changed_command"),
        ("seed", 9, "changed_command"),
        ("subset_size", 1, "changed_command"),  # a single sample
        ("clip_norm", 1e-9, "changed_command"),
        ("precision", "bf16", "changed_command"),
        ("job_round", 0, "too_many_rounds"),
        ("job_round", 4, "too_many_rounds"),
        ("run_id", "run-2", "other_server"),
    ],
)
def test_a_changed_round_is_refused(pki: Pki, tmp_path: Path, field: str, value: Any, told: str) -> None:
    job = job_of(**KINDS["overrides"])
    command = command_of(job, signed(pki, job))
    setattr(command, field, value)
    assert reason(lambda: orders(pki, tmp_path).permit(command)) == told


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("data", "site:others"),
        ("loss", "site:leaks"),
        ("trainer", "site:train"),
        ("evaluator", "site:look"),
        ("model_args", '{"hidden": 3}'),
        ("optimizer_args", '{"nesterov": true}'),
        ("min_results", 1000),
        ("rounds", 1000),
        ("dp", '{"noise_multiplier":9.0,"clip":1.0}'),
        ("secure_aggregation", "{}"),
        ("transforms", '[{"name": "feddyn", "args": {}}]'),
        ("mode", "data_parallel"),
    ],
)
def test_a_changed_job_is_refused(pki: Pki, tmp_path: Path, field: str, value: Any) -> None:
    job = job_of()
    command = command_of(job, signed(pki, job))
    setattr(command.job, field, value)
    assert reason(lambda: orders(pki, tmp_path).permit(command)) == "changed_job"


def test_masks_and_noise_are_those_that_were_signed(pki: Pki, tmp_path: Path) -> None:
    job = job_of(**KINDS["secure"])
    paper = signed(pki, job)
    for key in ("block", "levels", "max_weight"):
        command = command_of(job, paper)
        setattr(command.secure, key, 1)
        assert reason(partial(orders(pki, tmp_path).permit, command)) == "changed_command"
    bare = command_of(job, paper)
    bare.ClearField("secure")  # the server wants to see the update
    bare.encoding.name = "fp32"
    assert reason(lambda: orders(pki, tmp_path).permit(bare)) == "changed_command"


def test_a_strategy_moves_within_its_bounds_only(pki: Pki, tmp_path: Path) -> None:
    job = job_of(**KINDS["strategy"])
    paper = signed(pki, job)
    orders(pki, tmp_path).permit(command_of(job, paper, settings={"lr": 0.02}))
    with pytest.raises(ValidationError, match=r"outside of bounds\.lr"):  # an honest server fails before the sites
        command_of(job, paper, settings={"lr": 0.2})
    wide = job.model_copy(update={"bounds": job.bounds.model_copy(update={"lr": [0.0, 9.0]})})
    for settings in ({"lr": 0.2}, {"epochs": 2.0}, {"batch_size": 1.0}, {"momentum": 0.1}):
        command = command_of(wide, paper, settings=settings)
        assert reason(partial(orders(pki, tmp_path).permit, command)) == "changed_command"


def test_bounds_are_for_strategies_and_have_an_order() -> None:
    for keys in ({"bounds": {"lr": [0.01, 0.1]}}, {**KINDS["strategy"], "bounds": {"lr": [0.1, 0.01]}}):
        with pytest.raises(ValidationError, match="bounds"):
            job_of(**keys)


def test_another_start_model_is_refused(pki: Pki, tmp_path: Path) -> None:
    job = job_of(start="2", bounds={"start_model": START})
    paper = signed(pki, job)
    command = command_of(job, paper)
    assert not orders(pki, tmp_path).permit(command).starts_fresh
    command.model_digest = OTHER
    assert reason(lambda: orders(pki, tmp_path).permit(command)) == "other_start"


def test_a_job_runs_once(pki: Pki, tmp_path: Path) -> None:
    job = job_of(bounds={"repeats": 1})
    paper = signed(pki, job)
    site = orders(pki, tmp_path)
    for number in (1, 2, 3):
        site.follow(site.permit(command_of(job, paper, job_round=number)))
    site = orders(pki, tmp_path)  # fl-client was restarted
    again = command_of(job, paper, job_round=1)
    again.job.job_id = 5
    again.round = 20
    assert reason(lambda: site.permit(again)) == "replayed"
    again.job.job_id = 4
    site.follow(site.permit(again))  # as after a restore
    again.round = 21
    assert reason(lambda: site.permit(again)) == "too_many_rounds"
    again.round = 8
    assert reason(lambda: site.permit(again)) == "replayed"
    again.round, again.model_digest = 20, OTHER  # the same round, from another model
    assert reason(lambda: site.permit(again)) == "replayed"


def test_a_restored_server_may_begin_a_job_again(pki: Pki, tmp_path: Path) -> None:
    """It was restored to a time before the job's first round had ended, or before the job had begun."""
    job = job_of(evaluate=True)
    paper, site = signed(pki, job), orders(pki, tmp_path)
    first = command_of(job, paper)
    site.follow(site.permit(first))
    site.follow(site.permit_evaluation(evaluation(job, paper)))
    first.round += 1
    assert reason(lambda: site.permit(first)) == "replayed"  # in the same epoch
    first.epoch, first.residual_after_epoch, first.residual_after = 2, 2, 6
    second = command_of(job, paper, job_round=2)
    second.epoch, second.residual_after_epoch, second.residual_after = 2, 2, 6
    permit = site.permit(first)
    assert permit.starts_fresh  # so its first model is compared with its seed once more
    site.follow(permit)
    second.round = first.round + 1
    site.follow(site.permit(second))
    assert orders(pki, tmp_path).permit(second).followed.rounds == 3
    second.round, second.residual_after = second.round + 1, 3
    assert reason(lambda: site.permit(second)) == "changed_command"


@pytest.mark.parametrize("before", ["trains", "evaluates"])
@pytest.mark.parametrize("again", ["trains", "evaluates"])
def test_a_site_that_is_not_drawn_for_the_first_round_follows_a_job_that_begins_again(
    pki: Pki, tmp_path: Path, before: str, again: str
) -> None:
    job = job_of(evaluate=True)
    paper, site = signed(pki, job), orders(pki, tmp_path)
    first, seen = command_of(job, paper), evaluation(job, paper)
    site.follow(site.permit(first) if before == "trains" else site.permit_evaluation(seen))
    later, model = command_of(job, paper, job_round=2), evaluation(job, paper, digest=START)
    later.epoch = later.residual_after_epoch = model.residual_after_epoch = 2
    later.residual_after = model.residual_after = 6
    site.follow(site.permit(later) if again == "trains" else site.permit_evaluation(model))
    site.follow(site.permit(later))
    site.follow(site.permit_evaluation(model))
    for number in (3, 7):  # in the same epoch, no other line of models begins
        later.residual_after = model.residual_after = number
        assert reason(lambda: site.permit(later)) == "changed_command"
        assert reason(lambda: site.permit_evaluation(model)) == "changed_command"


def test_a_job_that_begins_again_may_continue_an_older_line_of_models(pki: Pki, tmp_path: Path) -> None:
    """The version that it had started from was lost with the restore, or another job has taken its line."""
    job = job_of(evaluate=True)
    paper, site = signed(pki, job), orders(pki, tmp_path)
    first = command_of(job, paper)
    first.residual_after_epoch, first.residual_after = 1, 5
    site.follow(site.permit(first))
    later, model = command_of(job, paper, job_round=2), evaluation(job, paper, digest=START)
    later.residual_after = model.residual_after = 3
    assert reason(lambda: site.permit(later)) == "changed_command"  # in the same epoch
    later.epoch = 2
    site.follow(site.permit(later))  # the site was not drawn for the first round
    site.follow(site.permit_evaluation(model))
    later.round += 1
    for epoch, number in ((0, 5), (1, 5), (2, 6)):
        later.residual_after_epoch, later.residual_after = epoch, number
        assert reason(lambda: site.permit(later)) == "changed_command"


def test_a_site_that_only_evaluates_follows_a_job_that_begins_again_on_an_older_line(pki: Pki, tmp_path: Path) -> None:
    job = job_of(evaluate=True)
    paper, site = signed(pki, job), orders(pki, tmp_path)
    model, second = evaluation(job, paper), command_of(job, paper, job_round=2)
    model.epoch, model.residual_after_epoch, model.residual_after = 1, 1, 5
    site.follow(site.permit_evaluation(model))
    model.residual_after_epoch, model.residual_after = 0, 3
    assert reason(lambda: site.permit_evaluation(model)) == "changed_command"  # in the same epoch
    model.epoch = second.epoch = 2
    site.follow(site.permit_evaluation(model))
    assert reason(lambda: orders(pki, tmp_path).permit(second)) == "changed_command"
    model.epoch = 1
    assert reason(lambda: site.permit_evaluation(model)) == "replayed"
    older = text_after_digest((tmp_path / FILE).read_bytes()).replace(b'"epoch": 2, ', b"")
    replace_with_digest(tmp_path / FILE, older)  # as a client writes it that knows no epoch of evaluations
    assert orders(pki, tmp_path).permit_evaluation(model).followed.epoch == 1


def test_a_site_that_has_only_evaluated_takes_part_in_the_first_round_of_a_restored_server(
    pki: Pki, tmp_path: Path
) -> None:
    job = job_of(evaluate=True)
    paper, site = signed(pki, job), orders(pki, tmp_path)
    first, seen = command_of(job, paper), evaluation(job, paper)
    for seen.epoch, first.epoch in ((0, 0), (3, 3)):  # an older server does not say it in an evaluation
        site.follow(site.permit_evaluation(seen))
        assert reason(lambda: site.permit(first)) == "replayed"
        first.epoch += 1
        assert site.permit(first).starts_fresh


@pytest.mark.parametrize("field", ["schema_hash", "residual_after", "frozen_digest"])
def test_what_stays_the_same_in_a_job_cannot_change(pki: Pki, tmp_path: Path, field: str) -> None:
    job = job_of()
    paper = signed(pki, job)
    site = orders(pki, tmp_path)
    site.follow(site.permit(command_of(job, paper)))
    command = command_of(job, paper, job_round=2)
    target: Any = command.job if field == "frozen_digest" else command
    setattr(target, field, {"schema_hash": b"1" * 32, "residual_after": 3}.get(field, OTHER))
    assert reason(lambda: site.permit(command)) == "changed_command"


def evaluation(job: Job, paper: pb.SignedJob, number: int = 7, digest: str = OTHER) -> pb.EvaluateCmd:
    made = command_of(job, paper)
    return pb.EvaluateCmd(job=made.job, round=number, run_id=RUN, model_digest=digest, schema_hash=made.schema_hash)


def test_a_server_cannot_fill_the_memory_of_signed_jobs(pki: Pki, tmp_path: Path) -> None:
    site, job, long = orders(pki, tmp_path), job_of(evaluate=True), "x" * 1_000_000
    paper = signed(pki, job)
    command = command_of(job, paper)
    command.schema_hash = long.encode()
    site.follow(site.permit(command))
    asked = evaluation(job, paper, digest=long)
    asked.schema_hash, asked.residual_after_epoch = command.schema_hash, command.residual_after_epoch
    asked.residual_after = command.residual_after
    site.follow(site.permit_evaluation(asked))
    assert (tmp_path / FILE).stat().st_size < 2000
    assert orders(pki, tmp_path).permit(command).followed.rounds == 1
    asked.schema_hash += b"x"
    assert reason(lambda: site.permit_evaluation(asked)) == "changed_command"


def test_models_are_evaluated_as_often_as_the_job_has_rounds(pki: Pki, tmp_path: Path) -> None:
    job = job_of(rounds=1, bounds={"repeats": 0})
    paper, site = signed(pki, job), orders(pki, tmp_path)
    site.follow(site.permit_evaluation(evaluation(job, paper)))
    site.follow(site.permit_evaluation(evaluation(job, paper)))
    assert reason(lambda: site.permit_evaluation(evaluation(job, paper, digest=START))) == "too_many_rounds"
    assert reason(lambda: site.permit_evaluation(evaluation(job, paper, 8))) == "too_many_rounds"
    first = command_of(job, paper)
    first.epoch = 0  # no restore has begun another one
    assert reason(lambda: site.permit(first)) == "replayed"  # its first model comes before
    changed = evaluation(job, paper)
    changed.job.evaluator = "site:look"
    assert reason(lambda: site.permit_evaluation(changed)) == "changed_job"
    quiet = job_of(evaluate=False)
    assert reason(lambda: site.permit_evaluation(evaluation(quiet, signed(pki, quiet)))) == "changed_command"


def test_only_an_allowed_operator_signs(pki: Pki, tmp_path: Path) -> None:
    job, site = job_of(), orders(pki, tmp_path)
    command = command_of(job, signed(pki, job))
    command.job.ClearField("signed")
    assert reason(lambda: site.permit(command)) == "not_signed"
    other = command_of(job, signed(pki, job, by="operator"))
    assert reason(lambda: site.permit(other)) == "unknown_operator"
    assert orders(pki, tmp_path, "ann", "operator").permit(other).operator == "operator"
    for name in ("client-0", "server"):  # the server's own key signs nothing
        with pytest.raises(ConfigError, match="no operator"):
            signed(pki, job, by=name)


def test_a_forged_signature_is_refused(pki: Pki, tmp_path: Path) -> None:
    job, site = job_of(), orders(pki, tmp_path)
    paper = signed(pki, job)
    longer = command_of(job, paper)
    longer.job.signed.text = paper.text.replace(b'"rounds":3', b'"rounds":9')
    longer.job.rounds = 9
    assert reason(lambda: site.permit(longer)) == "bad_signature"
    bare = command_of(job, paper)
    del bare.job.signed.certificates[:]
    assert reason(lambda: site.permit(bare)) == "bad_signature"
    pki.issue("mallory")
    mine = command_of(job, paper)  # signed by somebody with ann's certificate before one's own
    mine.job.signed.certificates.insert(0, _der(pki, "mallory"))
    assert reason(lambda: site.permit(mine)) == "bad_signature"
    stranger = Pki(tmp_path / "other")
    flctl("certs", "issue", stranger.folder, "ann", "--role", "operator")
    assert reason(lambda: site.permit(command_of(job, signed(stranger, job)))) == "unknown_operator"


def _der(pki: Pki, name: str) -> bytes:
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    return x509.load_pem_x509_certificate((pki.folder / f"{name}.crt").read_bytes()).public_bytes(Encoding.DER)


@pytest.mark.parametrize("text", [b"", b"{}", b"[" * 5000, b"\xff", b" " * (MAX_TEXT_BYTES + 1)])
def test_a_text_that_is_no_job_is_refused(pki: Pki, tmp_path: Path, text: bytes) -> None:
    class Text(JobOrder):
        @property
        def text(self) -> bytes:
            return text

    job = job_of()
    order = Text.model_validate(order_of(job, RUN, time.time()).model_dump())
    command = command_of(job, signed_by(order, pki.tls("ann")))
    assert reason(lambda: orders(pki, tmp_path).permit(command)) == "bad_order"


def test_a_revoked_operator_starts_nothing_and_continues_nothing(tmp_path: Path) -> None:
    pki = Pki(tmp_path / "pki")
    flctl("certs", "issue", pki.folder, "ann", "--role", "operator")
    flctl("certs", "issue", pki.folder, "eve", "--role", "operator")
    flctl("certs", "revoke", pki.folder, "eve")
    job = job_of()
    paper = signed(pki, job)
    site = orders(pki, tmp_path, crl=True)
    site.follow(site.permit(command_of(job, paper)))
    flctl("certs", "revoke", pki.folder, "ann")  # in mid-job
    assert reason(lambda: site.permit(command_of(job, paper, job_round=2))) == "revoked_operator"


DAY = 86_400.0


@pytest.mark.parametrize(("late", "says"), [(-DAY, "check both clocks"), (31 * DAY, "sign the job again")])
def test_a_clock_that_is_wrong_is_told(
    pki: Pki, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: float, says: str
) -> None:
    job = job_of()
    command, now = command_of(job, signed(pki, job)), time.time()
    monkeypatch.setattr(time, "time", lambda: now + late)
    with pytest.raises(BadOrder, match=says) as refused:
        orders(pki, tmp_path).permit(command)
    assert refused.value.reason == "wrong_time"


def test_a_certificate_that_has_ended_is_told_with_the_date(pki: Pki, tmp_path: Path) -> None:
    pki.sign("late", "fedring://operator/late", ended=True)
    job = job_of()
    made = order_of(job, RUN, time.time())
    with pytest.raises(ConfigError, match="expired"):
        signed_by(made, pki.tls("late"))
    pki.sign("soon", "fedring://operator/soon")
    command = command_of(job, signed_by(made, pki.tls("soon")))
    command.job.signed.certificates[0] = _der(pki, "late")  # its key is another one
    assert reason(lambda: orders(pki, tmp_path, "soon", "late").permit(command)) == "bad_signature"


def test_a_damaged_memory_keeps_the_client_from_starting(pki: Pki, tmp_path: Path) -> None:
    job = job_of()
    site = orders(pki, tmp_path)
    site.follow(site.permit(command_of(job, signed(pki, job))))
    file = tmp_path / FILE
    good = file.read_bytes()
    for data in (good[:-1], good.replace(b'"rounds": 1', b'"rounds": 0'), b"", b"x\n{}"):
        file.write_bytes(data)
        with pytest.raises(ConfigError, match="which signed jobs this site has followed"):
            orders(pki, tmp_path)


def test_signed_jobs_are_forgotten_after_their_end(pki: Pki, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, site, now = job_of(), orders(pki, tmp_path), time.time()
    old = order_of(job, RUN, now)
    site.follow(site.permit(command_of(job, signed_by(old, pki.tls("ann")))))
    monkeypatch.setattr(time, "time", lambda: now + 32 * DAY)
    new = order_of(job, RUN, now + 32 * DAY)
    site.follow(site.permit(command_of(job, signed_by(new, pki.tls("ann")))))
    text = (tmp_path / FILE).read_text()
    assert (old.nonce in text, new.nonce in text) == (False, True)


def test_a_clock_that_was_ahead_for_a_while_lets_no_job_be_forgotten(
    pki: Pki, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, site, now = job_of(), orders(pki, tmp_path), time.time()
    paper = signed(pki, short)
    site.follow(site.permit(command_of(short, paper)))
    long = job_of(bounds={"days": 365})
    follows = command_of(long, signed(pki, long))
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now + 60 * DAY)
        site.follow(site.permit(follows))
    again = command_of(short, paper)
    again.job.job_id = 9
    assert reason(lambda: site.permit(again)) == "replayed"


def test_an_approval_that_has_ended_stops_a_signed_job_in_mid_job(pki: Pki, tmp_path: Path) -> None:
    job = job_of()
    paper, asked = signed(pki, job), Approval.model_validate({"mode": "cards", "allowed_operators": ["ann"]})
    consent = Consent(asked, tmp_path, ["fedring"], {}, orders(pki, tmp_path))
    unsigned = command_of(job, paper)
    unsigned.job.ClearField("signed")
    refused = consent.refusal(unsigned)
    assert refused is not None
    assert refused.reason == "not_signed"
    assert Cards(tmp_path).all() == ([], [])  # nobody at the site is asked about it
    first, second = command_of(job, paper), command_of(job, paper, job_round=2)
    refused = consent.refusal(first)
    assert refused is not None
    assert refused.reason == "not_approved"
    (kept,), _ = Cards(tmp_path).all()
    now = time.time()
    kept = Cards(tmp_path).decide(kept, Decision(now, now + 3600, approved=True))
    assert consent.refusal(first) is None
    assert consent.follow()["operator"] == "ann"
    assert consent.refusal(second) is None  # another signature is no other card
    Cards(tmp_path).decide(kept, Decision(now - 9, now - 1, approved=True))
    refused = consent.refusal(second)
    assert refused is not None
    assert "has ended" in refused.text


def test_the_table_needs_an_authority(pki: Pki) -> None:
    table = {"approval": {"allowed_operators": ["ann"]}}
    with pytest.raises(ValidationError, match=r"needs tls\.ca"):
        ClientConfig.model_validate(table)
    assert ClientConfig.model_validate({**table, "tls": {"ca": pki.folder / "ca.crt"}}).approval.allowed_operators
