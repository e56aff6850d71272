"""The examples of secure aggregation in protos/vectors.json, computed again from what FORMATS.md says."""

import hashlib
import hmac
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR

from fedring.secure import shamir
from fedring.secure.levels import to_integers
from fedring.secure.masks import pack, packed_size, unpack
from fedring.v1 import federation_pb2 as pb
from fedring.v1 import secure_pb2 as wire

EXAMPLES: dict[str, Any] = json.loads((Path(__file__).parents[3] / "protos/vectors.json").read_text("utf-8"))["secure"]
NAME = b"fedring secure aggregation 1"
PRIME = 2**521 - 1


def each(key: str) -> pytest.MarkDecorator:
    numbers = range(len(EXAMPLES[key]))
    return pytest.mark.parametrize("example", EXAMPLES[key], ids=[f"{key}-{number}" for number in numbers])


def digest(purpose: str, *parts: bytes) -> bytes:
    texts = [NAME + b": " + purpose.encode(), *parts]
    return hashlib.sha256(b"".join(struct.pack(">I", len(text)) + text for text in texts)).digest()


def derived(secret: bytes, *names: str) -> str:
    """Return HKDF-SHA256 of 32 bytes, which is one block."""
    info = digest("key", bytes.fromhex(EXAMPLES["roster"]), *(name.encode() for name in names))
    key = hmac.digest(NAME, secret, "sha256")
    return hmac.digest(key, info + b"\1", "sha256").hex()


def agreed(private: str, public: str) -> bytes:
    key = X25519PublicKey.from_public_bytes(bytes.fromhex(public))
    return X25519PrivateKey.from_private_bytes(bytes.fromhex(private)).exchange(key)


def message(fields: list[tuple[int, str]]) -> bytes:
    return b"".join(bytes([number << 3 | 2, len(text)]) + text.encode() for number, text in fields)


def test_a_task_is_named_by_its_command_without_what_differs_between_clients() -> None:
    task = EXAMPLES["task"]
    command = bytes.fromhex(task["command"])
    assert digest("task", command).hex() == task["digest"]
    assert pb.TrainCmd.FromString(command).secure.block == 16


def test_a_roster_and_survivors_are_named_by_the_statements_and_the_names() -> None:
    statements = [bytes.fromhex(each) for each in EXAMPLES["statements"]]
    roster = digest("roster", *statements)
    assert roster.hex() == EXAMPLES["roster"]
    told = EXAMPLES["survivors"]
    lists = [message([(1, name) for name in told[key]]) for key in ("peers", "survivors")]
    assert digest("survivors", roster, *lists).hex() == told["statement"]


def test_a_statement_binds_the_task_and_the_public_keys() -> None:
    keys, statement = EXAMPLES["keys"], wire.KeyStatement.FromString(bytes.fromhex(EXAMPLES["statements"][1]))
    assert statement.context.encode() == NAME
    assert statement.task.hex() == EXAMPLES["task"]["digest"]
    assert statement.sealing_key.hex() == keys["other_sealing_key"]
    assert statement.masking_key.hex() == keys["other_masking_key"]


def test_keys_and_seeds_are_derived_as_the_document_says() -> None:
    keys = EXAMPLES["keys"]
    client, other = keys["client"], keys["other"]
    assert digest("own mask", bytes.fromhex(keys["own_mask"])).hex() == keys["commitment"]
    sealing = agreed(keys["sealing"], keys["other_sealing_key"])
    assert derived(sealing, "share", client, other) == keys["share_key"]
    assert derived(agreed(keys["masking"], keys["other_masking_key"]), "pair", client, other) == keys["pair_seed"]
    assert derived(bytes.fromhex(keys["own_mask"]), "own", client) == keys["own_seed"]
    opened = ChaCha20Poly1305(bytes.fromhex(keys["share_key"])).decrypt(bytes(12), bytes.fromhex(keys["sealed"]), None)
    assert opened.hex() == "".join(keys["shares"])
    assert len(bytes.fromhex(keys["sealed"])) == 148
    names = [bytes.fromhex(EXAMPLES["roster"]), keys["client"].encode(), keys["other"].encode()]
    kinds = zip(("share of masking key", "share of own mask"), map(bytes.fromhex, keys["shares"]), strict=True)
    assert b"".join(digest(kind, *names, share) for kind, share in kinds).hex() == keys["share_digests"]


@each("shamir")
def test_shares_give_the_secret_back(example: dict[str, Any]) -> None:
    shares = {int(place): bytes.fromhex(share) for place, share in example["shares"].items()}
    total = 0
    for place, share in shares.items():
        value = int.from_bytes(share, "little")
        for other in shares:
            if other != place:
                value = value * other * pow(other - place, -1, PRIME) % PRIME
        total += value
    assert (total % PRIME).to_bytes(32, "little").hex() == example["secret"]
    assert shamir.combine(shares).hex() == example["secret"]


@each("masks")
def test_a_mask_is_the_key_stream_of_aes(example: dict[str, Any]) -> None:
    bits, start = example["bits"], example["start"]
    size = 1 if bits <= 8 else 2 if bits <= 16 else 4
    stream = Cipher(AES(bytes.fromhex(example["seed"])), CTR(bytes(16))).encryptor().update(bytes(size * (start + 5)))
    words = [int.from_bytes(stream[size * i : size * (i + 1)], "little") % 2**bits for i in range(start, start + 5)]
    assert words == example["values"]


@each("packets")
def test_a_packet_is_its_header_and_the_packed_values(example: dict[str, Any]) -> None:
    bits, values, data = example["bits"], example["values"], bytes.fromhex(example["encoded"])
    assert struct.unpack_from("<2sBBIQ", data) == (b"MK", 0, 1, bits, len(values))
    assert data[16:] == b"".join(plain_pack(values[start : start + 8], bits) for start in range(0, len(values), 8))
    assert unpack(data[16:], len(values), bits).astype(np.int64).tolist() == values


def plain_pack(values: list[int], bits: int) -> bytes:
    eight = [*values, *[0] * (8 - len(values))]
    whole, rest = divmod(bits, 8)
    out = b"".join(bytes(value >> 8 * plane & 255 for value in eight) for plane in range(whole))
    top = sum((value >> 8 * whole) % (1 << rest) << rest * place for place, value in enumerate(eight))
    return out + int(top).to_bytes(rest, "little")


@each("levels")
def test_an_update_becomes_the_stated_integers(example: dict[str, Any]) -> None:
    secure = wire.SecureRound.FromString(bytes.fromhex(example["round"]))
    scales = list(struct.unpack(f"<{len(secure.scales) // 4}f", secure.scales))
    values, integers, left = example["values"], [], []
    weight = min(example["samples"], secure.max_weight) if secure.max_weight else 1
    largest = secure.levels * max(1, secure.max_weight)
    for place, value in enumerate(values):
        block = place // secure.block
        if secure.blocks and not secure.blocks[block // 8] >> block % 8 & 1:
            left.append(value)
            continue
        scale = scales[sum(secure.blocks[n // 8] >> n % 8 & 1 for n in range(block)) if secure.blocks else block]
        integer = int(np.rint(np.float32(value) / np.float32(scale) * np.float32(weight)).clip(-largest, largest))
        integers.append(integer)
        left.append(float(np.float32(value - integer * (scale / weight))))
    integers += [weight] if secure.max_weight else []
    assert integers == example["integers"]
    assert left == example["residual"]
    bits = (2 * example["clients"] * largest).bit_length()
    assert bits == example["bits"]
    packed = b"".join(
        plain_pack([value % 2**bits for value in integers[start : start + 8]], bits)
        for start in range(0, len(integers), 8)
    )
    assert example["encoded_without_masks"][32:] == packed.hex()
    assert len(packed) == packed_size(len(integers), bits)


@each("levels")
def test_fedring_makes_the_stated_integers(example: dict[str, Any]) -> None:
    secure = wire.SecureRound.FromString(bytes.fromhex(example["round"]))
    values = np.array(example["values"], np.float32)
    integers = to_integers(values, secure, example["samples"]).integers
    assert integers.tolist() == example["integers"]
    assert values.tolist() == example["residual"]
    data = pack(integers.astype("<u4"), example["bits"])
    assert example["encoded_without_masks"][32:] == data.tobytes().hex()


@each("private_integers")
def test_private_integers_follow_from_the_job_and_the_group(example: dict[str, Any]) -> None:
    dp, count, block = example["dp"], example["clients"], 4096
    padded = -(-example["parameters"] // block) * block
    needed = example["min_results"] if example["min_results"] <= count else 0
    survivors = max(2 * count // 3 + 1, needed)
    honest = survivors - (1 if dp.get("trust_clients") else max(1, (count - 1) // 3))
    assert example["integers"] == padded
    norm = example["scale"] * dp["clip"]
    longest = min(norm + padded**0.5, (norm**2 + padded / 4 + norm + padded**0.5 / 2) ** 0.5)
    assert example["rounded_norm"] == pytest.approx(longest, rel=1e-12)
    assert example["local_variance"] == pytest.approx((dp["noise_multiplier"] * longest) ** 2 / honest, rel=1e-6)
    assert 1 <= longest / norm <= 1.01


@each("private_integers")
def test_the_sum_of_private_integers_is_rotated_back(example: dict[str, Any]) -> None:
    key = hmac.digest(bytes.fromhex(example["task"]), struct.pack(">I", 8) + b"rotation", "sha256")
    stream = Cipher(AES(key), CTR(bytes(16))).encryptor().update(bytes(4))
    signs = [-1 if stream[place // 8] >> (7 - place % 8) & 1 else 1 for place in range(32)]
    assert "".join("-" if sign < 0 else "+" for sign in signs) == example["first_signs"]
    half = 2 ** (example["bits"] - 1)
    for row, value in enumerate(example["first_values"]):
        total = 0
        for place, found in example["sum"].items():
            signed = (found + half) % (2 * half) - half
            total += signed * (-1) ** (row & int(place)).bit_count()
        assert value == pytest.approx(signs[row] * total / 64 / example["scale"], rel=1e-9, abs=1e-12)
