"""The protection of updates by masks, as the user's thread sees it."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

from fedring.client.errors import UpdateRefused
from fedring.client.policy.ledger import Ledger
from fedring.client.policy.privacy import SitePolicy, own_noise_refusal
from fedring.client.policy.promises import dp_of
from fedring.client.policy.secret import DITHER, ClientSecret
from fedring.client.protection import CannotProtect, Protection
from fedring.client.secure.masked import Cover, MaskedUpdates
from fedring.client.secure.participant import SecureParticipant, lost_update
from fedring.client.session.inbox import Assignment
from fedring.client.transfer.residual import Residual
from fedring.client.transfer.update import Update
from fedring.codec import Vectors
from fedring.privacy.integer_plan import IntegerPlan
from fedring.secure import SecureError
from fedring.secure.levels import bits_of
from fedring.secure.masks import MASKED
from fedring.train.tensors.download import HeldModel
from fedring.v1 import federation_pb2 as pb


class MaskedRounds(Protocol):
    """The rounds of one client. Any thread may call it."""

    def participant(self, assignment: Assignment) -> SecureParticipant:
        """Wait for the peers; raises RoundOver if the round ended before."""
        ...

    def bound(self, command: pb.TrainCmd) -> str:
        """Return the payload that a round's masks are bound to."""
        ...

    def fail(self, command: pb.TrainCmd, error: SecureError) -> None:
        """End a round for this client, and tell the server why."""
        ...


class SummedUpdates(Protection):
    """Updates of integers, which the server only adds up.

    fl-client covers them with masks. The simulation does without, as masks cancel in a sum.

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


class Masks(SummedUpdates):
    """The masks of one client in one round.

    Args:
        assignment: The round.
        rounds: All rounds of this client.
        client_id: The client.
        policy: What the site demands.
        ledger: What this client has spent of its privacy.
        secret: The client's own.
    """

    def __init__(
        self,
        assignment: Assignment,
        rounds: MaskedRounds,
        client_id: str,
        policy: SitePolicy,
        ledger: Ledger,
        secret: ClientSecret,
    ) -> None:
        super().__init__(assignment.command, client_id, policy, secret)
        self._assignment, self._rounds, self._ledger = assignment, rounds, ledger

    def update(
        self, base: HeldModel, trained: Vectors | None, samples: int, residual: Residual | None
    ) -> Update | None:
        """Make the masked update, when the peers are known: see Protection."""
        participant = self._rounds.participant(self._assignment)
        try:
            charge, parameters = partial(self._charge, participant.masks), base.vectors.parameters.size
            maker = self.maker(len(participant.roster.members), parameters, participant.mask, charge)
            return maker.make(base, trained, samples, residual)
        except SecureError as error:
            self._rounds.fail(self._command, error)
            raise CannotProtect(error.reason, str(error)) from error

    def has_lost_update(self) -> bool:
        """See Protection. Masks cover one payload only."""
        lost = bool(self._rounds.bound(self._command))
        if lost:
            self._rounds.fail(self._command, lost_update(self._command.round))
        return lost

    def may_send(self, payload: str) -> bool:
        """See Protection."""
        return payload == self._rounds.bound(self._command)

    def bind(self, payload: str) -> None:
        """See Protection."""
        try:
            self._rounds.participant(self._assignment).bind(payload)
        except (SecureError, OSError) as error:
            why = error if isinstance(error, SecureError) else SecureError("secure_state", str(error))
            self._rounds.fail(self._command, why)
            raise UpdateRefused(why.reason, str(why)) from error

    def _charge(self, masks: bytes, plan: IntegerPlan) -> None:
        update = masks.hex()  # masks cover one update only, so they name it
        if why := own_noise_refusal(self._policy, self._ledger, self._command, plan, update):
            raise SecureError("privacy_policy", why)
        try:
            self._ledger.charge_own(self._command, plan.charge, update)
        except OSError as error:
            raise SecureError("secure_state", f"what the update costs cannot be noted: {error}") from error
