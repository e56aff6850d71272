"""Updates made by hand, for clients that train nothing. Nothing of torch is imported."""

from typing import Any

from fedring.codec.digest import name_of, update_name
from fedring.v1 import federation_pb2 as pb


def header_of(
    command: pb.TrainCmd, client: str, payload: bytes, *, samples: int = 1, **changes: Any
) -> pb.UpdateHeader:
    """Return a header for a payload of fp32 deltas that fits the command, with these changes."""
    packet = pb.Packet(
        vector=pb.VECTOR_PARAMETERS, kind=pb.KIND_DELTA, encoding="fp32", bytes=len(payload), num_samples=samples
    )
    facts: dict[str, Any] = {
        "run_id": command.run_id,
        "epoch": command.epoch,
        "round": command.round,
        "client_id": client,
        "base_digest": command.model_digest,
        "schema_hash": command.schema_hash,
        "packets": [packet],
        "total_bytes": len(payload),
    }
    return pb.UpdateHeader(**{**facts, **changes})


def named_offer(header: pb.UpdateHeader, payload: bytes, digest: str = "") -> pb.UpdateOffer:
    """Return the offer of an update; the payload's digest may be known already."""
    text, digest = header.SerializeToString(), digest or name_of(payload)
    return pb.UpdateOffer(header=text, payload_digest=digest, name=update_name(text, digest))
