"""The examples of secure aggregation in vectors.json.

All secrets are counted out, so that the file stays the same.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedring.privacy.integer_plan import BLOCK
from fedring.privacy.integers import decode_sum
from fedring.privacy.rotation import Rotation
from fedring.secure import keys, masks, shamir
from fedring.secure.keys import seal, share_digests
from fedring.secure.levels import to_integers
from fedring.secure.limits import bits_of_sum
from fedring.secure.masks import masked_packet
from fedring.secure.roster import roster_digest, survivors_statement
from fedring.signatures.digests import CONTEXT, task_digest
from fedring.train.jobs.privacy_table import ClientPrivacy
from fedring.v1 import federation_pb2 as pb
from fedring.v1 import secure_pb2 as wire

Json = dict[str, Any]

_PRIME = 2**521 - 1
_NAMES = ("ward-1", "ward-2", "ward-3")


def render() -> Json:
    """Return the part `secure` of vectors.json."""
    command = _command()
    statements = [_statement(command, number) for number in range(len(_NAMES))]
    roster = roster_digest(statements)
    return {
        "task": {"command": command.SerializeToString(deterministic=True).hex(), "digest": task_digest(command).hex()},
        "statements": [statement.hex() for statement in statements],
        "roster": roster.hex(),
        "survivors": {
            "peers": _NAMES,
            "survivors": [_NAMES[0], _NAMES[2]],
            "statement": survivors_statement(roster, _NAMES, [_NAMES[0], _NAMES[2]]).hex(),
        },
        "keys": _keys(roster),
        "shamir": [_shares(2, (1, 2)), _shares(3, (2, 3, 5)), _shares(3, (1, 2, 4, 5))],
        "masks": [_mask(bits, start) for bits, start in ((7, 0), (7, 32), (12, 16), (17, 0), (32, 48))],
        "packets": [
            _packet(bits, count) for bits, count in ((1, 9), (7, 8), (7, 3), (8, 5), (12, 10), (17, 9), (32, 2))
        ],
        "levels": [
            _levels("all blocks, the last one short", [], 0, 1),
            _levels("the first and the last block, weighted", [0, 2], 1000, 30),
            _levels("a weight above the largest", [1], 20, 30),
            _levels(
                "a small weight, and integers that are cut to the range of all weights", [1, 2], 20, 3, (0.05, 0.1)
            ),
        ],
        "private_integers": [
            _private("as many bits as are needed", 5, 1000, 4),
            _private("two blocks, more survivors", 100, 5000, 95, noise_multiplier=0.5),
            _private("clients that trust each other", 100, 25_450, 67, trust_clients=True),
            _private("more bits than are needed", 8, 4096, 6, bits=24, clip=2.0),
        ],
    }


def _counted(first: int, size: int = 32) -> bytes:
    return bytes((first + place) % 256 for place in range(size))


def _secrets(number: int) -> keys.RoundSecrets:
    return keys.RoundSecrets(_counted(10 * number), _counted(10 * number + 3), _counted(10 * number + 6))


def _command() -> pb.TrainCmd:
    secure = wire.SecureRound(scales=np.array([0.5, 0.25], "<f4").tobytes(), block=16, levels=7)
    return pb.TrainCmd(round=3, run_id="run-1", epoch=1, model_digest="blake3-" + "0" * 64, seed=7, secure=secure)


def _statement(command: pb.TrainCmd, number: int) -> bytes:
    drawn = _secrets(number)
    return wire.KeyStatement(
        context=CONTEXT,
        client_id=_NAMES[number],
        run_id=command.run_id,
        epoch=command.epoch,
        round=command.round,
        task=task_digest(command),
        sealing_key=keys.public_key(drawn.sealing),
        masking_key=keys.public_key(drawn.masking),
        own_mask=keys.commitment(drawn.own_mask),
    ).SerializeToString(deterministic=True)


def _keys(roster: bytes) -> Json:
    first, second = _secrets(0), _secrets(1)
    shared = keys.share_key(first.sealing, keys.public_key(second.sealing), roster, *_NAMES[:2])
    # Real shares would be random; sealing treats them as bytes.
    shares = _counted(1, shamir.SHARE_BYTES), _counted(2, shamir.SHARE_BYTES)
    return {
        "client": _NAMES[0],
        "other": _NAMES[1],
        "sealing": first.sealing.hex(),
        "masking": first.masking.hex(),
        "own_mask": first.own_mask.hex(),
        "commitment": keys.commitment(first.own_mask).hex(),
        "other_sealing_key": keys.public_key(second.sealing).hex(),
        "other_masking_key": keys.public_key(second.masking).hex(),
        "share_key": shared.hex(),
        "pair_seed": keys.pair_seed(first.masking, keys.public_key(second.masking), roster, *_NAMES[:2]).hex(),
        "own_seed": keys.own_seed(first.own_mask, roster, _NAMES[0]).hex(),
        "shares": [share.hex() for share in shares],
        "sealed": seal(shared, *shares).hex(),
        "share_digests": share_digests(roster, *_NAMES[:2], *shares).hex(),
    }


def _shares(threshold: int, places: Sequence[int]) -> Json:
    """Return shares of a polynomial with large coefficients.

    A client draws them at random.
    """
    secret = _counted(200)
    polynomial = [int.from_bytes(secret, "little"), *(_PRIME - 3**power for power in range(1, threshold))]
    shares = {
        place: sum(coefficient * place**power for power, coefficient in enumerate(polynomial)) % _PRIME
        for place in places
    }
    told = {str(place): share.to_bytes(shamir.SHARE_BYTES, "little").hex() for place, share in shares.items()}
    return {"threshold": threshold, "shares": told, "secret": secret.hex()}


def _mask(bits: int, start: int) -> Json:
    seed = _counted(bits)
    words = masks.mask(seed, bits, start, start + 5).astype(np.int64) & ((1 << bits) - 1)
    return {"seed": seed.hex(), "bits": bits, "start": start, "values": words.tolist()}


def _packet(bits: int, count: int) -> Json:
    values = [(place + 1) * 2654435761 % (1 << bits) for place in range(count)]
    parts = masked_packet(np.array(values, np.uint64).astype(masks.word_type(bits)), bits)
    return {"bits": bits, "values": values, "encoded": b"".join(parts).hex()}


def _levels(
    shows: str, sent: Sequence[int], most: int, weight: int, steps: Sequence[float] = (0.5, 0.1, 2.0**-20)
) -> Json:
    length, block, clients = 40, 16, 8
    flags = np.zeros(3, np.bool_)
    flags[list(sent)] = True
    scales = np.array(steps[: len(sent) or 3], "<f4")
    secure = wire.SecureRound(
        scales=scales.tobytes(),
        blocks=np.packbits(flags, bitorder="little").tobytes() if sent else b"",
        block=block,
        levels=7,
        max_weight=most,
    )
    values = (np.arange(length, dtype=np.float32) - 11) / np.float32(8)
    # Before to_integers, which overwrites the values with the residual.
    told = values.tolist()
    integers = to_integers(values, secure, weight).integers
    bits = bits_of_sum(clients, 7, max(1, most))
    return {
        "shows": shows,
        "round": secure.SerializeToString(deterministic=True).hex(),
        "values": told,
        "samples": weight,
        "clients": clients,
        "bits": bits,
        "integers": integers.tolist(),
        "residual": values.tolist(),
        "encoded_without_masks": b"".join(masked_packet(masks.wrap(integers, bits), bits)).hex(),
    }


def _private(shows: str, clients: int, dimension: int, needed: int, **keys: Any) -> Json:
    """Return a plan, the rotation's signs, and the decoding of a sum.

    The sum has three integers that are not 0.
    """
    table = {"noise_multiplier": 1.0, "clip": 0.5, "adaptive": False, "noise_by": "clients", **keys}
    dp = ClientPrivacy.model_validate(table)
    plan, seed = dp.plan(clients, dimension, needed), _counted(clients)
    signs = np.zeros(BLOCK)
    signs[0] = np.sqrt(BLOCK)  # the matrix makes ones of it
    Rotation(seed, BLOCK).undo(signs, 0)
    integers = {0: 1000, 7: 2**plan.bits - 300, BLOCK - 1: 5}
    whole = np.zeros(BLOCK, np.int64)
    whole[list(integers)] = list(integers.values())
    return {
        "shows": shows,
        "dp": table,
        "clients": clients,
        "min_results": needed,
        "parameters": dimension,
        "bits": plan.bits,
        "integers": plan.padded,
        "scale": plan.scale,
        "rounded_norm": plan.rounded_norm,
        "local_variance": plan.local_variance,
        "task": seed.hex(),
        "first_signs": "".join("-" if sign < 0 else "+" for sign in signs[:32]),
        "sum": {str(place): value for place, value in integers.items()},
        "first_values": decode_sum(whole, plan, seed, 0)[:8].tolist(),
    }
