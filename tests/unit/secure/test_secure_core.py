"""The pure parts of secure aggregation: shares, masks, keys, signatures and rosters."""

import random
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from fedring.secure import SecureError
from fedring.secure.keys import (
    SEALED_BYTES,
    RoundSecrets,
    commitment,
    draw_secrets,
    own_seed,
    pair_seed,
    public_key,
    seal,
    share_key,
    unseal,
)
from fedring.secure.limits import bits_of_sum, threshold
from fedring.secure.masks import GROUP, mask, pack, packed_size, unpack, unwrap, word_type, wrap
from fedring.secure.roster import Roster, check_member, check_roster, signed_keys, survivors_statement
from fedring.secure.shamir import SHARE_BYTES, BadShares, combine, split
from fedring.signatures.digests import task_digest
from fedring.signatures.proofs import (
    BadProof,
    PrivateKey,
    Proof,
    check_chain,
    fingerprint,
    public_bytes,
    sign,
    verify,
)
from fedring.v1 import federation_pb2 as pb
from fedring.v1 import secure_pb2 as wire

KEYS: dict[str, Callable[[], PrivateKey]] = {
    "ecdsa": lambda: ec.generate_private_key(ec.SECP256R1()),
    "rsa": lambda: rsa.generate_private_key(65537, 2048),
    "ed25519": ed25519.Ed25519PrivateKey.generate,
}


@pytest.mark.parametrize(("clients", "needed"), [(3, 3), (4, 3), (5, 4), (8, 6), (10, 7), (33, 23), (100, 67)], ids=str)
def test_more_than_two_thirds_must_answer(clients: int, needed: int) -> None:
    assert threshold(clients) == needed
    assert 2 * needed - clients > (clients - 1) // 3  # two such sets have an honest client in common


@pytest.mark.parametrize(
    ("clients", "levels", "weight", "bits"), [(8, 7, 1, 7), (100, 7, 1, 11), (8, 7, 1000, 17), (3, 1, 1, 3)], ids=str
)
def test_a_sum_fits_its_bits_and_no_fewer_would_do(clients: int, levels: int, weight: int, bits: int) -> None:
    assert bits_of_sum(clients, levels, weight) == bits
    most = clients * levels * weight
    sums = np.array([-most, 0, most])
    assert unwrap(wrap(sums, bits), bits).tolist() == sums.tolist()
    assert most > (1 << (bits - 1)) // 2


@given(st.integers(1, 12), st.integers(0, 6), st.randoms(use_true_random=False))
def test_enough_shares_give_the_secret_back(needed: int, spare: int, rng: random.Random) -> None:
    secret = rng.randbytes(32)
    shares = dict(enumerate(split(secret, needed, needed + spare), 1))
    kept = rng.sample(sorted(shares), rng.randint(needed, needed + spare))
    assert combine({place: shares[place] for place in kept}) == secret
    assert {len(share) for share in shares.values()} == {SHARE_BYTES}


def test_shares_are_a_polynomial_over_the_known_prime() -> None:
    secret = (2**256 - 1).to_bytes(32, "little")
    # The line s + 5x through (1, s + 5) and (3, s + 15), written without this code.
    shares = {place: (2**256 - 1 + 5 * place).to_bytes(SHARE_BYTES, "little") for place in (1, 3)}
    assert combine(shares) == secret


def test_fewer_shares_say_nothing() -> None:
    secret = bytes(32)
    one, two = split(secret, 3, 5)[:2]
    for guess in (b"\x01" + bytes(31), random.randbytes(32)):
        # For each secret there is a third share that gives it: the two that are known fit all of them.
        prime = 2**521 - 1
        first, second, free = (int.from_bytes(each, "little") for each in (one, two, guess))
        third = (3 * second - 3 * first + free) % prime
        assert combine({1: one, 2: two, 3: third.to_bytes(SHARE_BYTES, "little")}) == guess


@pytest.mark.parametrize(
    "shares",
    [{}, {1: b"\xff" * SHARE_BYTES}, {1: b"\x01" * 60 + bytes(6)}],
    ids=["none", "above the prime", "no secret of 32 bytes"],
)
def test_bad_shares_are_refused(shares: dict[int, bytes]) -> None:
    with pytest.raises(BadShares):
        combine(shares)


@given(st.integers(1, 32), st.integers(0, 100), st.integers(0, 2**32 - 1))
def test_packed_words_come_back(bits: int, count: int, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 1 << bits, count, dtype=np.uint64)
    words = values.astype(word_type(bits))
    data = pack(words, bits)
    assert len(data) == packed_size(count, bits)
    assert np.array_equal(unpack(data.tobytes(), count, bits), words)
    assert np.array_equal(unwrap(words, bits) % (1 << bits), values.astype(np.int64))


def test_the_bits_above_a_word_are_not_sent() -> None:
    assert pack(np.full(16, 0xFF, np.uint8), 3).tolist() == pack(np.full(16, 7, np.uint8), 3).tolist()


def test_packing_is_as_the_page_of_formats_says() -> None:
    words = np.arange(0x101, 0x109, dtype=np.uint16)  # 12 bits each
    low = [1, 2, 3, 4, 5, 6, 7, 8]
    top = sum(1 << (4 * place) for place in range(8))
    assert pack(words, 12).tolist() == [*low, *top.to_bytes(4, "little")]


@given(st.integers(1, 32), st.integers(0, 40), st.integers(0, 90))
def test_each_piece_of_a_mask_can_be_made_on_its_own(bits: int, start: int, length: int) -> None:
    seed = bytes(range(32))
    whole = mask(seed, bits, 0, GROUP * 40 + 90)
    piece = mask(seed, bits, GROUP * start, GROUP * start + length)
    assert np.array_equal(piece, whole[GROUP * start : GROUP * start + length])


def test_a_mask_begins_with_the_key_stream_of_aes() -> None:
    # AES-256 of the counter 0 under the key 0 (FIPS 197; NIST's vectors of AES in counter mode begin elsewhere).
    assert mask(bytes(32), 8, 0, 16).tobytes().hex() == "dc95c078a2408989ad48a21492842087"


def test_both_sides_derive_the_same_keys_and_others_do_not() -> None:
    one, two, roster = draw_secrets(), draw_secrets(), bytes(32)
    assert pair_seed(one.masking, public_key(two.masking), roster, "a", "b") == pair_seed(
        two.masking, public_key(one.masking), roster, "a", "b"
    )
    keys = {
        pair_seed(one.masking, public_key(two.masking), roster, "a", "b"),
        pair_seed(one.masking, public_key(two.masking), b"\x01" + bytes(31), "a", "b"),
        pair_seed(one.masking, public_key(two.masking), roster, "a", "c"),
        share_key(one.masking, public_key(two.masking), roster, "a", "b"),
        share_key(one.masking, public_key(two.masking), roster, "b", "a"),
        own_seed(one.own_mask, roster, "a"),
        own_seed(one.own_mask, roster, "b"),
        own_seed(two.own_mask, roster, "a"),
        commitment(one.own_mask),
    }
    assert len(keys) == 9
    assert {len(key) for key in keys} == {32}


def test_a_public_key_of_low_order_is_refused() -> None:
    with pytest.raises(SecureError) as refused:
        pair_seed(draw_secrets().masking, bytes(32), bytes(32), "a", "b")
    assert refused.value.reason == "bad_peer_keys"


def test_sealed_shares_open_with_their_key_only() -> None:
    first, second = split(bytes(32), 2, 2)
    sealed = seal(bytes(32), first, second)
    assert len(sealed) == SEALED_BYTES
    assert unseal(bytes(32), sealed) == (first, second)
    for key, text in ((b"\x01" * 32, sealed), (bytes(32), sealed[:-1]), (bytes(32), sealed[:5]), (bytes(32), b"")):
        with pytest.raises(SecureError) as refused:
            unseal(key, text)
        assert refused.value.reason == "bad_share"


@pytest.mark.parametrize("kind", KEYS)
def test_signatures_prove_who_signed(kind: str) -> None:
    key, other = KEYS[kind](), KEYS[kind]()
    proof = Proof(public_key=public_bytes(key.public_key()))
    verify(proof.key(), sign(key, b"text"), b"text")
    for signature, text in ((sign(key, b"text"), b"texts"), (sign(other, b"text"), b"text"), (b"", b"text")):
        with pytest.raises(BadProof):
            verify(proof.key(), signature, text)
    with pytest.raises(BadProof, match="too long"):
        verify(proof.key(), bytes(2000), b"text")
    assert fingerprint(key) == fingerprint(proof.key()) != fingerprint(other)


@pytest.mark.parametrize(
    "proof",
    [
        Proof(),
        Proof(public_key=b"no key"),
        Proof((b"no certificate",)),
        Proof(public_key=bytes(2000)),
        Proof((bytes(5000), bytes(5000))),
        Proof(tuple(b"" for _ in range(5))),
        Proof(
            public_key=ed448.Ed448PrivateKey.generate()
            .public_key()
            .public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        ),
    ],
    ids=["nothing", "no key", "no certificate", "long key", "long chain", "many", "ed448"],
)
def test_what_proves_nothing_is_refused(proof: Proof) -> None:
    with pytest.raises(BadProof):
        proof.key()


def certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: tuple[str, ec.EllipticCurvePrivateKey],
    *,
    authority: bool = False,
    ended: bool = False,
) -> x509.Certificate:
    now = datetime.now(UTC)
    subject, issued_by = (x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, each)]) for each in (name, issuer[0]))
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issued_by)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=2))
        .not_valid_after(now + timedelta(days=-1 if ended else 1))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
    )
    return builder.sign(issuer[1], SHA256())


def test_a_chain_of_certificates_leads_to_an_authority() -> None:
    root, middle, leaf, other = (ec.generate_private_key(ec.SECP256R1()) for _ in range(4))
    top = certificate("root", root, ("root", root), authority=True)
    stranger = certificate("root", other, ("root", other), authority=True)
    between = certificate("middle", middle, ("root", root), authority=True)
    own = certificate("leaf", leaf, ("middle", middle))
    check_chain([own, between], [stranger, top])
    check_chain([certificate("leaf", leaf, ("root", root))], [top])
    by_leaf = certificate("minted", other, ("leaf", leaf))
    bad: list[tuple[Sequence[x509.Certificate], Sequence[x509.Certificate]]] = [
        ([own, between], [stranger]),
        ([own], [top]),
        ([by_leaf, own, between], [top]),
        ([own, top], [top]),
        ([certificate("leaf", leaf, ("root", root), ended=True)], [top]),
        ([own, certificate("middle", middle, ("root", root), authority=True, ended=True)], [top]),
        ([], [top]),
    ]
    for chain, authorities in bad:
        with pytest.raises(BadProof):
            check_chain(chain, authorities)


def test_certificates_that_cannot_be_read_prove_nothing() -> None:
    root, leaf, stranger = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
    good = certificate("leaf", leaf, ("middle", stranger)).public_bytes(Encoding.DER)
    issuer = certificate("middle", stranger, ("middle", stranger), authority=True).public_bytes(Encoding.DER)
    version, constraints = bytes.fromhex("a003020102"), bytes.fromhex("0603551d13")
    assert good.count(version) == issuer.count(version) == issuer.count(constraints) == 1
    other_version = good.replace(version, version[:-1] + b"\x63")
    place = issuer.index(constraints) + 10  # the extension's own bytes, which the parser reads last
    no_constraints = issuer[:place] + b"\xff" + issuer[place + 1 :]
    for certificates in ((good, other_version), (good, no_constraints), (good, b"")):
        with pytest.raises(BadProof):
            check_chain(Proof(certificates).chain(), [certificate("root", root, ("root", root), authority=True)])


COMMAND = pb.TrainCmd(run_id="run", epoch=1, round=7, model_digest="m", lr=0.5)


class Party:
    """One client, with a key that proves who it is."""

    def __init__(self, name: str) -> None:
        self.name, self.secrets = name, draw_secrets()
        self.key = ed25519.Ed25519PrivateKey.generate()
        self.proof = Proof(public_key=public_bytes(self.key.public_key()))

    def signed(self, command: pb.TrainCmd = COMMAND, secrets: RoundSecrets | None = None) -> wire.SignedKeys:
        return signed_keys(command, self.name, secrets or self.secrets, self.key, self.proof)


def anybody(name: str, proof: Proof) -> None:
    """Take everybody for who they say they are."""


def pinned(parties: Sequence[Party]) -> Callable[[str, Proof], None]:
    pins = {party.name: party.proof for party in parties}

    def check(name: str, proof: Proof) -> None:
        if pins.get(name) != proof:
            raise BadProof("it is not pinned")

    return check


def refused(message: wire.SecureRoster, check: Callable[[str, Proof], None] = anybody) -> str:
    with pytest.raises(SecureError) as error:
        check_roster(message, COMMAND, check)
    return error.value.reason


def test_a_roster_names_its_members_in_order() -> None:
    parties = [Party(name) for name in "abcde"]
    roster = check_roster(wire.SecureRoster(members=[each.signed() for each in parties]), COMMAND, pinned(parties))
    assert roster.places == {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5}
    assert (roster.threshold, roster.member("c").masking) == (4, public_key(parties[2].secrets.masking))
    assert roster.ordered(["a", "c"])
    assert not any(roster.ordered(names) for names in (["c", "a"], ["a", "a"], ["a", "f"]))
    assert roster.digest != Roster(roster.members[:4]).digest
    everybody = "abcde"
    texts = {
        survivors_statement(roster.digest, *sets) for sets in ((everybody, "ab"), ("abcd", "ab"), (everybody, "a"))
    }
    assert len(texts) == 3


def test_a_roster_that_is_not_in_order_is_refused() -> None:
    parties = [Party(name) for name in "abc"]
    keys = [each.signed() for each in parties]
    assert refused(wire.SecureRoster(members=keys[:2])) == "too_few_peers"
    assert refused(wire.SecureRoster(members=keys[::-1])) == "bad_roster"
    assert refused(wire.SecureRoster(members=[*keys[:2], keys[1]])) == "bad_roster"
    assert refused(wire.SecureRoster(members=[keys[0]] * 101)) == "bad_roster"
    twin = Party("d").signed(secrets=parties[0].secrets)
    assert refused(wire.SecureRoster(members=[*keys, twin])) == "bad_roster"
    assert refused(wire.SecureRoster(members=keys), pinned(parties[:2])) == "unknown_peer"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"run_id": "other"}, "other_round"),
        ({"epoch": 2}, "other_round"),
        ({"round": 6}, "other_round"),
        ({"model_digest": "n"}, "other_task"),
        ({"lr": 0.25}, "other_task"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_keys_of_another_round_or_task_are_refused(change: dict[str, object], reason: str) -> None:
    other = pb.TrainCmd(**{"run_id": "run", "epoch": 1, "round": 7, "model_digest": "m", "lr": 0.5} | change)  # type: ignore[arg-type]
    with pytest.raises(SecureError) as error:
        check_member(Party("a").signed(other), COMMAND, anybody, task_digest(COMMAND))
    assert error.value.reason == reason


def test_what_may_differ_between_clients_is_not_part_of_the_task() -> None:
    again = pb.TrainCmd()
    again.CopyFrom(COMMAND)
    again.deadline_seconds, again.traceparent = 3.0, "trace"
    again.model.payload = b"model"
    assert task_digest(again) == task_digest(COMMAND)


def test_keys_that_are_not_signed_well_are_refused() -> None:
    a, b = Party("a"), Party("b")
    swapped = a.signed()
    swapped.statement = Party("a").signed().statement  # the server puts in keys of its own
    forged = a.signed()
    forged.public_key = b.proof.public_key
    long = a.signed()
    long.statement = bytes(3000)
    cut = a.signed()
    cut.statement = cut.statement[:-1]
    no_key = wire.SignedKeys(statement=wire.KeyStatement(client_id="a").SerializeToString())
    for keys, reason in (
        (swapped, "bad_peer_signature"),
        (forged, "bad_peer_signature"),
        (long, "bad_peer_keys"),
        (cut, "bad_peer_keys"),
        (no_key, "bad_peer_keys"),
    ):
        with pytest.raises(SecureError) as error:
            check_member(keys, COMMAND, anybody, task_digest(COMMAND))
        assert error.value.reason == reason
