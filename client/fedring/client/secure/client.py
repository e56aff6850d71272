"""The client of secure aggregation, between the session and the user's thread.

It takes the session's events of secure aggregation, answers them, and gives the user's thread what it needs. It runs on
the session's event loop, whatever the user's thread does: keys go out while that trains, and masks are removed when it
is idle, or has begun anew after a restart. What computes or waits for the disk runs in other threads.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

from google.protobuf.message import DecodeError, Message
from grpc import StatusCode, aio

from fedring.client.config import ClientConfig
from fedring.client.errors import FederationClosed, RoundOver, UpdateRefused
from fedring.client.policy.identity import PeerCheck, check_own_key, load_signer
from fedring.client.policy.ledger import Ledger
from fedring.client.policy.privacy import SitePolicy, own_noise_refusal, refusal
from fedring.client.policy.secret import ClientSecret
from fedring.client.protection import CannotProtect, Protection
from fedring.client.secure.participant import ClientIdentity, SecureParticipant, lost_update
from fedring.client.secure.protection import SummedUpdates
from fedring.client.secure.state import RoundName, SecureState, name_of
from fedring.client.session.connection import CALL_SECONDS, stray_cancellation
from fedring.client.session.inbox import Assignment
from fedring.client.session.link import ServerLink
from fedring.client.session.retry import RetryPolicy, Verdict
from fedring.client.session.tries import Tries
from fedring.client.transfer.residual import Residual
from fedring.client.transfer.update import Update
from fedring.codec import Vectors
from fedring.daemon.config import ConfigError
from fedring.daemon.crash import crashpoint
from fedring.privacy.integer_plan import IntegerPlan
from fedring.rpc.errors import FedringError, Unavailable, UnknownRound, reason_of, status_of
from fedring.rpc.revocation import Revocations
from fedring.secure import SecureError
from fedring.signatures.digests import task_digest
from fedring.train.tensors.download import HeldModel
from fedring.v1 import federation_pb2 as pb
from fedring.v1 import secure_pb2 as wire
from fedring.v1.secure_pb2_grpc import SecureAggregationServiceStub

log = logging.getLogger(__name__)

MAX_STEP_BYTES = 2 << 20
"""The largest message of a step: a group of 100 clients, each with certificates of 8 KiB, is smaller."""

# The server answers so to damaged bytes, too: a few more tries tell the two apart.
POLICY = RetryPolicy({StatusCode.INVALID_ARGUMENT: Verdict.AGAIN})

CALL_CRASH_POINTS = {
    f"client_secure_{call}_{when}"
    for call in ("SendKeys", "SendShares", "SignSurvivors", "SendUnmaskShares")
    for when in ("begun", "done")
}
"""Crash points around each call; when it is done, the server has taken the message."""


class SecureAggregationClient:
    """The client's part in rounds with secure aggregation; owned by Federation.

    Args:
        config: the configuration.
        ledger: what this client has spent of its privacy.
        secret: the client's own, from which all follows that others must not be able to repeat.
        permits: whether the site consents to a command; called in any thread.

    Raises:
        ConfigError: if what is kept of finished rounds, the client's key, or the list of revoked certificates, cannot
            be read.
    """

    _link: ServerLink

    def __init__(
        self,
        config: ClientConfig,
        ledger: Ledger,
        secret: ClientSecret,
        permits: Callable[[pb.TrainCmd], bool] = lambda command: True,
    ) -> None:
        self._config, self._ledger, self._secret, self._permits = config, ledger, secret, permits
        self._state = SecureState(config.state_dir)
        self._participants = Participants(config, self._state)
        self._participant: SecureParticipant | None = None
        self._changed = asyncio.Condition()
        self._sending: dict[str, asyncio.Task[None]] = {}
        self._sends: asyncio.TaskGroup

    def start(self, link: ServerLink) -> None:
        """Begin to take the events of a session, on its event loop."""
        self._link = link
        link.start(self.run)

    async def run(self) -> None:
        """Answer events until the session ends, on the session's event loop."""
        events = self._link.session.round_events
        async with asyncio.TaskGroup() as self._sends:
            while True:
                await self._take(await events.get())
                async with self._changed:
                    self._changed.notify_all()

    def bound(self, command: pb.TrainCmd) -> str:
        """Return the payload that a round's masks are bound to.

        Empty = none. Any thread may ask.
        """
        try:
            record = self._state.load(name_of(command))
        except SecureError:  # this ends the round where the command is answered
            return ""
        return record.payload.decode() if record else ""

    def participant(self, assignment: Assignment) -> SecureParticipant:
        """Wait for the peers of a round, and return this client's state.

        It belongs to the user's thread.

        Raises:
            RoundOver: if the round ended before.
        """
        return self._link.call(lambda: self._wait(assignment))

    def protection(self, assignment: Assignment) -> Protection:
        """Return the protection of this client's updates in a round."""
        if not assignment.command.HasField("secure"):
            return Protection()
        config = self._config
        return Masks(assignment, self, config.client_id, config.privacy, self._ledger, self._secret)

    def fail(self, command: pb.TrainCmd, error: SecureError) -> None:
        """End a round for this client, and tell the server why.

        It belongs to the user's thread.
        """
        with suppress(FederationClosed):
            self._link.call(lambda: self._fail(name_of(command), error))

    async def _wait(self, assignment: Assignment) -> SecureParticipant:
        name, task = name_of(assignment.command), task_digest(assignment.command)
        while True:
            if reason := assignment.stop_reason:
                raise RoundOver(reason)
            participant = self._participant
            if participant and (participant.name, participant.task) == (name, task) and participant.may_mask:
                return participant
            with suppress(TimeoutError, Unavailable), stray_cancellation():
                async with asyncio.timeout(max(0.0, assignment.deadline - time.monotonic())), self._changed:
                    await self._changed.wait()

    async def _take(self, event: pb.ServerEvent) -> None:
        """Handle one event.

        An error ends the round, not the client.
        """
        message = event.secure if event.HasField("secure") else event.train
        try:
            match event.WhichOneof("event"):
                case "train":
                    await self._begin(event.train)
                case "secure":
                    await self._step(event.secure)
                case "round_ended":
                    run_id = self._link.connection.session.run_id
                    while name := self._state.find(run_id, event.round_ended.round):
                        await self._finish(name, "")
        except SecureError as error:
            await self._fail(name_of(message), error)
        except (OSError, ConfigError) as error:
            await self._fail(name_of(message), SecureError("secure_state", f"secure aggregation cannot go on: {error}"))
        except Exception:  # an event of the server must not end the client
            log.exception("an event of round %d could not be answered", message.round)
            await self._fail(name_of(message), SecureError("internal", "the client could not answer an event"))

    async def _begin(self, command: pb.TrainCmd) -> None:
        name = name_of(command)
        if not command.HasField("secure"):
            if self._participant and self._participant.name != name:
                self._stop_sending()
                self._participant = None
            await asyncio.to_thread(lambda: self._state.finish_others(name))
            return
        if await asyncio.to_thread(lambda: self._turns_down(command)):
            return  # What is refused ends no other round.
        self._participants.check_not_over(name)
        participant = self._participant
        if participant is None or participant.name != name or participant.task != task_digest(command):
            participant = await asyncio.to_thread(lambda: self._participants.open(command))
            self._stop_sending()
            self._participant = participant
        self._answer("SendKeys", participant.keys())

    def _turns_down(self, command: pb.TrainCmd) -> bool:
        return bool(refusal(self._config.privacy, self._ledger, command)) or not self._permits(command)

    async def _step(self, step: wire.SecureStep) -> None:
        name = name_of(step)
        self._participants.check_not_over(name)
        if step.ByteSize() > MAX_STEP_BYTES:
            raise SecureError("too_large", f"a message of {step.ByteSize()} bytes is above {MAX_STEP_BYTES}")
        if self._participant is None or self._participant.name != name:
            self._participant = await asyncio.to_thread(lambda: self._participants.reopen(name))
        participant = self._participant
        match step.WhichOneof("step"):
            case "roster":
                self._answer("SendShares", await asyncio.to_thread(lambda: participant.on_roster(step.roster)))
            case "peers":
                await asyncio.to_thread(lambda: participant.on_peers(step.peers))
            case "survivors":
                self._answer("SignSurvivors", await asyncio.to_thread(lambda: participant.on_survivors(step.survivors)))
            case "unmask":
                self._answer("SendUnmaskShares", await asyncio.to_thread(lambda: participant.on_unmask(step.unmask)))

    def _answer(self, call: str, message: Message) -> None:
        """Begin to send a message, in place of an earlier try."""
        if task := self._sending.pop(call, None):
            task.cancel()
        self._sending[call] = self._sends.create_task(self._send(call, message))

    def _stop_sending(self) -> None:
        sending, self._sending = self._sending, {}
        for task in sending.values():
            if task is not asyncio.current_task():
                task.cancel()

    async def _send(self, call: str, message: Any) -> None:
        """Send a message until the server has taken or refused it."""
        connection = self._link.connection
        tries = Tries(connection, POLICY)
        while True:
            # The stub is made for each try, as the connection may have got another channel since the last one.
            stub = SecureAggregationServiceStub(connection.channel)
            send: Callable[..., Awaitable[wire.SecureAck]] = getattr(stub, call)
            try:
                with tries.one():
                    crashpoint(f"client_secure_{call}_begun")
                    await send(message, metadata=connection.metadata, timeout=CALL_SECONDS)
                    connection.last_success = time.monotonic()
                    crashpoint(f"client_secure_{call}_done")
                    return
            except (aio.AioRpcError, FedringError) as error:
                reason = reason_of(error)
                log.log(
                    logging.INFO if status_of(error) is UnknownRound.status else logging.WARNING,
                    "the server did not take %s of round %d: %s",
                    *(call, message.round, reason),
                )
                if tries.judge(error) is Verdict.DROP:
                    await self._refused(message.round, reason)
                    return
            await tries.wait()

    async def _refused(self, round_: int, reason: str) -> None:
        """End the round, unless its message only came too late."""
        participant = self._participant
        if (
            reason not in ("round_closed", "unknown_round", "not_selected")
            and participant
            and participant.name.round == round_
        ):
            await self._fail(
                participant.name, SecureError(reason, f"the server has refused a message of round {round_}")
            )

    async def _finish(self, name: RoundName, reason: str) -> None:
        """End a round.

        Nothing more of it is sent, and its secrets are gone.
        """
        if self._participant and self._participant.name == name:
            self._stop_sending()
            self._participant = None
        await asyncio.to_thread(lambda: self._state.finish(name, reason))

    async def _fail(self, name: RoundName, error: SecureError) -> None:
        session = self._link.session
        error = self._participants.ended_with(name) or error  # the first reason counts
        log.error("round %d failed (%s): %s", name.round, error.reason, error)
        try:
            if self._state.begun(name):
                await self._finish(name, error.reason)
        except OSError as failed:  # the round is over in this process at least
            log.error("the end of round %d cannot be written: %s", name.round, failed)
        session.inbox.end(name.round, error.reason)
        await session.report_failure(pb.Failure(round=name.round, reason=error.reason, detail=str(error)[:1000]))
        async with self._changed:
            self._changed.notify_all()


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
        rounds: SecureAggregationClient,
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


class Participants:
    """Makes the participant of each round, with the client's identity.

    Args:
        config: The configuration.
        state: The files of the rounds.

    Raises:
        ConfigError: If the client's key, or the list of revoked certificates, cannot be read.
    """

    def __init__(self, config: ClientConfig, state: SecureState) -> None:
        self._config, self._state = config, state
        check_own_key(config.tls, config.state_dir)  # damage is told at the start, not in each round
        self._revoked = Revocations(config.tls.crl, config.tls.ca)

    def open(self, command: pb.TrainCmd) -> SecureParticipant:
        """Return the state of a new round, or of one on disk.

        All other rounds are over then.
        """
        self._state.finish_others(name_of(command))
        return SecureParticipant(command, self._identity(), self._state)

    def reopen(self, name: RoundName) -> SecureParticipant:
        """Return the state of a round that is on disk already.

        Raises:
            SecureError: If it is not, or its file is damaged.
        """
        record = self._state.load(name)
        if record is None:
            raise SecureError("other_round", f"this client has no keys in round {name.round} of {name.run_id[:64]}")
        try:
            command = pb.TrainCmd.FromString(record.command)
        except DecodeError as error:
            raise SecureError("damaged_state", f"the file of round {name.round} holds no command") from error
        return SecureParticipant(command, self._identity(), self._state)

    def check_not_over(self, name: RoundName) -> None:
        """Check that the round is not over for this client.

        The server may have forgotten what it was told.

        Raises:
            SecureError: If it is.
        """
        if self._state.finished(name):
            raise self.ended_with(name) or SecureError(
                "replayed_round", f"round {name.round} is over for this client, and its secrets are gone"
            )

    def ended_with(self, name: RoundName) -> SecureError | None:
        """Return why this client has ended a round.

        None if it has not, or for no reason of its own.
        """
        last = self._state.finished(name)
        if last and last.reason and (last.epoch, last.round) == (name.epoch, name.round):
            return SecureError(last.reason, f"this client has ended round {name.round} before")
        return None

    def _identity(self) -> ClientIdentity:
        config = self._config
        signer = load_signer(config.tls, config.state_dir)
        check = PeerCheck(
            config.client_id, signer.proof, peers=config.privacy.peers, tls=config.tls, revoked=self._revoked
        )
        log.info("this client signs with the key of the fingerprint %s", signer.fingerprint)
        return ClientIdentity(
            config.client_id, signer, check, config.privacy.min_clients, strict=config.privacy.demands
        )
