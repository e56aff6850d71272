"""Updates of integers that are only added up, and their protection.

fl-client covers the integers with masks. The simulation does without, as masks cancel in a sum.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedring.client.policy.privacy import SitePolicy
from fedring.client.policy.promises import dp_of
from fedring.client.policy.secret import DITHER, ClientSecret
from fedring.client.protection import Protection
from fedring.client.transfer.update import TrainingReport, Update, header_of, offered
from fedring.codec import CodecError, Vectors
from fedring.codec.digest import name_of
from fedring.privacy.integer_plan import IntegerPlan
from fedring.privacy.integers import RoundingFailed, encode_private
from fedring.privacy.keystream import SECRET_BYTES
from fedring.secure import SecureError
from fedring.secure.levels import bits_of, shorten, to_integers, zero_integers
from fedring.secure.masks import MASKED, Words, masked_packet
from fedring.signatures.digests import task_digest
from fedring.train.tensors.download import HeldModel
from fedring.v1 import federation_pb2 as pb
from fedring.v1 import secure_pb2 as wire

log = logging.getLogger(__name__)


Cover = Callable[[NDArray[np.signedinteger], int], Words]
"""Makes the words of a payload of integers and of the bits of each: with a client's masks, or without any."""


@dataclass(frozen=True, slots=True, eq=False)
class MaskedUpdates:
    """Makes the masked updates of one client in one round."""

    command: pb.TrainCmd
    client_id: str
    cover: Cover
    bits: int  # of a value
    plan: IntegerPlan | None = None  # of the noise of the group's clients; None = levels, without noise
    dither: bytes = b""  # 32 bytes that the dither of levels follows from, for one update only
    max_clipped_share: float = 1.0  # of values that are cut; above it, levels are zeros

    def make(
        self, base: HeldModel, trained: Vectors | None, samples: int, residual: NDArray[np.float32] | None
    ) -> Update:
        """Make the update that leads from `base` to `trained`, plus the residual.

        With noise, it leaves no residual: what clipping and noise take away would come back later, uncharged.

        Args:
            base: The model that the training began with.
            trained: The values that it ended with, which are overwritten; None = the update changes nothing, and counts
                as much as any other.
            samples: How many samples it was trained on.
            residual: What past updates left out, [num_parameters]; None = nothing.

        Raises:
            CodecError: "non_finite", if a value is not finite.
            SecureError: If the model has buffers, or the round's levels or the masks cannot be used.
        """
        if base.vectors.buffers.size:
            raise SecureError("has_buffers", "the buffers of a model are not masked: keep them private")
        integers: NDArray[np.signedinteger]
        if self.plan is not None:
            integers, left = private_integers(_change(base, trained), self.plan, task_digest(self.command)), None
        elif trained is None:
            integers = zero_integers(self.command.secure, base.vectors.parameters.size, samples)
            left = residual
        else:
            left = _change(base, trained)
            most = self.max_clipped_share
            integers = level_integers(
                left, self.command.secure, samples, residual, dither=self.dither, max_clipped_share=most
            )
        return _update_of(self.command, self.client_id, self.cover(integers, self.bits), self.bits, left)


def level_integers(
    delta: NDArray[np.float32],
    secure: wire.SecureRound,
    samples: int,
    residual: NDArray[np.float32] | None,
    *,
    dither: bytes,
    max_clipped_share: float,
) -> NDArray[np.int32]:
    """Return the integers of an update, in the round's levels.

    They are [n], or [n + 1] if updates count by their weights.

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
    """Return an update as integers with noise, [plan.padded].

    The noise follows from the operating system's randomness.

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


def _change(base: HeldModel, trained: Vectors | None) -> NDArray[np.float32]:
    """Return the change of the parameters, [num_parameters], which overwrites the trained ones."""
    if trained is None:
        return np.zeros_like(base.vectors.parameters)
    return np.subtract(trained.parameters, base.vectors.parameters, out=trained.parameters)


def _update_of(
    command: pb.TrainCmd, client_id: str, words: Words, bits: int, residual: NDArray[np.float32] | None
) -> Update:
    """Return the update that carries words.

    Its header says nothing of the training.

    Args:
        command: the command that is answered.
        client_id: the client that sends the update.
        words: the integers modulo 2^bits, [n].
        bits: of a value.
        residual: what the update leaves out, [num_parameters]; None = nothing.
    """
    parts = masked_packet(words, bits)
    size = sum(map(len, parts))
    packet = pb.Packet(vector=pb.VECTOR_PARAMETERS, kind=pb.KIND_DELTA, encoding=MASKED, bytes=size)
    header = header_of(command, client_id, [packet], TrainingReport(samples=1))
    return Update(header, offered(header, name_of(*parts)), parts, residual)


class SummedUpdates(Protection):
    """The protection of one client's updates, but for the masks.

    Args:
        command: The command of the round.
        client_id: The client.
        policy: What the site demands.
        secret: The client's own.
    """

    def __init__(self, command: pb.TrainCmd, client_id: str, policy: SitePolicy, secret: ClientSecret) -> None:
        self._command, self._client_id, self._policy, self._secret = command, client_id, policy, secret
        self.trains_on_residual = bool(command.secure.blocks)

    def residual_schema(self, schema_hash: bytes) -> bytes:
        """See Protection."""
        return schema_hash + MASKED.encode()

    def weight(self, samples: int) -> int:
        """See Protection."""
        return samples if self._command.secure.max_weight else 0

    def maker(
        self, clients: int, parameters: int, cover: Cover, charge: Callable[[IntegerPlan], None] = lambda plan: None
    ) -> MaskedUpdates:
        """Return the maker of this client's updates.

        Args:
            clients: How many clients its group has.
            parameters: How many parameters the model has.
            cover: Puts masks over integers, or none.
            charge: Charges an update with noise of this client's own, before it is made.

        Raises:
            SecureError: If this client cannot add its share of the noise, or does not.
        """
        command, privacy = self._command, dp_of(self._command.job)
        if privacy is None:
            dither, most = self._secret.derive(command, DITHER), self._policy.max_clipped_share
            bits = bits_of(command.secure, clients)
            return MaskedUpdates(command, self._client_id, cover, bits, dither=dither, max_clipped_share=most)
        try:
            plan = privacy.plan(clients, parameters, command.job.min_results)
            charge(plan)
        except ValueError as error:
            raise SecureError("no_plan", f"this client cannot add its share of the noise: {error}") from error
        return MaskedUpdates(command, self._client_id, cover, plan.bits, plan)
