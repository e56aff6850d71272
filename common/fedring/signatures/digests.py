"""SHA-256 digests that name things, for one purpose each."""

import hashlib
from collections.abc import Iterable

from fedring.v1 import federation_pb2 as pb

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
