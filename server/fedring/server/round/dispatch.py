"""The commands and news that the clients of a round are sent."""

from collections.abc import Iterable

from fedring.server.round.events import OPEN, Phase
from fedring.server.round.open_round import OpenRound
from fedring.server.sessions.sessions import Sessions
from fedring.server.state.rows import ModelRow, RoundRow
from fedring.v1 import federation_pb2 as pb


class Dispatch:
    """Puts events into the outboxes of clients in session.

    The others are told when they come back.
    """

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    def train_all(self, open_: OpenRound, clients: Iterable[str], seconds: float | None = None) -> None:
        """Send the command to all clients.

        Those that do not hold the model get it with the command, if it is small.

        Args:
            open_: the round.
            clients: that train.
            seconds: how long they have; None = until the round's deadline.
        """
        seconds, overrides = open_.seconds_left if seconds is None else seconds, open_.row.overrides
        made: dict[tuple[bool, tuple[int, ...]], bytes] = {}  # a command is the same for all clients, or for many
        for session in filter(None, map(self._sessions.get, sorted(clients))):
            whole = open_.model is not None and session.holds != open_.base.digest
            key = whole, tuple(overrides.get(session.client_id, ()))
            if key not in made:
                made[key] = open_.event(seconds, open_.model if whole else None, key[1])
            if whole:
                session.holds = open_.base.digest
            session.ask(made[key])

    def remind(self, open_: OpenRound, latest: ModelRow | None, client: str) -> None:
        """Remind a client that has come back of its part."""
        round_ = open_.state.round
        if client in open_.outstanding:
            self.train(open_, client)
        if round_ is None or open_.kind.lasting:
            return
        if round_.phase is Phase.TRAINING and client in round_.selected - round_.delivered - round_.failed:
            self.train(open_, client)
        if round_.phase is Phase.PUBLISHED and open_.made and client in round_.evaluators - round_.evaluated:
            self.evaluate(open_, open_.made, client)
        if round_.phase in OPEN:
            self.ask(open_, [client])
        elif open_.kind.tells_all:
            self.over(open_.row, latest, client)

    def ask(self, open_: OpenRound, clients: Iterable[str]) -> None:
        """Ask the clients for their part in the kind's steps."""
        for client in clients:
            if event := open_.kind.waits_for(client):
                self._send(client, event)

    def train(self, open_: OpenRound, client: str) -> None:
        """Send the command to one client.

        It has come back, or was selected later than the others.
        """
        self._send(client, open_.event(open_.seconds_of(client), overrides=open_.row.overrides.get(client, ())))

    def evaluate(self, open_: OpenRound, model: ModelRow, client: str) -> None:
        """Ask the client to evaluate the new model."""
        command = pb.EvaluateCmd(
            job=open_.command.job,
            round=open_.row.round,
            model_version=model.version,
            model_digest=model.digest,
            schema_hash=bytes.fromhex(model.schema_hash),
            deadline_seconds=open_.job.evaluate_seconds,
            run_id=open_.command.run_id,
            epoch=open_.command.epoch,
            residual_after=open_.command.residual_after,
            residual_after_epoch=open_.command.residual_after_epoch,
        )
        self._send(client, pb.ServerEvent(evaluate=command))

    def ended(self, open_: OpenRound, model: ModelRow | None) -> None:
        """Tell clients that the round no longer waits for them.

        These are the ones that still train, or all of them if the round's kind says so.
        """
        for client in set(open_.row.selected) - (set() if open_.kind.tells_all else open_.accepted.keys()):
            self.over(open_.row, model, client)

    def over(self, row: RoundRow, model: ModelRow | None, client: str) -> None:
        """Tell a client that a round is over."""
        if session := self._sessions.get(client):
            version = model.version if model else 0
            session.end(pb.RoundEnded(round=row.round, reason=row.reason, model_version=version))

    def _send(self, client: str, event: pb.ServerEvent | bytes) -> None:
        if session := self._sessions.get(client):
            session.ask(event)
