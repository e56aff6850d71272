"""Makes the masked update of a trained model: the integers that the server adds up, under this client's masks."""

import logging
import os

import numpy as np
from numpy.typing import NDArray

from fedring.client.secure.party import Party
from fedring.client.transfer.download import HeldModel
from fedring.client.transfer.update import Update, masked_offer
from fedring.codec import CodecError, Vectors
from fedring.codec.digest import name_of
from fedring.codec.masked import Words, masked_packet
from fedring.privacy.integer_plan import IntegerPlan
from fedring.privacy.integers import RoundingFailed, encode_private
from fedring.privacy.keystream import SECRET_BYTES
from fedring.secure.errors import SecureError
from fedring.secure.levels import shorten, to_integers, zero_integers
from fedring.v1 import federation_pb2 as pb
from fedring.v1 import secure_pb2 as wire

log = logging.getLogger(__name__)


def masked_update(
    party: Party,
    base: HeldModel,
    trained: Vectors,
    samples: int,
    residual: NDArray[np.float32] | None,
    *,
    dither: bytes,
    max_clipped_share: float,
) -> Update:
    """Make the masked update that leads from `base` to `trained`, plus the residual.

    Args:
        party: this client in the round; its peers are known.
        base: the model that the training began with.
        trained: the values that it ended with, which are overwritten.
        samples: how many samples it was trained on.
        residual: what past updates left out, [num_parameters]; None = nothing.
        dither: 32 bytes that it follows from, for this update only.
        max_clipped_share: above which share of cut values zeros are sent, and all of the update is left out.

    Raises:
        CodecError: "non_finite", if a value is not finite.
        SecureError: if the round's levels or its masks cannot be used.
    """
    delta, secure = _delta(base, trained), party.command.secure
    integers = level_integers(delta, secure, samples, residual, dither=dither, max_clipped_share=max_clipped_share)
    return update_of(party.command, party.client_id, party.mask(integers), party.bits, delta)


def masked_zero(party: Party, base: HeldModel, samples: int, residual: NDArray[np.float32] | None) -> Update:
    """Make a masked update that changes nothing, with the client's full weight.

    Args:
        party: this client in the round; its peers are known.
        base: the model that the training began with.
        samples: how many samples this client's updates count for.
        residual: what past updates left out, [num_parameters], which stays as it is; None = nothing.

    Raises:
        SecureError: as for masked_update.
    """
    _check_bare(base.vectors)
    integers = zero_integers(party.command.secure, base.vectors.parameters.size, samples)
    return update_of(party.command, party.client_id, party.mask(integers), party.bits, residual)


def private_update(party: Party, plan: IntegerPlan, base: HeldModel, trained: Vectors | None) -> Update:
    """Make the masked update that leads from `base` to `trained`, with this client's share of the noise.

    It leaves no residual: what clipping and noise take away would come back later, outside of what was charged.

    Args:
        party: this client in the round; its peers are known.
        plan: of its group.
        base: the model that the training began with.
        trained: the values that it ended with, which are overwritten; None = it changes nothing, but for the noise.

    Raises:
        CodecError: "non_finite", if a value is not finite.
        SecureError: if the model has buffers, the masks cannot be used, or the integers cannot be made.
    """
    if trained is None:
        trained = Vectors(base.vectors.parameters.copy(), base.vectors.buffers)
    integers = private_integers(_delta(base, trained), plan, party.task)
    return update_of(party.command, party.client_id, party.mask(integers, plan.bits), plan.bits, None)


def level_integers(
    delta: NDArray[np.float32],
    secure: wire.SecureRound,
    samples: int,
    residual: NDArray[np.float32] | None,
    *,
    dither: bytes,
    max_clipped_share: float,
) -> NDArray[np.int32]:
    """Return an update as the integers that are added up, [n], or [n + 1] if updates count by their weights.

    Args:
        delta: the change of the parameters, [num_parameters], which becomes what the integers leave out.
        secure: what the command says of the round.
        samples: how many samples the client was trained on.
        residual: what past updates left out, [num_parameters]; None = nothing.
        dither: 32 bytes that it follows from, for this update only.
        max_clipped_share: above which share of cut values the integers say nothing but the weight, and `delta` keeps
            the whole update.

    Raises:
        CodecError: "non_finite", if a value is not finite.
        SecureError: "bad_blocks", if the round does not fit the model.
    """
    shorten(delta, secure.clip)
    if residual is not None:
        delta += residual
    rounded = to_integers(delta, secure, samples, dither=dither, max_clipped_share=max_clipped_share)
    if rounded.zeroed:
        log.warning(
            "%.1f %% of this update is too large for the round's levels, and privacy.max_clipped_share = %g: zeros are "
            "sent, and the update waits for a round with larger steps (secure_aggregation.first_norm, step, levels)",
            *(100 * rounded.clipped_share, max_clipped_share),
        )
    return rounded.integers


def private_integers(delta: NDArray[np.float32], plan: IntegerPlan, seed: bytes) -> NDArray[np.int64]:
    """Return an update as integers with noise from the operating system's randomness, [plan.padded].

    Args:
        delta: the change of the parameters, [plan.dimension].
        plan: of the group.
        seed: of the rotation, the digest of the round's task.

    Raises:
        CodecError: "non_finite", if a value is not finite.
        SecureError: "rounding_failed", if the integers are too long again and again, which is practically impossible.
    """
    if not np.isfinite(delta).all():
        raise CodecError("non_finite")
    try:
        return encode_private(delta, plan, seed, os.urandom(SECRET_BYTES))
    except RoundingFailed as error:
        raise SecureError("rounding_failed", str(error)) from error


def _check_bare(vectors: Vectors) -> None:
    if vectors.buffers.size:
        raise SecureError("has_buffers", "the buffers of a model are not masked: keep them private")


def _delta(base: HeldModel, trained: Vectors) -> NDArray[np.float32]:
    _check_bare(trained)
    return np.subtract(trained.parameters, base.vectors.parameters, out=trained.parameters)


def update_of(
    command: pb.TrainCmd, client_id: str, words: Words, bits: int, residual: NDArray[np.float32] | None
) -> Update:
    """Return the update that carries words.

    Args:
        command: the command that is answered.
        client_id: the client that sends the update.
        words: the integers modulo 2^bits, [n].
        bits: of a value.
        residual: what the update leaves out, [num_parameters]; None = nothing.
    """
    parts = masked_packet(words, bits)
    return Update(masked_offer(command, client_id, sum(map(len, parts)), name_of(*parts)), parts, residual)
