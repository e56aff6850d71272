"""Statements that clients sign, and digests that name things.

The digests name a task, a roster and a set of survivors. All of them are SHA-256.
"""

import hashlib
from collections.abc import Iterable, Sequence

from fedring.v1 import federation_pb2 as pb
from fedring.v1 import secure_pb2 as wire

CONTEXT = "fedring secure aggregation 1"
_SET_ASIDE = ("deadline_seconds", "model", "traceparent")


def digest_of(what: str, parts: Iterable[bytes]) -> bytes:
    """Return the digest of byte strings for one purpose, 32 bytes.

    Each string is hashed after its length.

    Args:
        what: the purpose; the digests of another one are never equal.
        parts: the byte strings, in order.
    """
    digest = hashlib.sha256()
    for part in (f"{CONTEXT}: {what}".encode(), *parts):
        digest.update(len(part).to_bytes(4, "big"))
        digest.update(part)
    return digest.digest()


def task_digest(command: pb.TrainCmd) -> bytes:
    """Return the digest of a client's task in a round, 32 bytes.

    It is the digest of the command without deadline_seconds, model and traceparent, which may differ between clients.
    """
    task = pb.TrainCmd()
    task.CopyFrom(command)
    for field in _SET_ASIDE:
        task.ClearField(field)  # type: ignore[arg-type]  # the names are known to be fields
    return digest_of("task", [task.SerializeToString(deterministic=True)])


def roster_digest(statements: Sequence[bytes]) -> bytes:
    """Return the digest that names a group, 32 bytes.

    Args:
        statements: of its members, in rising order of client id.
    """
    return digest_of("roster", statements)


def survivors_statement(roster: bytes, peers: Sequence[str], survivors: Sequence[str]) -> bytes:
    """Return the statement that a client signs before helping to unmask.

    Args:
        roster: the digest of its group.
        peers: all members whose shares have come in time, with itself, in the roster's order.
        survivors: those of them whose updates count, in the roster's order.
    """
    names = [wire.SecureSurvivors(client_ids=ids).SerializeToString(deterministic=True) for ids in (peers, survivors)]
    return digest_of("survivors", [roster, *names])
