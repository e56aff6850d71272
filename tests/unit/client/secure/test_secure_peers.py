"""Who a client of secure aggregation is to its peers, who may be a peer, and what a site demands."""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa, x25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from pydantic import ValidationError
from tests.damage import flip
from tests.pki import Pki
from tests.secure_sums import command_of, new_signer

from fedring.client.main import app
from fedring.client.policy.identity import KEY_FILE, PeerCheck, Signer, check_own_key, load_signer
from fedring.client.policy.ledger import Ledger
from fedring.client.policy.privacy import SitePolicy, refusal
from fedring.daemon.config import ConfigError
from fedring.daemon.durable import text_after_digest
from fedring.rpc.identity import Role, uri_of
from fedring.rpc.revocation import Revocations
from fedring.rpc.tls import PLAINTEXT, Tls
from fedring.signatures.proofs import BadProof, Proof, fingerprint, public_bytes, sign, verify
from fedring.v1 import federation_pb2 as pb

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    made = Pki(tmp_path / "pki")
    made.issue("ann", "bob")
    return made


def signer(pki: Pki, name: str) -> Signer:
    return load_signer(pki.tls(name), pki.folder)


def check(tls: Tls = PLAINTEXT, peers: dict[str, str] | None = None, own: Signer | None = None) -> PeerCheck:
    """Return what ann checks peers with."""
    proof = own.proof if own else Proof()
    return PeerCheck("ann", proof, peers=peers or {}, tls=tls, revoked=Revocations(tls.crl, tls.ca))


def test_a_client_without_a_certificate_makes_a_key_once(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    first = load_signer(PLAINTEXT, folder)
    assert (stat.S_IMODE(folder.stat().st_mode), [path.name for path in folder.iterdir()]) == (0o700, [KEY_FILE])
    assert stat.S_IMODE((folder / KEY_FILE).stat().st_mode) == 0o600
    again = load_signer(PLAINTEXT, folder)
    assert (again.proof, again.fingerprint) == (first.proof, first.fingerprint)
    verify(first.proof.key(), sign(again.key, b"text"), b"text")


@pytest.mark.parametrize("content", [b"", b"-----BEGIN PRIVATE KEY-----\n", None], ids=["empty", "cut", "another kind"])
def test_a_damaged_key_is_not_replaced_because_others_may_have_pinned_it(tmp_path: Path, content: bytes | None) -> None:
    other = x25519.X25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (tmp_path / KEY_FILE).write_bytes(content if content is not None else other)
    before = (tmp_path / KEY_FILE).read_bytes()
    (tmp_path / KEY_FILE).chmod(0o600)
    with pytest.raises(ConfigError, match=KEY_FILE):
        load_signer(PLAINTEXT, tmp_path)
    assert (tmp_path / KEY_FILE).read_bytes() == before


def test_each_flipped_bit_of_the_key_is_noticed(tmp_path: Path) -> None:
    first = load_signer(PLAINTEXT, tmp_path).fingerprint
    for bit in range(8 * (tmp_path / KEY_FILE).stat().st_size):
        flip(tmp_path / KEY_FILE, bit)
        with pytest.raises(ConfigError, match=KEY_FILE):
            check_own_key(PLAINTEXT, tmp_path)
        flip(tmp_path / KEY_FILE, bit)
    assert load_signer(PLAINTEXT, tmp_path).fingerprint == first


def test_a_key_of_an_earlier_version_stays_and_gets_a_digest(tmp_path: Path) -> None:
    first = load_signer(PLAINTEXT, tmp_path).fingerprint
    pem = text_after_digest((tmp_path / KEY_FILE).read_bytes())
    (tmp_path / KEY_FILE).write_bytes(pem)
    assert load_signer(PLAINTEXT, tmp_path).fingerprint == first
    assert text_after_digest((tmp_path / KEY_FILE).read_bytes()) == pem


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    load_signer(PLAINTEXT, tmp_path)
    (tmp_path / KEY_FILE).chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_signer(PLAINTEXT, tmp_path)


def test_two_processes_that_make_the_key_at_once_use_the_same_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def slower(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "link", link)
        theirs.append(load_signer(PLAINTEXT, tmp_path).fingerprint)
        link(source, target)

    theirs: list[str] = []
    monkeypatch.setattr(os, "link", slower)
    assert [load_signer(PLAINTEXT, tmp_path).fingerprint] == theirs


def test_a_client_with_a_certificate_shows_it(pki: Pki) -> None:
    mine = signer(pki, "ann")
    assert len(mine.proof.certificates) >= 1
    assert mine.proof.public_key == b""
    assert not (pki.folder / KEY_FILE).exists()
    verify(mine.proof.key(), sign(mine.key, b"text"), b"text")
    with pytest.raises(BadProof):
        verify(mine.proof.key(), sign(signer(pki, "bob").key, b"text"), b"text")


@pytest.mark.parametrize(
    "key", [ed25519.Ed25519PrivateKey.generate(), rsa.generate_private_key(65537, 2048)], ids=["Ed25519", "RSA"]
)
def test_keys_of_all_kinds_sign(key: Any) -> None:
    proof = Proof(public_key=public_bytes(key.public_key()))
    verify(proof.key(), sign(key, b"text"), b"text")
    with pytest.raises(BadProof):
        verify(proof.key(), sign(key, b"text"), b"another text")


def test_the_authority_says_who_a_peer_is(pki: Pki, tmp_path: Path) -> None:
    other = Pki(tmp_path / "other")
    other.issue("bob")
    pki.issue("eve", role=Role.OPERATOR)
    pki.sign("old", uri_of(Role.CLIENT, "old"), ended=True)
    pki.sign("none")
    may_be = check(pki.tls("ann"), own=signer(pki, "ann"))
    may_be("ann", signer(pki, "ann").proof)
    may_be("bob", signer(pki, "bob").proof)
    for name, proof in {
        "ann": signer(pki, "bob").proof,  # another client's certificate
        "bob": signer(other, "bob").proof,
        "eve": signer(pki, "eve").proof,
        "old": signer(pki, "old").proof,
        "none": signer(pki, "none").proof,
        "cat": new_signer().proof,  # a key without a certificate
    }.items():
        with pytest.raises(BadProof):
            may_be(name, proof)


def test_a_revoked_certificate_is_refused_at_once(pki: Pki, flctl: Call) -> None:
    tls = pki.tls("ann").model_copy(update={"crl": pki.folder / "ca.crl"})
    may_be = check(tls)
    may_be("bob", signer(pki, "bob").proof)
    assert flctl("certs", "revoke", pki.folder, "bob")[0] == 0
    with pytest.raises(BadProof, match="revoked"):
        may_be("bob", signer(pki, "bob").proof)


def test_pins_are_above_the_authority(pki: Pki) -> None:
    bob, bare = signer(pki, "bob"), new_signer()
    may_be = check(pki.tls("ann"), {"bob": bob.fingerprint, "cat": bare.fingerprint}, signer(pki, "ann"))
    may_be("ann", signer(pki, "ann").proof)
    may_be("bob", bob.proof)
    may_be("cat", bare.proof)
    pki.issue("dan")
    for name, proof in {"dan": signer(pki, "dan").proof, "bob": bare.proof, "ann": bare.proof}.items():
        with pytest.raises(BadProof, match=r"privacy\.peers"):
            may_be(name, proof)


def test_without_tls_and_pins_anybody_may_be_a_peer() -> None:
    check()("bob", new_signer().proof)


@pytest.mark.parametrize(
    "peers",
    [{"ann": "0" * 63}, {"ann": "g" * 64}, {"ann": "A" * 64}, {"a b": "0" * 64}, {"": "0" * 64}, ["ann"]],
    ids=["short", "not hexadecimal", "upper case", "no name", "empty", "a list"],
)
def test_pins_are_names_and_fingerprints(peers: object) -> None:
    with pytest.raises(ValidationError):
        SitePolicy.model_validate({"peers": peers})


@pytest.mark.parametrize("policy", [{"require_secure_aggregation": True}, {"peers": {"ann": "0" * 64}}], ids=str)
def test_a_site_refuses_jobs_without_secure_aggregation(tmp_path: Path, policy: dict[str, Any]) -> None:
    demanded, ledger = SitePolicy.model_validate(policy), Ledger(tmp_path)
    assert refusal(demanded, ledger, command_of()) == ""
    plain, pipeline = pb.TrainCmd(job=pb.JobSpec(mode="federated")), command_of()
    pipeline.job.mode = "pipeline"
    assert "demands a federated job with [secure_aggregation]" in refusal(demanded, ledger, plain)
    assert next(iter(policy)) in refusal(demanded, ledger, plain)
    assert refusal(demanded, ledger, pipeline) != ""
    assert refusal(SitePolicy.model_validate({}), ledger, plain) == ""


def test_any_site_refuses_a_command_without_the_masks_that_its_job_promises(tmp_path: Path) -> None:
    policy, ledger = SitePolicy.model_validate({}), Ledger(tmp_path)
    bare, pipeline = command_of(), command_of()
    bare.ClearField("secure")
    pipeline.job.mode = "pipeline"
    assert refusal(policy, ledger, command_of()) == ""
    for command in (bare, pipeline):
        assert "asks for an update without masks" in refusal(policy, ledger, command)


@pytest.mark.parametrize(("key", "told"), [("levels", 32767), ("block", 8192), ("max_weight", 1001)])
def test_any_site_refuses_other_levels_than_those_of_the_table_that_it_may_have_approved(
    tmp_path: Path, key: str, told: int
) -> None:
    policy, ledger = SitePolicy.model_validate({}), Ledger(tmp_path)
    other: dict[str, Any] = {key: told}
    assert refusal(policy, ledger, command_of(max_weight=1000)) == ""
    assert f"and the server's command has {told}" in refusal(policy, ledger, command_of(**other))
    own_noise = command_of(clip=1.0, levels=0, block=0)
    own_noise.job.dp = '{"noise_multiplier": 1.0, "noise_by": "clients", "adaptive": false}'
    assert refusal(policy, ledger, own_noise) == ""  # its integers follow from the table [dp]


def test_a_client_tells_its_fingerprint(
    tmp_path: Path, pki: Pki, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for settings, key in (
        (["tls.cert=pki/ann.crt", "tls.key=pki/ann.key", "tls.ca=pki/ca.crt"], signer(pki, "ann").key),
        (["state_dir=state"], None),
    ):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit) as ended:
            app(["--fingerprint", *settings])
        assert ended.value.code == 0
        told = capsys.readouterr().out.strip()
        assert told == fingerprint(key or load_signer(PLAINTEXT, tmp_path / "state").key)
