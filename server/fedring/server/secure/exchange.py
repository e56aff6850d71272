"""The messages of a round with secure aggregation, asked and taken."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from fedring.rpc.errors import BadRequest, UnknownRound
from fedring.secure import SecureError
from fedring.secure.keys import DIGEST_BYTES, SEALED_BYTES, draw_secrets, pair_seed
from fedring.secure.levels import bits_of
from fedring.secure.roster import CheckIdentity, Member, Roster, check_member, survivors_statement
from fedring.secure.shamir import SHARE_BYTES
from fedring.server.model.masked_sum import PrivateIntegers
from fedring.server.round.machine import IllegalEvent
from fedring.server.round.open_round import OpenRound
from fedring.server.secure import events as ev
from fedring.server.secure import machine as sm
from fedring.server.secure.combining import Agreed
from fedring.server.secure.events import SecureStep
from fedring.server.secure.machine import SecureSteps
from fedring.server.state.sql.schema import SecureMessageRow, SecureRoundRow
from fedring.signatures.digests import task_digest
from fedring.signatures.proofs import BadProof, verify
from fedring.v1 import federation_pb2 as pb
from fedring.v1 import secure_pb2 as wire

Message = wire.SecureKeys | wire.SecureShares | wire.SurvivorsSignature | wire.UnmaskShares

KINDS = {
    SecureStep.KEYS: "keys",
    SecureStep.SHARES: "shares",
    SecureStep.SURVIVORS: "signature",
    SecureStep.UNMASK: "unmask",
}
"""Kinds of the rows of clients' messages, by the step that asks for them."""

TOO_LATE = "too_late"
_DURABLE = ("step", "members", "peers", "survivors", "signers", "reason", "liars")


class SecureExchange:
    """The messages of one round's secure aggregation.

    It reads the state of the round's machine, and changes none.

    Attributes:
        members: the clients whose keys were checked.
        messages: the clients' durable messages, serialized, by step and client.
    """

    def __init__(self, open_: OpenRound) -> None:
        self.members: dict[str, Member] = {}
        self.messages: dict[SecureStep, dict[str, bytes]] = {step: {} for step in KINDS}
        self._open = open_
        self._owners: dict[bytes, str] = {}  # the clients of the members' public keys
        self._dealt: dict[str, dict[str, wire.SealedShares]] = {}

    @property
    def has_begun(self) -> bool:
        """Whether the clients were sent the command."""
        return self._open.state.round is not None and self._open.state.round.steps is not None

    @property
    def state(self) -> ev.ProtocolState:
        """The state of the machine.

        There is one from the command to the end of the round.
        """
        steps = self._open.state.round.steps if self._open.state.round else None
        if not isinstance(steps, SecureSteps):
            raise IllegalEvent("the secure aggregation has not begun, or is over")
        return steps.state

    @property
    def command(self) -> pb.TrainCmd:
        """The command of the round."""
        return self._open.command

    @cached_property
    def rosters(self) -> list[Roster]:
        """The groups with their members' keys.

        They are known as soon as there are groups.
        """
        return [Roster(tuple(self.members[name] for name in group.members)) for group in self.state.groups]

    @cached_property
    def task(self) -> bytes:
        """The digest of the round's task."""
        return task_digest(self.command)

    def row(self, number: int, epoch: int, event: ev.Event) -> SecureRoundRow:
        """Return the row to write before `event` is applied."""
        after = sm.apply(self.state, event, 0.0)
        groups = [{name: getattr(group, name) for name in _DURABLE} for group in after.groups]
        return SecureRoundRow(number, epoch, groups)

    def bits(self, place: int) -> int:
        """Return the bits of a masked value in a group."""
        if integers := self.integers(place):
            return integers.plan.bits
        return bits_of(self.command.secure, len(self.state.groups[place].members))

    def integers(self, place: int) -> PrivateIntegers | None:
        """Return the encoding of a group's private integers.

        None if its clients send levels.
        """
        if self._open.job.dp is None:
            return None
        members, parameters = len(self.state.groups[place].members), self._open.base.parameters
        plan = self._open.job.dp.plan(members, parameters, self.state.rules.needed)
        return PrivateIntegers(plan, self.task)

    def check_update(self, client: str) -> int:
        """Return a client's group, if it may deliver a masked update.

        The group is given by its number.

        Raises:
            UnknownRound: "not_selected" if it is not, or no longer, part of the secure aggregation.
        """
        place = self.state.place(client)
        group = self.state.groups[place] if place is not None else None
        if place is None or group is None or group.reason or client not in group.peers:
            text = f"{client} is not part of the secure aggregation of round {self.command.round}"
            raise UnknownRound(text, reason="not_selected")
        return place

    def members_with(self, client: str) -> int:
        """Return the number of clients in the client's group.

        Raises:
            UnknownRound: as check_update.
        """
        return len(self.state.groups[self.check_update(client)].members)

    def check_step(self, step: SecureStep, client: str) -> None:
        """Check that the client owes a message of this step.

        Raises:
            UnknownRound: "round_closed" if the step is over, or has not begun, for this client.
        """
        place = self.state.place(client)
        if place is None:
            asked = step is SecureStep.KEYS and not self.state.groups
        else:
            group = self.state.groups[place]
            asked = group.step is step and not group.reason and client in group.asked
        if not asked:
            text = f"round {self.command.round} does not take the {KINDS[step]} of {client} now"
            raise UnknownRound(text, reason="round_closed")

    def add_member(self, member: Member) -> None:
        """Keep a client's keys.

        Raises BadRequest if another client has sent one of them, so that no group would hold both.
        """
        for key in (member.sealing, member.masking):
            if self._owners.setdefault(key, member.client_id) != member.client_id:
                text = f"the keys of {member.client_id} are those of another client"
                raise BadRequest(text, reason="bad_secure_message")
        self.members[member.client_id] = member

    def check_message(self, client: str, message: Message, check_identity: CheckIdentity) -> Member | None:
        """Check a client's message, and return the keys in it, if any.

        The client must be asked for the message.

        Raises:
            BadRequest: "bad_secure_message", if it does not fit the round.
        """
        try:
            if isinstance(message, wire.SecureKeys):
                member = check_member(message.keys, self.command, check_identity, self.task)
                _require(member.client_id == client, "the keys are those of another client")
                for key in (member.sealing, member.masking):
                    pair_seed(draw_secrets().masking, key, b"", client, client)  # a key of low order gives no secret
                return member
            place = self.state.place(client) or 0
            group, roster = self.state.groups[place], self.rosters[place]
            if isinstance(message, wire.SecureShares):
                others = [name for name in group.members if name != client]
                _require([share.client_id for share in message.shares] == others, "the shares are for other clients")
                _require_lengths([share.sealed for share in message.shares], SEALED_BYTES)
                _require_lengths([share.digests for share in message.shares], 2 * DIGEST_BYTES)
            elif isinstance(message, wire.SurvivorsSignature):
                text = survivors_statement(roster.digest, group.peers, group.survivors)
                verify(roster.member(client).key, message.signature, text)
            else:
                _require(len(message.shares) == len(group.peers), f"{len(message.shares)} shares are not one a peer")
                _require_lengths(message.shares, SHARE_BYTES)
        except (SecureError, BadProof) as error:
            raise BadRequest(f"a message of {client} does not fit: {error}", reason="bad_secure_message") from error
        return None

    def shares_of(self, place: int) -> dict[str, list[bytes]]:
        """Return the shares of a group's signers, by client."""
        sent, answered = self.messages[SecureStep.UNMASK], self.state.groups[place].answered
        return {name: list(wire.UnmaskShares.FromString(sent[name]).shares) for name in sorted(answered)}

    def agreed(self, place: int) -> Agreed:
        """Return the group's members, survivors and shares' digests."""
        group = self.state.groups[place]
        digests = {peer: {name: share.digests for name, share in self.dealt_by(peer).items()} for peer in group.peers}
        return Agreed(self.rosters[place], group.peers, group.survivors, digests)

    def figures(self, seconds: Mapping[str, float]) -> dict[str, Any]:
        """Return the progress of secure aggregation, as JSON.

        `seconds` are those of its steps.
        """
        state = self.state
        step = state.step
        # Groups move on their own. The round is shown at the step of the one that is behind.
        groups = [group for group in state.groups if group.step is step and not group.reason]
        asked = {name for group in groups for name in group.asked} if state.groups else state.clients
        answered = {name for group in groups for name in group.answered} if state.groups else state.keys
        if step is SecureStep.UPDATES:
            answered = asked & self._open.accepted.keys()
        return {
            "step": str(step),
            "groups": len(state.groups),
            "answered": len(answered & asked),
            "asked": len(asked),
            "lost": {name: count for name, count in sm.lost(state).items() if count},
            "seconds": dict(seconds),
        }

    def dealt_by(self, peer: str) -> dict[str, wire.SealedShares]:
        """Return the sealed shares of a peer, by receiver."""
        found = self._dealt.get(peer)
        if found is None:
            sent = wire.SecureShares.FromString(self.messages[SecureStep.SHARES][peer]).shares
            found = self._dealt[peer] = {share.client_id: share for share in sent}
        return found

    def load(self, messages: Sequence[SecureMessageRow]) -> None:
        """Take in the messages that are durable, after a restart.

        Raises:
            SecureError: if they do not fit the round's command any more.
        """
        steps = {kind: step for step, kind in KINDS.items()}
        for message in messages:
            self.messages[steps[message.kind]][message.client_id] = message.body
        for body in self.messages[SecureStep.KEYS].values():
            keys = wire.SecureKeys.FromString(body).keys
            # Whose keys they are was checked when they came.
            self.add_member(check_member(keys, self.command, lambda _name, _proof: None, self.task))

    def restored(self, rules: ev.SecureRules, decided: SecureRoundRow, since: float) -> ev.ProtocolState:
        """Return the state from before a restart.

        The messages must be loaded.

        Args:
            rules: the rules of the secure aggregation.
            decided: its durable decisions.
            since: when the steps that were interrupted begin anew, monotonic seconds.
        """
        accepted = self._open.accepted.keys()
        groups = tuple(_group(entry, self.messages, accepted, since) for entry in decided.groups)
        return ev.ProtocolState(rules, frozenset(self._open.row.selected), since, frozenset(self.members), groups)


class StepEvents:
    """Makes the events of the steps from clients' messages."""

    def __init__(self, open_: OpenRound, exchange: SecureExchange) -> None:
        self._open, self._exchange = open_, exchange
        self._told: dict[tuple[int, SecureStep], bytes] = {}

    def waits_for(self, client: str) -> bytes:
        """Return the event for a client now.

        It asks for something, or says that the client is out; b"" if there is nothing.
        """
        state, place = self._exchange.state, self._exchange.state.place(client)
        if not state.groups:
            return b""
        if place is None:
            return self.ended(TOO_LATE) if client in state.clients else b""
        group = state.groups[place]
        if group.reason:
            return self.ended(group.reason)
        if client in group.answered or (group.step is SecureStep.UPDATES and client in self._open.accepted):
            return b""
        if client in group.asked:
            return self._step(place, client)
        # Whoever has delivered is waited for no more, but its update counts.
        return self.ended(TOO_LATE) if client not in (group.survivors or group.peers) else b""

    def ended(self, reason: str) -> bytes:
        """Return the news that the round goes on without a client."""
        version = self._exchange.command.model_version
        ended = pb.RoundEnded(round=self._exchange.command.round, reason=reason, model_version=version)
        return pb.ServerEvent(round_ended=ended).SerializeToString()

    def _step(self, place: int, client: str) -> bytes:
        """Return the event of a client's step."""
        group = self._exchange.state.groups[place]
        if group.step is SecureStep.UPDATES:
            return self._event(peers=wire.SecurePeers(shares=self._sealed_for(client, group.peers)))
        told = self._told.get((place, group.step))  # it is the same for all clients of a group
        if told is None:
            told = self._told[place, group.step] = self._common_step(group)
        return told

    def _common_step(self, group: ev.Group) -> bytes:
        if group.step is SecureStep.SHARES:
            sent = self._exchange.messages[SecureStep.KEYS]
            keys = [wire.SecureKeys.FromString(sent[name]).keys for name in group.members]
            return self._event(roster=wire.SecureRoster(members=keys))
        if group.step is SecureStep.SURVIVORS:
            return self._event(survivors=wire.SecureSurvivors(client_ids=group.survivors))
        sent = self._exchange.messages[SecureStep.SURVIVORS]
        signatures = {name: wire.SurvivorsSignature.FromString(sent[name]).signature for name in group.signers}
        signed = [wire.SignedBy(client_id=name, signature=signature) for name, signature in signatures.items()]
        return self._event(unmask=wire.SecureUnmask(signatures=signed))

    def _event(self, **step: Any) -> bytes:
        command = self._exchange.command
        message = wire.SecureStep(run_id=command.run_id, epoch=command.epoch, round=command.round, **step)
        return pb.ServerEvent(secure=message).SerializeToString()

    def _sealed_for(self, client: str, peers: Sequence[str]) -> list[wire.SealedShares]:
        """Return the other peers' sealed shares, in the roster's order."""
        others = [peer for peer in peers if peer != client]
        dealt = ((peer, self._exchange.dealt_by(peer)[client]) for peer in others)
        return [wire.SealedShares(client_id=peer, sealed=each.sealed, digests=each.digests) for peer, each in dealt]


def _group(
    entry: Mapping[str, Any],
    messages: Mapping[SecureStep, Mapping[str, bytes]],
    accepted: Collection[str],
    since: float,
) -> ev.Group:
    members, peers, survivors, signers = (tuple(entry[key]) for key in ("members", "peers", "survivors", "signers"))
    ended = {"reason": entry["reason"], "liars": tuple(entry.get("liars", ()))}
    # The masks that a group's shares have given lie in memory only: they are made of the same shares once more.
    step = SecureStep.UNMASK if entry["step"] == SecureStep.DONE else SecureStep(entry["step"])
    group = ev.Group(members, step, since, peers, survivors, signers, **ended)
    if group.survivors and not set(group.survivors) <= set(accepted):
        group = replace(group, reason=group.reason or "damaged_blob")  # the server has stopped while it noted this
    sent = messages.get(group.step, {})
    return replace(group, answered=frozenset(name for name in group.asked if name in sent))


def _require(fits: bool, text: str) -> None:
    if not fits:
        raise SecureError("bad_secure_message", text)


def _require_lengths(parts: Sequence[bytes], length: int) -> None:
    _require(all(len(part) == length for part in parts), f"a share must have {length} bytes")
