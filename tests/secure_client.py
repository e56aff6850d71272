"""A client of the wire contract that takes part in secure aggregation, step by step as a test says.

It is written from the description of the protocol, with the functions of `fedring.secure`. It checks of what the server
sends only what it needs to go on.
"""

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from fedring.privacy.integers import encode_private
from fedring.secure.keys import draw_secrets, own_seed, pair_seed, seal, share_digests, share_key, unseal
from fedring.secure.levels import bits_of, open_blocks, to_integers
from fedring.secure.masks import mask, masked_packet, wrap
from fedring.secure.roster import Roster, check_roster, signed_keys, survivors_statement
from fedring.secure.shamir import split
from fedring.signatures.digests import task_digest
from fedring.signatures.proofs import Proof, public_bytes, sign
from fedring.train.jobs.privacy_table import ClientPrivacy
from fedring.v1 import federation_pb2 as pb
from fedring.v1 import secure_pb2 as wire
from fedring.v1.secure_pb2_grpc import SecureAggregationServiceStub
from tests.system.wire import SECONDS, Refused, WireClient
from tests.waiting import until

Values = NDArray[np.float32]


CALLS = {
    "keys": ["send_keys"],
    "shares": ["send_shares"],
    "updates": ["take_peers", "push"],
    "survivors": ["sign_survivors"],
    "unmask": ["send_unmask_shares"],
}
"""The methods of a client in each step."""

STEPS = tuple(CALLS)


class SecureClient:
    """A client with an update, the same in each round.

    Args:
        address: of the server.
        name: its client id.
        update: the delta of all parameters, float32.
        samples: what its update weighs, in jobs whose updates are weighed.

    Attributes:
        link: its session.
        command: of the round that it takes part in.
        levels: the integers that it has masked.
    """

    def __init__(self, address: str, name: str, update: Values, samples: int = 1) -> None:
        self.name, self.update, self.samples = name, update, samples
        self.link = WireClient(address, name)
        self.command = pb.TrainCmd()
        self.levels: NDArray[np.int64] = np.zeros(0, np.int64)
        self.sent: dict[str, Any] = {}  # the newest message of each kind
        self._key = Ed25519PrivateKey.generate()
        self._opened: dict[str, tuple[bytes, bytes]] = {}  # shares of the masking key and the own mask, by their owner

    def close(self) -> None:
        """End the session."""
        self.link.close()

    def again(self, address: str) -> None:
        """Open a new session, after the server was restarted."""
        self.link.close()
        self.link = WireClient(address, self.name)

    def begin(self) -> pb.TrainCmd:
        """Wait for the command of the next round, and draw secrets for it."""
        self.command = self.link.expect("train")
        self.draw()
        return self.command

    def draw(self) -> None:
        """Draw secrets."""
        self._secrets = draw_secrets()

    def take_secrets_of(self, other: "SecureClient") -> None:
        """Use the secrets of another client."""
        self._secrets = other._secrets

    def keys(self) -> wire.SecureKeys:
        """Return the client's signed keys."""
        proof = Proof(public_key=public_bytes(self._key.public_key()))
        keys = signed_keys(self.command, self.name, self._secrets, self._key, proof)
        return wire.SecureKeys(round=self.command.round, keys=keys)

    def send_keys(self) -> None:
        """Send the keys."""
        self.call("SendKeys", self.keys())

    def send_shares(self) -> None:
        """Wait for the group, and send each member its shares of the client's secrets."""
        self.roster: Roster = check_roster(self.step("roster").roster, self.command, lambda _name, _proof: None)
        masking, own_mask = self.split(self._secrets.masking), self.split(self._secrets.own_mask)
        shares = []
        for member, *pair in zip(self.roster.members, masking, own_mask, strict=True):
            if member.client_id == self.name:
                self._opened[self.name] = (pair[0], pair[1])
                continue
            key = share_key(self._secrets.sealing, member.sealing, self.roster.digest, self.name, member.client_id)
            digests = share_digests(self.roster.digest, self.name, member.client_id, pair[0], pair[1])
            shares.append(wire.SealedShares(client_id=member.client_id, sealed=seal(key, *pair), digests=digests))
        self.call("SendShares", wire.SecureShares(round=self.command.round, shares=shares))

    def split(self, secret: bytes) -> list[bytes]:
        """Return a share of a secret for each member of the group."""
        return split(secret, self.roster.threshold, len(self.roster.members))

    def take_peers(self) -> None:
        """Wait for the peers' shares."""
        for share in self.step("peers").peers.shares:
            member = self.roster.member(share.client_id)
            key = share_key(self._secrets.sealing, member.sealing, self.roster.digest, share.client_id, self.name)
            pair = self._opened[share.client_id] = unseal(key, share.sealed)
            assert share.digests == share_digests(self.roster.digest, share.client_id, self.name, *pair)
        self.peers = [member.client_id for member in self.roster.members if member.client_id in self._opened]

    def integers(self) -> tuple[NDArray[np.int64], int]:
        """Return the integers that are masked, and the bits of each."""
        secure = self.command.secure
        integers = to_integers(self.update.copy(), secure, self.samples).integers
        return integers.astype(np.int64), bits_of(secure, len(self.roster.members))

    def masked(self) -> bytes:
        """Return the payload of the masked update."""
        roster = self.roster
        self.levels, bits = self.integers()
        total = wrap(self.levels, bits)
        total += mask(own_seed(self._secrets.own_mask, roster.digest, self.name), bits, 0, len(total))
        for peer in self.peers:
            if peer != self.name:
                other = roster.member(peer).masking
                seed = pair_seed(self._secrets.masking, other, roster.digest, *sorted((self.name, peer)))
                words = mask(seed, bits, 0, len(total))
                total = total + words if self.name < peer else total - words
        return b"".join(bytes(part) for part in masked_packet(total, bits))

    def push(self) -> None:
        """Deliver the masked update, the same bytes each time."""
        self.push_bytes(self.sent.setdefault(f"update {self.command.round}", self.masked()))

    def push_bytes(self, payload: bytes) -> None:
        """Deliver a payload as the masked update; Refused if the server refuses it."""
        packet = pb.Packet(vector=pb.VECTOR_PARAMETERS, kind=pb.KIND_DELTA, encoding="masked", bytes=len(payload))
        packet.num_samples = 1
        header = self.link.header(self.command, payload, packets=[packet], train_seconds=0.0)
        _when_available(lambda: self.link.push_small(header, payload))

    def sign_survivors(self) -> None:
        """Wait for the survivors, and sign who they are."""
        self.survivors = list(self.step("survivors").survivors.client_ids)
        text = survivors_statement(self.roster.digest, self.peers, self.survivors)
        signature = sign(self._key, text)
        self.call("SignSurvivors", wire.SurvivorsSignature(round=self.command.round, signature=signature))

    def unmask_shares(self) -> wire.UnmaskShares:
        """Return one share of each peer: of a survivor that of its own mask, of a lost client that of its key."""
        shares = [self._opened[peer][1 if peer in self.survivors else 0] for peer in self.peers]
        return wire.UnmaskShares(round=self.command.round, shares=shares)

    def send_unmask_shares(self) -> None:
        """Wait for the signatures, and send the shares that remove masks."""
        self.step("unmask")
        self.call("SendUnmaskShares", self.unmask_shares())

    def step(self, kind: str) -> wire.SecureStep:
        """Return the next step of this kind; drop those before it."""
        while True:
            event: wire.SecureStep = self.link.expect("secure")
            if event.WhichOneof("step") == kind:
                return event

    def call(self, method: str, message: Any) -> None:
        """Send a message, and remember it.

        Raises:
            Refused: if the server refuses it.
        """
        self.sent[method] = message
        _when_available(lambda: self._call(method, message))

    def _call(self, method: str, message: Any) -> None:
        stub = SecureAggregationServiceStub(self.link.channel)
        try:
            getattr(stub, method)(message, metadata=self.link.metadata, timeout=SECONDS)
        except grpc.RpcError as error:
            raise Refused(error) from error


class NoisyClient(SecureClient):
    """A client that adds its share of the noise to its update, before it is masked."""

    def integers(self) -> tuple[NDArray[np.int64], int]:
        """Return the integers that are masked, and the bits of each."""
        table = ClientPrivacy.model_validate_json(self.command.job.dp)
        plan = table.plan(len(self.roster.members), len(self.update), self.command.job.min_results)
        secret = secrets.token_bytes(32)
        return encode_private(self.update, plan, task_digest(self.command), secret), plan.bits


def _when_available(call: Callable[[], object]) -> None:
    """Make a call; make it again while the server has just started."""

    def done() -> bool:
        try:
            call()
        except Refused as error:
            if "just started" not in str(error):
                raise
            return False
        return True

    until(done)


def mean_of(clients: Sequence[SecureClient]) -> NDArray[np.float64]:
    """Return the mean of what clients have masked, without a block mask, in units of the parameters."""
    secure, size = clients[0].command.secure, len(clients[0].update)
    scales = np.repeat(open_blocks(secure, size).scales.astype(np.float64), secure.block)[:size]
    total = np.sum([client.levels for client in clients], axis=0)
    weight = float(total[size]) if secure.max_weight else float(len(clients))
    mean: NDArray[np.float64] = scales * total[:size] / weight
    return mean
