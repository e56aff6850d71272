"""The secure aggregation of rounds: takes what clients send, decides what the machine says, and tells the clients.

Whatever a client is told is durable before. What was decided once is never decided again, also after a restart.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from random import SystemRandom

from fedring.rpc.certificates import identity_of, load_authorities
from fedring.rpc.errors import BadRequest, OtherMessage, Unavailable, UnknownRound
from fedring.rpc.identity import Role
from fedring.secure.roster import Member
from fedring.secure.signing import BadProof, Proof, check_chain
from fedring.server.config import ServerConfig
from fedring.server.round import machine as rd
from fedring.server.round.dispatch import Dispatch
from fedring.server.round.events import OPEN, Abandoned, Failed, Phase
from fedring.server.round.open_round import OpenRound
from fedring.server.round.private_rounds import RoundPrivacy
from fedring.server.round.rounds import Rounds
from fedring.server.round.secure_state import KINDS, Message, SecureState, secure_rules
from fedring.server.secure import events as ev
from fedring.server.secure import machine as sm
from fedring.server.secure.combining import unmask
from fedring.server.secure.events import Step
from fedring.server.secure.groups import form_groups
from fedring.server.secure.metrics import SecureMetrics
from fedring.server.sessions.sessions import Sessions
from fedring.server.state.facts import Facts
from fedring.server.state.failures import StorageFailed
from fedring.server.state.interfaces import Acceptance
from fedring.server.state.rows import SecureMessageRow, SecureRoundRow
from fedring.v1 import secure_pb2 as wire

log = logging.getLogger(__name__)

_STEPS: dict[type[Message], Step] = {
    wire.SecureKeys: Step.KEYS,
    wire.SecureShares: Step.SHARES,
    wire.SurvivorsSignature: Step.SURVIVORS,
    wire.UnmaskShares: Step.UNMASK,
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
"""What fault tests call the commits of decisions."""

_MOST_NAMES = 10


class SecureRounds:
    """Runs the secure aggregation of the round in progress; does nothing for jobs that have none."""

    def __init__(
        self, rounds: Rounds, facts: Facts, sessions: Sessions, metrics: SecureMetrics, config: ServerConfig
    ) -> None:
        self._rounds, self._facts, self._metrics = rounds, facts, metrics
        self._check = partial(check_identity, authority=config.tls.ca)
        self._dispatch = Dispatch(sessions)
        self._random = SystemRandom()

    async def start(self, open_: OpenRound) -> None:
        """Note in which epoch the round begins, before its clients are told of it.

        Raises:
            StorageFailed: if that cannot be kept.
        """
        if open_.job.secure_aggregation is not None:
            store = self._facts.store
            row = SecureRoundRow(open_.row.round, store.epoch, [])
            await self._facts.db(store.save_secure_round, row, "start")

    def started(self, open_: OpenRound, clients: frozenset[str]) -> None:
        """Wait for the keys of the clients, which have been sent the command."""
        rules = secure_rules(open_.job)
        if rules is not None:
            state = ev.State(rules, clients, time.monotonic())
            open_.secure = SecureState(open_.command, state, open_.job.dp, open_.base.parameters)

    async def take(self, client: str, message: Message) -> None:
        """Take a client's message into the round; it is durable when this returns. It may be repeated.

        Raises:
            Unavailable: if the server has just started, and the round waits to be resumed.
            UnknownRound: "unknown_round" if another round, or none, has secure aggregation now; "not_selected" if the
                client is none of the round's; "round_closed" if the step is over for this client.
            OtherMessage: if another message of this kind was taken from the client.
            BadRequest: "bad_secure_message", if the message does not fit the round.
            StorageFailed: if it cannot be kept.
        """
        open_, secure = self._open(message.round, client)
        step, body = _STEPS[type(message)], message.SerializeToString(deterministic=True)
        if len(body) > _MOST_BYTES:
            raise BadRequest(f"{len(body)} bytes are above {_MOST_BYTES}", reason="bad_secure_message")
        taken = secure.messages[step]
        if client not in taken:
            secure.check_step(step, client)
            member = await self._facts.work(secure.check_message, client, message, self._check)
            if client not in taken:
                await self._commit(open_, secure, client, step, body, member)
        if taken[client] != body:
            raise _other(client, step)

    async def _commit(
        self, open_: OpenRound, secure: SecureState, client: str, step: Step, body: bytes, member: Member | None
    ) -> None:
        """Make a message durable, then let it count. The same call may be under way a second time."""
        self._open(open_.row.round, client)  # nothing is kept of a round that has ended while the message was checked
        if member is not None:
            secure.add_member(member)
        row = SecureMessageRow(open_.row.round, client, KINDS[step], body)
        if await self._facts.db(self._facts.store.add_secure_message, row) is Acceptance.OTHER:
            raise _other(client, step)
        self._open(open_.row.round, client)
        if client not in secure.messages[step]:
            secure.check_step(step, client)
            secure.messages[step][client] = body
            if member is not None:
                secure.members[client] = member  # another call of the client may have tried with other keys
            self._handle(open_, secure, ev.Answered(step, client))

    def wake_at(self, open_: OpenRound, now: float) -> float:
        """Return when `advance` may have something to do without an event, in monotonic seconds; inf means never."""
        if open_.secure is None or open_.secure.state.ended:
            return inf
        return min(sm.wake_at(open_.secure.state), rd.next_loss(open_.state, now))

    async def advance(self, open_: OpenRound) -> None:
        """Do what is due.

        Raises:
            StorageFailed: if a decision cannot be kept. It is due again.
        """
        while open_.secure is not None and (effect := self._due(open_, open_.secure)) is not None:
            match effect:
                case ev.FormGroups(clients):
                    groups = form_groups(clients, open_.secure.state.rules.group_size, self._random)
                    await self._decide(open_, open_.secure, ev.Grouped(groups))
                case ev.Combine(place):
                    await self._combine(open_, open_.secure, place)
                case ev.GiveUp() if fault := self._facts.storage.fault:
                    raise StorageFailed("disk_full", fault)
                case ev.GiveUp(reason):
                    await self._give_up(open_, reason)
                case _:
                    await self._decide(open_, open_.secure, effect)

    async def unmask(self, open_: OpenRound) -> None:
        """Have the masks of a closed round removed. Returns when all that can be known is, or the round has ended.

        Raises:
            StorageFailed: if a decision cannot be kept. Call it again.
        """
        secure = open_.secure
        if secure is None:
            return
        if secure.state.accepted is None:
            self._handle(open_, secure, ev.Closed(frozenset(open_.accepted)))
        open_.waits_for_shares = True
        try:
            while self._runs(open_):
                open_.changed.clear()
                await self.advance(open_)
                if secure.state.ended:
                    return
                now = time.monotonic()
                wait = self.wake_at(open_, now) - now
                with suppress(TimeoutError):
                    async with asyncio.timeout(None if wait == inf else max(wait, 0.001)):
                        await open_.changed.wait()
        finally:
            open_.waits_for_shares = False

    async def failed(self, open_: OpenRound, clients: frozenset[str], reason: str) -> bool:
        """Let the groups fail whose sums these clients' updates have spoilt. Returns whether the round can publish."""
        secure = open_.secure
        if secure is None:
            return True
        for place, group in enumerate(secure.state.groups):
            if not group.reason and clients & set(group.survivors):
                await self._decide(open_, secure, ev.GroupFailed(place, reason))
        return not isinstance(sm.due(secure.state, frozenset(), time.monotonic()), ev.GiveUp)

    def _open(self, number: int, client: str) -> tuple[OpenRound, SecureState]:
        rounds = self._rounds
        if rounds.recovering:
            raise Unavailable("the server has just started: try again")
        open_ = rounds.get(number)
        if open_ is None or open_.secure is None or not self._runs(open_):
            raise UnknownRound(f"round {number} is not open, or has no secure aggregation")
        if client not in open_.secure.state.clients:
            raise UnknownRound(f"{client} was not selected for round {number}", reason="not_selected")
        return open_, open_.secure

    def _runs(self, open_: OpenRound) -> bool:
        return open_.phase in OPEN

    def _due(self, open_: OpenRound, secure: SecureState) -> ev.Effect | None:
        now = time.monotonic()
        return sm.due(secure.state, rd.reachable(open_.state, now), now) if self._runs(open_) else None

    def _handle(self, open_: OpenRound, secure: SecureState, event: ev.Event) -> None:
        now, before = time.monotonic(), secure.state
        secure.handle(event, now)
        for step, seconds in sm.took(before, secure.state, now):
            secure.seconds[step] = max(secure.seconds.get(step, 0.0), seconds)
            self._metrics.seconds.labels(step).observe(seconds)
        lost = sm.lost(before)
        for name, count in sm.lost(secure.state).items():
            self._metrics.lost.labels(name).inc(max(0, count - lost.get(name, 0)))
        open_.changed.set()

    async def _decide(self, open_: OpenRound, secure: SecureState, event: ev.Grouped | ev.Decision) -> None:
        """Make a decision durable, then tell the clients."""
        store = self._facts.store
        row = secure.row(open_.row.round, store.epoch, event)
        # Whoever can remove the masks sees the sum, whatever becomes of the round.
        charge = RoundPrivacy.charge_of_sums(open_) if isinstance(event, ev.SignersChosen) else None
        await self._facts.db(store.save_secure_round, row, _COMMITS[type(event)], charge)
        if not self._runs(open_):
            return  # the round was stopped meanwhile
        before = secure.state
        self._handle(open_, secure, event)
        self._tell(open_, secure, before)

    def _tell(self, open_: OpenRound, secure: SecureState, before: ev.State) -> None:
        """Tell clients what they are asked for now, and those that are out that the round goes on without them."""
        after = secure.state
        for place, group in enumerate(after.groups):
            if group.reason and (not before.groups or not before.groups[place].reason):
                self._note(open_, f"the group of {_listed(group.members)} has failed: {group.reason}")
        late = sorted(sm.out(after) - sm.out(before))
        if open_.phase is Phase.TRAINING:
            for client in late:
                self._rounds.handle(open_, Failed(client, open_.row.round))
            if late:
                self._note(open_, f"the secure aggregation goes on without {_listed(late)}")
        changed = (g.members for place, g in enumerate(after.groups) if before.groups[place : place + 1] != (g,))
        self._dispatch.secure(open_, sorted({*late, *(name for members in changed for name in members)}))

    def _note(self, open_: OpenRound, text: str) -> None:
        open_.failures.append(text)
        self._rounds.tell(open_, "secure_clients_lost", f"{open_.title}: {text}")

    async def _combine(self, open_: OpenRound, secure: SecureState, place: int) -> None:
        agreed, answers = secure.agreed(place), secure.shares_of(place)
        done = await self._facts.heavy(unmask, agreed, answers, secure.bits(place))
        for client in sorted(done.liars):
            lied(self._rounds, open_, client, done.liars[client])
        if done.masks is None:
            unknown = _listed(done.unknown)
            log.error("round %d: too few shares of the secrets of %s are right", open_.row.round, unknown)
            liars = tuple(sorted(done.liars))
            return await self._decide(open_, secure, ev.GroupFailed(place, "bad_unmask_shares", liars))
        secure.masks[place] = replace(done.masks, integers=secure.integers(place))
        self._handle(open_, secure, ev.Combined(place))

    async def _give_up(self, open_: OpenRound, reason: str) -> None:
        secure, rounds = open_.secure, self._rounds
        async with open_.settling:
            if secure is None or not self._runs(open_):
                return
            open_.failures.insert(0, _too_few(secure.state))
            rounds.handle(open_, Abandoned(reason))


def lied(rounds: Rounds, open_: OpenRound, client: str, why: str) -> None:
    """Note that a client was proved to have sent wrong shares: the job's later rounds go on without it.

    Args:
        rounds: tell operators.
        open_: the round.
        client: the client.
        why: a clause that says what it did.
    """
    if client in open_.liars:
        return
    open_.liars |= {client}
    text = f"{open_.title}: bad_share: {client} sent wrong shares, and later rounds go on without it: {why}"
    rounds.note(open_, "client_lied", text, client)


def check_identity(client: str, proof: Proof, *, authority: Path | None) -> None:
    """Check that a proof is that of a client, as far as the server can tell.

    Args:
        client: the client id.
        proof: what it has shown with its keys.
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


def _other(client: str, step: Step) -> OtherMessage:
    return OtherMessage(f"other {KINDS[step]} of {client} were taken for this round")


def _too_few(state: ev.State) -> str:
    if not state.groups:
        answered, asked = len(state.keys), len(state.clients)
        return f"{answered} of {asked} clients have sent their keys in time, and {state.rules.fewest} are needed"
    left = sum(len(group.survivors or group.peers) for group in state.groups if not group.reason)
    liars = sorted(name for group in state.groups for name in group.liars)
    why = f": bad_share: {_listed(liars)} sent wrong shares" if liars else ""
    return f"the masks of {left} updates can be removed, and {state.rules.needed} updates are needed{why}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
