"""Rounds with secure aggregation, as a kind of round.

Whatever a client is told is durable before. What was decided once is never decided again, also after a restart.
"""

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import SystemRandom
from typing import Any

from grpc import aio

from fedring.codec import CodecError
from fedring.daemon.metrics import SECONDS, Registry
from fedring.daemon.wording import listed
from fedring.rpc.certificates import identity_of, load_authorities
from fedring.rpc.errors import BadRequest, UnknownRound
from fedring.rpc.identity import Role
from fedring.secure import SecureError
from fedring.secure.roster import Member
from fedring.server.model.masked_sum import BadSum, GroupMasks
from fedring.server.round.dispatch import Dispatch
from fedring.server.round.events import OPEN, Closed, Failed, Phase, Stepped, Steps
from fedring.server.round.open_round import CannotResume, KindMaker, OpenRound, RoundKind
from fedring.server.running.opening import RECOVERY_SECONDS
from fedring.server.running.rounds import Rounds
from fedring.server.secure import events as ev
from fedring.server.secure import machine as sm
from fedring.server.secure.combining import unmask
from fedring.server.secure.events import SecureStep
from fedring.server.secure.exchange import KINDS, Message, SecureExchange, StepEvents
from fedring.server.secure.machine import SecureSteps, form_groups
from fedring.server.sessions.sessions import Sessions
from fedring.server.state.facts import Facts
from fedring.server.state.rows import Acceptance, ChargeRow, RoundRow
from fedring.server.state.sql.rounds import RoundStore
from fedring.server.state.sql.schema import SecureMessageRow, SecureRoundRow
from fedring.signatures.proofs import BadProof, Proof, check_chain
from fedring.v1 import secure_pb2 as wire
from fedring.v1 import secure_pb2_grpc as rpc

log = logging.getLogger(__name__)

_STEPS: dict[type[Message], SecureStep] = {
    wire.SecureKeys: SecureStep.KEYS,
    wire.SecureShares: SecureStep.SHARES,
    wire.SurvivorsSignature: SecureStep.SURVIVORS,
    wire.UnmaskShares: SecureStep.UNMASK,
}
_MOST_BYTES = 1 << 16
"""The longest message of a client: the shares of a group of 100, whose ids may have 128 letters, have 35 KB."""

_COMMITS: dict[type[ev.Event], str] = {
    ev.Grouped: "roster",
    ev.PeersChosen: "peers",
    ev.SurvivorsChosen: "survivors",
    ev.SignersChosen: "signers",
    ev.GroupFailed: "failure",
}
"""Names of the commits of decisions, for fault tests."""

CRASH_POINTS = {
    f"{when}_secure_{what}_commit"
    for what in ("start", "keys", "roster", "shares", "peers", "survivors", "signature", "signers", "unmask")
    for when in ("before", "after")
}
"""Crash points around the storing of clients' messages, and around each decision that they are told of."""

FAILURE_CRASH_POINTS = {"before_secure_failure_commit", "after_secure_failure_commit"}
"""Crash points around the decision that the sum of a group will never be known."""


class SecureMetrics:
    """Counts the steps of all groups of all rounds."""

    def __init__(self, registry: Registry) -> None:
        steps = [step for step in ev.SecureStep if step is not ev.SecureStep.DONE]
        text = "What each step of secure aggregation took, group by group."
        self.seconds = registry.histogram("fl_server_secure_step_seconds", text, SECONDS, step=steps)
        text = "Clients that secure aggregation went on without from each of its steps on."
        self.lost = registry.counter("fl_server_secure_lost_clients_total", text, step=steps)


class SecureRounds(KindMaker):
    """The kind of rounds with secure aggregation.

    It takes the messages that clients send for them.
    """

    wire = wire.DESCRIPTOR

    @classmethod
    def declare(cls, registry: Registry) -> SecureMetrics:
        """See KindMaker.declare."""
        return SecureMetrics(registry)

    def __init__(
        self,
        rounds: Rounds,
        facts: Facts,
        sessions: Sessions,
        metrics: SecureMetrics,
        authority: Path | None,
    ) -> None:
        self._rounds, self._facts, self._sessions, self._metrics = rounds, facts, sessions, metrics
        self._dispatch = Dispatch(sessions)
        self._check = partial(check_identity, authority=authority)

    def kind_of(self, open_: OpenRound) -> RoundKind | None:
        """Return the course of a round with secure aggregation."""
        settings = open_.job.secure_aggregation
        if settings is None:
            return None
        needed, own_noise = open_.job.min_clients_to_aggregate, open_.job.dp is not None
        rules = ev.SecureRules(settings.step_seconds, needed, settings.group_size, own_noise=own_noise)
        return SecureRound(open_, rules, self._rounds, self._facts, self._dispatch, self._metrics)

    def outlasts(self, row: RoundRow) -> bool:
        """Return whether clients may hold secrets of an old round."""
        return "secure" in row.stats

    def add_services(self, server: aio.Server) -> None:
        """See KindMaker.add_services."""
        rpc.add_SecureAggregationServiceServicer_to_server(SecureAggregationService(self.take, self._sessions), server)

    async def take(self, client: str, message: Message) -> None:
        """Take a client's message into its round.

        It is durable when this returns. It may be repeated.

        Raises:
            Unavailable: if the server has just started, and the round waits to be resumed.
            UnknownRound: "unknown_round" if another round, or none, has secure aggregation now; "not_selected" if the
                client is none of the round's; "round_closed" if the step is over for this client; "other_message" if
                another message of this kind was taken from the client.
            BadRequest: "bad_secure_message", if the message does not fit the round.
            StorageFailed: if it cannot be kept.
        """
        kind = self._find(message.round, client)
        step, body = _STEPS[type(message)], message.SerializeToString(deterministic=True)
        if len(body) > _MOST_BYTES:
            raise BadRequest(f"{len(body)} bytes are above {_MOST_BYTES}", reason="bad_secure_message")
        taken = kind.exchange.messages[step]
        if client not in taken:
            kind.exchange.check_step(step, client)
            member = await self._facts.work(kind.exchange.check_message, client, message, self._check)
            # Asked again, because a repeated message may have been stored during the check.
            if client not in taken:
                await self._commit(kind, client, step, body, member)
        if taken[client] != body:
            raise _other(client, step)

    async def _commit(
        self, kind: "SecureRound", client: str, step: SecureStep, body: bytes, member: Member | None
    ) -> None:
        """Make a message durable, then let it count.

        The same call may be under way a second time.
        """
        number, exchange = kind.open.row.round, kind.exchange
        self._find(number, client)  # nothing is kept of a round that has ended while the message was checked
        if member is not None:
            exchange.add_member(member)
        row = SecureMessageRow(number, client, KINDS[step], body)
        if await self._facts.db(self._facts.store.kept.add, row, f"secure_{row.kind}") is Acceptance.OTHER:
            raise _other(client, step)
        self._find(number, client)
        if client not in exchange.messages[step]:
            exchange.check_step(step, client)
            exchange.messages[step][client] = body
            if member is not None:
                exchange.members[client] = member  # another call of the client may have tried with other keys
            kind.happened(ev.Answered(step, client))

    def _find(self, number: int, client: str) -> "SecureRound":
        """Return the round, if it takes the client's messages."""
        self._rounds.interrupted.check(number)
        open_ = self._rounds.get(number)
        kind = open_.kind if open_ is not None and open_.phase in OPEN else None
        if not isinstance(kind, SecureRound) or not kind.exchange.has_begun:
            raise UnknownRound(f"round {number} is not open, or has no secure aggregation")
        if client not in kind.exchange.state.clients:
            raise UnknownRound(f"{client} was not selected for round {number}", reason="not_selected")
        return kind


class SecureAggregationService(rpc.SecureAggregationServiceServicer):
    """Receives the secure-aggregation messages of clients in session.

    Each is durable before it is answered, and may be repeated.
    """

    def __init__(self, take: Callable[[str, Message], Awaitable[None]], sessions: Sessions) -> None:
        self._take_from, self._sessions = take, sessions

    async def _take(self, request: Message, context: Any) -> wire.SecureAck:
        session = self._sessions.of(context)
        await self._take_from(session.client_id, request)
        return wire.SecureAck()

    SendKeys = SendShares = SignSurvivors = SendUnmaskShares = _take


class SecureRound(RoundKind):
    """The secure aggregation of one round.

    Attributes:
        exchange: the clients' messages.
    """

    tells_all = True
    alone = True
    recoverable = (BadSum,)

    def __init__(
        self,
        open_: OpenRound,
        rules: ev.SecureRules,
        rounds: Rounds,
        facts: Facts,
        dispatch: Dispatch,
        metrics: SecureMetrics,
    ) -> None:
        super().__init__(open_)
        self.exchange = SecureExchange(open_)
        self._events = StepEvents(open_, self.exchange)
        self._rules, self._rounds, self._facts = rules, rounds, facts
        self._dispatch, self._metrics = dispatch, metrics
        self._random = SystemRandom()
        self._masks: dict[int, GroupMasks] = {}  # what the unmasking has given, by the number of the group
        self._seconds: dict[str, float] = {}  # what each step has taken, in the group in which it took longest
        self._liars: frozenset[str] = frozenset()  # clients that were proved to send wrong shares

    async def prepare(self) -> None:
        """Leave out those that have sent wrong shares before."""
        self.open.left_out = await self._facts.db(liars_before, self._facts.store.rounds, self.open.row)

    async def start(self, row: RoundRow) -> None:
        """Note the epoch of the round before its clients know it."""
        store = self._facts.store
        begun = SecureRoundRow(row.round, store.epoch, [])
        await self._facts.db(store.kept.put, begun, "secure_start")

    def steps(self, clients: frozenset[str]) -> Steps | None:
        """Return the first step: waiting for the clients' keys."""
        return SecureSteps(ev.ProtocolState(self._rules, clients, time.monotonic()))

    async def perform(self, effect: object) -> None:
        """Perform an effect of the machine.

        A decision is made durable before anybody is told of it.
        """
        match effect:
            case ev.FormGroups(clients):
                groups = form_groups(clients, self._rules.group_size, self._random)
                await self._decide(ev.Grouped(groups))
            case ev.CombineShares(place):
                await self._combine(place)
            case ev.PeersChosen() | ev.SurvivorsChosen() | ev.SignersChosen() | ev.GroupFailed():
                await self._decide(effect)

    async def restore(self) -> Steps | None:
        """Return the state of the steps that a restart has interrupted."""
        facts = self._facts
        kept, number = facts.store.kept, self.open.row.round
        decided = next(iter(await facts.db(kept.of_round, SecureRoundRow, number)), None)
        messages = await facts.db(kept.of_round, SecureMessageRow, number)
        if decided is None or decided.epoch != facts.store.epoch:
            text = "the server was restored, and clients must not mask two updates in the same way"
            raise CannotResume("restored", text)
        since = time.monotonic() + RECOVERY_SECONDS
        try:
            self.exchange.load(messages)
        except SecureError as error:
            raise CannotResume(error.reason, str(error)) from error
        return SecureSteps(self.exchange.restored(self._rules, decided, since))

    def resumed(self) -> None:
        """Take up the decisions of before the restart."""
        state = self.exchange.state
        for group in state.groups:
            for client in group.liars:
                self._lied(client, "that was found before the restart")
        for client in sm.out(state):
            self._rounds.handle(self.open, Failed(client, self.open.row.round))
        if state.chosen:  # clients may have helped to remove masks: no update is added any more
            self._rounds.handle(self.open, Closed())

    def check_update(self, client: str) -> None:
        """Check that the client is still part of the secure aggregation.

        Raises UnknownRound if it is not.
        """
        self.exchange.check_update(client)

    def members_with(self, client: str) -> int:
        """Return the number of clients in the client's group."""
        return self.exchange.members_with(client)

    def waits_for(self, client: str) -> bytes:
        """Return the event of the client's step, or of its exclusion."""
        return self._events.waits_for(client) if self.exchange.has_begun else b""

    @property
    def sums(self) -> list[GroupMasks] | None:
        """The groups whose sums count, with their masks."""
        return [self._masks[place] for place, group in enumerate(self.exchange.state.groups) if not group.reason]

    async def lost(self, clients: frozenset[str], reason: str) -> bool:
        """Fail the groups with updates of these clients.

        Returns:
            Whether the round can still publish.
        """
        for place, group in enumerate(self.exchange.state.groups):
            if not group.reason and clients & set(group.survivors):
                await self._decide(ev.GroupFailed(place, reason))
        return not isinstance(sm.due(self.exchange.state, frozenset(), time.monotonic()), ev.GiveUp)

    async def recover(self, error: CodecError) -> bool:
        """Forget a group whose sum is impossible. The round may have others."""
        return isinstance(error, BadSum) and await self.lost(frozenset({error.group}), error.reason)

    def figures(self) -> dict[str, Any]:
        """Return how far the steps are, as JSON."""
        return {"secure": self.exchange.figures(self._seconds)} if self.exchange.has_begun else {}

    def stats(self) -> dict[str, Any]:
        """Return the progress and the liars, for the round's row."""
        return self.figures() | ({"liars": sorted(self._liars)} if self._liars else {})

    def happened(self, event: ev.Event) -> None:
        """Apply an event to the machine, and count the steps it ends."""
        now, before = time.monotonic(), self.exchange.state
        self._rounds.handle(self.open, Stepped(event))
        after = self.exchange.state
        for step, seconds in sm.took(before, after, now):
            self._seconds[step] = max(self._seconds.get(step, 0.0), seconds)
            self._metrics.seconds.labels(step).observe(seconds)
        lost = sm.lost(before)
        for name, count in sm.lost(after).items():
            self._metrics.lost.labels(name).inc(max(0, count - lost.get(name, 0)))

    async def _decide(self, event: ev.Grouped | ev.Decision) -> None:
        """Make a decision durable, then tell the clients."""
        open_, store = self.open, self._facts.store
        row = self.exchange.row(open_.row.round, store.epoch, event)
        # Whoever can remove the masks sees the sum, whatever becomes of the round.
        charge = charge_of_sums(open_, self.exchange.state) if isinstance(event, ev.SignersChosen) else None
        await self._facts.db(store.kept.put, row, f"secure_{_COMMITS[type(event)]}", charge)
        if open_.phase not in OPEN:
            return  # the round was stopped meanwhile
        before = self.exchange.state
        self.happened(event)
        self._tell(before)

    def _tell(self, before: ev.ProtocolState) -> None:
        """Tell clients of their new step, or that they are out."""
        open_, after = self.open, self.exchange.state
        for place, group in enumerate(after.groups):
            if group.reason and (not before.groups or not before.groups[place].reason):
                _note(self._rounds, open_, f"the group of {listed(group.members)} has failed: {group.reason}")
        late = sorted(sm.out(after) - sm.out(before))
        if open_.phase is Phase.TRAINING:
            for client in late:
                self._rounds.handle(open_, Failed(client, open_.row.round))
            if late:
                _note(self._rounds, open_, f"the secure aggregation goes on without {listed(late)}")
        changed = (g.members for place, g in enumerate(after.groups) if before.groups[place : place + 1] != (g,))
        self._dispatch.ask(open_, sorted({*late, *(name for members in changed for name in members)}))

    async def _combine(self, place: int) -> None:
        agreed, answers = self.exchange.agreed(place), self.exchange.shares_of(place)
        done = await self._facts.heavy(unmask, agreed, answers, self.exchange.bits(place))
        for client in sorted(done.liars):
            self._lied(client, done.liars[client])
        if done.masks is None:
            unknown = listed(done.unknown)
            log.error("round %d: too few shares of the secrets of %s are right", self.open.row.round, unknown)
            liars = tuple(sorted(done.liars))
            return await self._decide(ev.GroupFailed(place, "bad_unmask_shares", liars))
        self._masks[place] = replace(done.masks, integers=self.exchange.integers(place))
        self.happened(ev.Combined(place))

    def _lied(self, client: str, why: str) -> None:
        """Note that a client has sent wrong shares.

        The job's later rounds go on without it.

        Args:
            client: the client.
            why: a clause on its fault.
        """
        if client in self._liars:
            return
        self._liars |= {client}
        title = self.open.title
        text = f"{title}: bad_share: {client} sent wrong shares, and later rounds go on without it: {why}"
        self._rounds.journal.note(self.open, "client_lied", text, client)


def liars_before(rounds: RoundStore, row: RoundRow) -> frozenset[str]:
    """Return the clients that lied in earlier rounds of the job.

    Each round tells the next.
    """
    rows = rounds.newest(1, row.job_id, row.round)
    return frozenset(name for last in rows for key in ("left_out", "liars") for name in last.stats.get(key, ()))


def _note(rounds: Rounds, open_: OpenRound, text: str) -> None:
    open_.failures.append(text)
    rounds.journal.tell(open_, "secure_clients_lost", f"{open_.title}: {text}")


def charge_of_sums(open_: OpenRound, state: ev.ProtocolState) -> ChargeRow | None:
    """Return the charge for seeing the sums of a round.

    It is due also if no model comes of them.

    Returns:
        None, unless the clients have added noise.
    """
    privacy, row = open_.job.dp, open_.row
    if privacy is None:
        return None
    sizes = [len(group.members) for group in state.groups if not group.reason]
    charge = privacy.charge_of(sizes, open_.base.parameters, open_.job.min_clients_to_aggregate)
    return ChargeRow(row.round, row.job_id, privacy.noise_multiplier, privacy.clip, time.time(), str(charge))


def check_identity(client: str, proof: Proof, *, authority: Path | None) -> None:
    """Check a client's proof of identity, as far as the server can.

    Args:
        client: the client id.
        proof: the one that came with its keys.
        authority: the file of the authority whose certificates clients must show. Without one, the server relies on
            the session: whoever has opened it was let in with this client id.

    Raises:
        BadProof: if it is not.
    """
    if authority is None:
        return
    chain = proof.chain()
    if not chain:
        raise BadProof("it shows no certificate")
    check_chain(chain, load_authorities(authority))
    identity = identity_of(chain[0])
    if identity is None or (identity.role, identity.name) != (Role.CLIENT, client):
        raise BadProof(f"its certificate names {identity}")


def _other(client: str, step: SecureStep) -> UnknownRound:
    return UnknownRound(f"other {KINDS[step]} of {client} were taken for this round", reason="other_message")
