"""The secret of a client: what follows from it, and how it is kept."""

import hashlib
import hmac
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from tests.damage import flip

from fedring.client.policy.secret import SECRET_FILE, ClientSecret, kept_secret
from fedring.client.round_plan import own_seed, plan_of
from fedring.daemon.config import ConfigError
from fedring.daemon.durable import text_after_digest
from fedring.signatures.digests import CONTEXT
from fedring.simulation import client_secret, simulate
from fedring.v1 import federation_pb2 as pb
from fedring.v1 import secure_pb2 as wire

SECRET = bytes(range(32))


def command(**fields: object) -> pb.TrainCmd:
    """Return a command of a job with secure aggregation."""
    given: dict[str, object] = {
        "run_id": "run",
        "epoch": 1,
        "round": 4,
        "job_round": 2,
        "job": pb.JobSpec(job_id=3, name="job", mode="federated", secure_aggregation='{"block": 16}'),
        "model_version": 5,
        "model_digest": "digest",
        "lr": 0.5,
        "seed": 6,
        "secure": wire.SecureRound(scales=bytes(4), block=16, levels=7),
    }
    return pb.TrainCmd(**given | fields)  # type: ignore[arg-type]  # the tests know the fields


def derive(of: pb.TrainCmd, purpose: str = "training", secret: bytes = SECRET) -> bytes:
    return ClientSecret(lambda: secret).derive(of, purpose)


def test_what_is_derived_is_hkdf_of_the_secret_with_the_purpose_and_the_task() -> None:
    work = command()
    for field in ("run_id", "epoch", "model_version"):
        work.ClearField(field)
    work.job.ClearField("job_id")
    work.job.ClearField("name")
    text = b"".join(
        len(part).to_bytes(4, "big") + part
        for part in (f"{CONTEXT}: work".encode(), work.SerializeToString(deterministic=True))
    )
    extracted = hmac.digest(b"fedring client secret 1", SECRET, "sha256")
    info = b"training|" + hashlib.sha256(text).digest() + b"\x01"
    assert derive(command()) == hmac.digest(extracted, info, "sha256")


def test_any_other_task_gives_other_bytes() -> None:
    others = [
        command(round=5),
        command(job_round=3),
        command(lr=0.5 * (1 + 1e-7)),
        command(seed=7),
        command(model_digest="another"),
        command(epochs=2),
        command(residual_after=1),
        command(secure=wire.SecureRound(scales=bytes(4), block=16, levels=8)),
        command(job=pb.JobSpec(mode="federated", secure_aggregation='{"block": 16}', min_results=3)),
    ]
    found = {derive(each) for each in (command(), *others)}
    found |= {derive(command(), "dither"), derive(command(), secret=bytes(32))}
    assert len(found) == len(others) + 3


def test_the_same_task_gives_the_same_bytes_whoever_asks() -> None:
    same = [
        command(run_id="another", epoch=2),
        command(model_version=9, max_update_bytes=1, deadline_seconds=2.0, traceparent="00-1"),
        command(model=pb.SmallModel(payload=b"x"), residual_after_epoch=3),
        command(job=pb.JobSpec(job_id=8, name="again", mode="federated", secure_aggregation='{"block": 16}')),
    ]
    assert {derive(each) for each in same} == {derive(command())}


def test_a_seed_follows_from_the_secret_only_where_masks_or_noise_are_asked_for() -> None:
    for key in ("secure_aggregation", "dp", "sample_dp"):
        private = command(job=pb.JobSpec(mode="federated", **{key: "{}"}))  # type: ignore[arg-type]  # as above
        seed = plan_of(private, "a", ClientSecret(lambda: SECRET)).seed
        assert seed not in (own_seed(6, "a"), plan_of(private, "a", ClientSecret(lambda: bytes(32))).seed)
        assert seed == int.from_bytes(derive(private)[:8], "little") >> 1

    masked = command(job=pb.JobSpec(mode="federated"))  # a server that lies leaves the table out
    assert plan_of(masked, "a", ClientSecret(lambda: SECRET)).seed == int.from_bytes(derive(masked)[:8], "little") >> 1

    def unread() -> bytes:
        raise AssertionError

    plain = command(job=pb.JobSpec(mode="federated"), secure=None)
    assert plan_of(plain, "a", ClientSecret(unread)).seed == own_seed(6, "a")


def test_a_secret_is_made_once_and_only_when_it_is_needed(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    secret, other = kept_secret(folder), kept_secret(folder)
    assert not folder.exists()
    first = secret.derive(command(), "training")
    file = folder / SECRET_FILE
    assert (len(text_after_digest(file.read_bytes())), stat.S_IMODE(file.stat().st_mode)) == (32, 0o600)
    assert [each.name for each in folder.iterdir()] == [SECRET_FILE]
    assert {other.derive(command(), "training"), kept_secret(folder).derive(command(), "training")} == {first}


def test_a_kill_while_the_secret_is_made_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*_: object) -> None:
        raise _Killed

    for name in ("fsync", "link"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, dies)
            with pytest.raises(_Killed):
                kept_secret(tmp_path).derive(command(), "training")
        assert not (tmp_path / SECRET_FILE).exists()
    assert len(kept_secret(tmp_path).derive(command(), "training")) == 32


class _Killed(BaseException):
    """In the place of a kill."""


@pytest.mark.parametrize("data", [b"", SECRET[:31], SECRET * 2])
def test_a_damaged_secret_is_an_error_at_the_start(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / SECRET_FILE
    file.write_bytes(data)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match=f"{SECRET_FILE} says .* restore it, or remove it"):
        kept_secret(tmp_path)


def test_each_flipped_bit_of_the_secret_is_noticed_at_the_start(tmp_path: Path) -> None:
    first = kept_secret(tmp_path).derive(command(), "training")
    file = tmp_path / SECRET_FILE
    for bit in range(8 * file.stat().st_size):
        flip(file, bit)
        with pytest.raises(ConfigError, match="cannot be used"):
            kept_secret(tmp_path)
        flip(file, bit)
    assert kept_secret(tmp_path).derive(command(), "training") == first


def test_a_secret_of_an_earlier_version_stays_and_gets_a_digest(tmp_path: Path) -> None:
    file = tmp_path / SECRET_FILE
    file.write_bytes(SECRET)
    file.chmod(0o600)
    known = kept_secret(tmp_path).derive(command(), "training")
    assert known == ClientSecret(lambda: SECRET).derive(command(), "training")
    assert text_after_digest(file.read_bytes()) == SECRET
    assert kept_secret(tmp_path).derive(command(), "training") == known


def test_damage_to_the_secret_does_not_change_what_a_running_client_trains(tmp_path: Path) -> None:
    first = kept_secret(tmp_path).derive(command(), "training")
    running = kept_secret(tmp_path)
    flip(tmp_path / SECRET_FILE)
    assert running.derive(command(), "training") == first


def test_a_secret_that_everybody_can_read_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / SECRET_FILE).write_bytes(SECRET)
    (tmp_path / SECRET_FILE).chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        kept_secret(tmp_path)


def test_simulated_clients_have_secrets_of_their_own() -> None:
    found = {client_secret(secret, client) for secret in (SECRET, bytes(32)) for client in ("client-0", "client-1")}
    assert {len(each) for each in found} == {32}
    assert len(found) == 4


def test_the_clients_secrets_count_in_jobs_with_masks_only_and_follow_from_the_seed_if_none_is_given() -> None:
    secure: dict[str, Any] = {"weights": "uniform", "min_clients_to_aggregate": 3, "secure_aggregation": {}}

    def model(keys: dict[str, Any], **settings: Any) -> str:
        job = {"rounds": 2, "model_args": {"hidden": 8}, "batch_size": 16, "evaluate": False, "min_clients": 4} | keys
        return str(simulate(job, clients=4, workers=1, threads=1, **settings)["model_sha256"])

    given = model(secure, secret=bytes(32))
    assert given == model(secure, secret=bytes(32)) != model(secure, secret=bytes(33))
    assert given != model(secure) == model(secure) != model(secure, seed=1)
    assert model({}, secret=bytes(32)) == model({})
