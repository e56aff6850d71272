"""Events that ask clients for their parts in secure aggregation."""

from collections.abc import Sequence
from typing import Any

from fedring.server.round.open_round import OpenRound
from fedring.server.secure import events as ev
from fedring.server.secure.events import SecureStep
from fedring.server.secure.exchange import SecureExchange
from fedring.v1 import federation_pb2 as pb
from fedring.v1 import secure_pb2 as wire

TOO_LATE = "too_late"


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
