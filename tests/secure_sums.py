"""What an honest server does in one group of secure aggregation, as functions of its messages, for tests of clients."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from numpy.typing import NDArray

from fedring.client.policy.identity import Signer
from fedring.client.secure.participant import ClientIdentity, SecureParticipant
from fedring.client.secure.state import SecureState
from fedring.secure import SecureError
from fedring.secure.keys import own_seed, pair_seed
from fedring.secure.levels import bits_of
from fedring.secure.masks import Words, mask, unwrap
from fedring.secure.roster import Roster, check_roster
from fedring.secure.shamir import combine
from fedring.signatures.proofs import Proof, public_bytes
from fedring.v1 import federation_pb2 as pb
from fedring.v1 import secure_pb2 as wire

LEVELS = 7
COUNT = 37  # values of an update, which are no whole number of eights

Masks = list[tuple[bytes, int]]
"""Seeds of the masks that a sum still holds, with +1 or -1."""


def command_of(*, round_: int = 1, epoch: int = 0, run: str = "run", **secure: object) -> pb.TrainCmd:
    """Return a command with secure aggregation, whose values the tests choose."""
    given: dict[str, object] = {"levels": LEVELS, "block": 16} | secure
    return pb.TrainCmd(
        run_id=run,
        epoch=epoch,
        round=round_,
        model_digest="digest",
        deadline_seconds=600.0,
        job=pb.JobSpec(mode="federated", min_results=3, secure_aggregation='{"block": 16}'),
        secure=wire.SecureRound(**given),  # type: ignore[arg-type]  # the test knows the fields
    )


def new_signer() -> Signer:
    """Return a new key. Its signatures are random, so that two of the same text differ."""
    key = generate_private_key(SECP256R1())
    return Signer(key, Proof(public_key=public_bytes(key.public_key())))


def anybody(name: str, proof: Proof) -> None:
    """Accept every identity."""


def names_of(count: int) -> list[str]:
    """Return the ids of so many clients, in order."""
    return [f"c{index:03}" for index in range(count)]


def integers(names: Iterable[str], most: int = LEVELS) -> dict[str, NDArray[np.int32]]:
    """Return the update of each client, of integers up to `most`."""
    drawn = np.random.default_rng(5)
    values = {name: drawn.integers(-most, most, COUNT, dtype=np.int32, endpoint=True) for name in names}
    values[min(values)][:2] = most, -most
    return values


def refused(reason: str) -> Any:
    """Expect an error with this reason."""
    return pytest.raises(SecureError, check=lambda error: error.reason == reason)


class Client:
    """A client whose process can be restarted: what it knows is in its folder."""

    def __init__(
        self, name: str, folder: Path, signer: Signer | None = None, *, min_clients: int = 0, strict: bool = False
    ) -> None:
        self.name, self.folder = name, folder / name
        self.folder.mkdir(exist_ok=True)
        self.site = ClientIdentity(name, signer or new_signer(), anybody, min_clients, strict)

    def party(self, command: pb.TrainCmd) -> SecureParticipant:
        """Return its party of a round, as a process has it that was started anew."""
        return SecureParticipant(command, self.site, self.state)

    @property
    def state(self) -> SecureState:
        """Its files, as a process has them that was started anew."""
        return SecureState(self.folder)


def roster_of(keys: Mapping[str, wire.SecureKeys]) -> wire.SecureRoster:
    """Return the group of all clients that have sent keys."""
    return wire.SecureRoster(members=[keys[name].keys for name in sorted(keys)])


def peers_of(shares: Mapping[str, wire.SecureShares], receiver: str) -> wire.SecurePeers:
    """Return what all others that have sent shares have sealed for one client."""
    peers = wire.SecurePeers()
    for sender in sorted(set(shares) - {receiver}):
        dealt = next(each for each in shares[sender].shares if each.client_id == receiver)
        peers.shares.add(client_id=sender, sealed=dealt.sealed, digests=dealt.digests)
    return peers


def survivors_of(names: Iterable[str]) -> wire.SecureSurvivors:
    """Return the message that names whose updates count."""
    return wire.SecureSurvivors(client_ids=sorted(names))


def unmask_of(signatures: Mapping[str, wire.SurvivorsSignature]) -> wire.SecureUnmask:
    """Return the message that shows who has signed."""
    return wire.SecureUnmask(
        signatures=[wire.SignedBy(client_id=name, signature=signatures[name].signature) for name in sorted(signatures)]
    )


def read_roster(message: wire.SecureRoster, command: pb.TrainCmd) -> Roster:
    """Return the group that a message names."""
    return check_roster(message, command, anybody)


def secret_of(roster: Roster, who: int, answers: Mapping[str, wire.UnmaskShares]) -> bytes:
    """Return the secret that the shares at one place of all answers give; BadShares if they give none."""
    return combine({roster.places[name]: answer.shares[who] for name, answer in answers.items()})


def masks_of(
    roster: Roster, peers: Sequence[str], survivors: Sequence[str], answers: Mapping[str, wire.UnmaskShares]
) -> Masks:
    """Return the masks that the sum of the survivors' updates still holds, from the shares that clients answered."""
    found: Masks = []
    for who, name in enumerate(peers):
        secret = secret_of(roster, who, answers)
        if name in survivors:
            found.append((own_seed(secret, roster.digest, name), 1))
            continue
        for other in survivors:
            first, second = sorted((name, other))
            seed = pair_seed(secret, roster.member(other).masking, roster.digest, first, second)
            found.append((seed, 1 if other < name else -1))
    return found


def total_of(words: Iterable[Words], masks: Masks, bits: int) -> NDArray[np.int64]:
    """Return the sum of the integers under masked words [n], without their masks."""
    total = sum(each.astype(np.uint64) for each in words)
    assert isinstance(total, np.ndarray)
    for seed, sign in masks:
        (np.subtract if sign > 0 else np.add)(total, mask(seed, bits, 0, len(total)), out=total)
    return unwrap(total.astype(np.uint32), bits)


class Group:
    """A group of clients in one round, which goes from step to step. `party` says which object answers for a client."""

    def __init__(self, clients: Mapping[str, Client], command: pb.TrainCmd) -> None:
        self.clients, self.command = clients, command
        self._parties: dict[str, SecureParticipant] = {}
        self.party: Callable[[str], SecureParticipant] = self._kept
        self.keys: dict[str, wire.SecureKeys] = {}
        self.shares: dict[str, wire.SecureShares] = {}
        self.words: dict[str, Words] = {}
        self.signatures: dict[str, wire.SurvivorsSignature] = {}
        self.answers: dict[str, wire.UnmaskShares] = {}

    def _kept(self, name: str) -> SecureParticipant:
        if name not in self._parties:
            self._parties[name] = self.clients[name].party(self.command)
        return self._parties[name]

    def again(self, name: str) -> SecureParticipant:
        """Return a client's party as a process has it that was started anew."""
        return self.clients[name].party(self.command)

    @property
    def roster(self) -> wire.SecureRoster:
        """The message that names the group."""
        return roster_of(self.keys)

    @property
    def group(self) -> Roster:
        """The group."""
        return read_roster(self.roster, self.command)

    @property
    def bits(self) -> int:
        """The bits of a masked value of levels."""
        return bits_of(self.command.secure, len(self.clients))

    def send_keys(self) -> "Group":
        """Let all clients send their keys."""
        self.keys = {name: self.party(name).keys() for name in self.clients}
        return self

    def share(self, *, lost: int = 0) -> "Group":
        """Let all clients exchange keys, and send shares; the last `lost` of them do not."""
        self.send_keys()
        present = sorted(self.keys)
        self.shares = {name: self.party(name).on_roster(self.roster) for name in present[: len(present) - lost]}
        return self

    def exchange(self, *, lost: int = 0) -> "Group":
        """Exchange keys and shares; the last `lost` clients send no shares."""
        self.share(lost=lost)
        for name in self.shares:
            self.party(name).on_peers(peers_of(self.shares, name))
        return self

    def send_all(self) -> "Group":
        """Exchange keys and shares, and let all clients send masked integers."""
        return self.exchange().send(integers(self.clients))

    def send(self, updates: Mapping[str, NDArray[np.int32]]) -> "Group":
        """Let clients send masked integers."""
        for name, values in updates.items():
            self.words[name] = self.party(name).mask(values, self.bits)
            self.party(name).bind(f"payload of {name}")
        return self

    def sign(self, *, lost: int = 0) -> "Group":
        """Let those who have sent sign that these survive; the last `lost` of them do not."""
        names = sorted(self.words)
        for name in names[: len(names) - lost]:
            self.signatures[name] = self.party(name).on_survivors(survivors_of(names))
        return self

    def unmask(self, *, lost: int = 0) -> "Group":
        """Let those who have signed answer; the last `lost` of them do not."""
        names = sorted(self.signatures)
        for name in names[: len(names) - lost]:
            self.answers[name] = self.party(name).on_unmask(unmask_of(self.signatures))
        return self

    @property
    def total(self) -> NDArray[np.int64]:
        """The sum of the integers that were sent."""
        masks = masks_of(self.group, sorted(self.shares), sorted(self.words), self.answers)
        return total_of(self.words.values(), masks, self.bits)


def group_of(count: int, folder: Path, **command: object) -> Group:
    """Return a group of so many clients in one round."""
    return Group({name: Client(name, folder) for name in names_of(count)}, command_of(**command))  # type: ignore[arg-type]  # the test knows the keys
