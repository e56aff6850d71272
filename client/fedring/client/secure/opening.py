"""Begins a client's masked rounds, or finds them on its disk."""

import logging

from google.protobuf.message import DecodeError

from fedring.client.config import ClientConfig
from fedring.client.policy.identity import PeerCheck, check_own_key, load_signer
from fedring.client.secure.participant import ClientIdentity, SecureParticipant
from fedring.client.secure.state import RoundName, SecureState, name_of
from fedring.rpc.revocation import Revocations
from fedring.secure import SecureError
from fedring.v1 import federation_pb2 as pb

log = logging.getLogger(__name__)


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
