"""A client's memory of secure aggregation, in the state folder's `secure`.

    RUN-EPOCH-ROUND.json    one round: its secrets, and each message that was taken or is about to be sent. RUN is a
                            digest of the run's id. The first line is the SHA-256 of the others.
    finished.json           the newest round of each run whose secrets are gone, and why it ended. The first line is the
                            SHA-256 of the others; a file of an earlier version has none, and gets it
    released.json           for which survivors masks were removed: see `released`

Only the owner can read the files. A file is replaced as a whole and durably, before anything that depends on it leaves
the client: a kill at any moment leaves the old content or the new one.
"""

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

from fedring.client.secure.released import Released
from fedring.daemon.config import ConfigError
from fedring.daemon.crash import crashpoint
from fedring.daemon.durable import make_folder, replace_with_digest, sync, text_after_digest
from fedring.secure import SecureError
from fedring.untrusted import parse_json
from fedring.v1 import federation_pb2 as pb
from fedring.v1 import secure_pb2 as wire

FOLDER = "secure"

_FINISHED = "finished.json"
_ROUND_FILE = re.compile(r"([0-9a-f]{32})-(\d{1,20})-(\d{1,20})\.json")
_KEEP_RUNS = 256

END_CRASH_POINTS = {"client_secure_ended", "client_secure_removed"}
"""Crash points at the end of a round: when that is noted, and when the round's secrets are gone."""


class RoundName(NamedTuple):
    """The identity of a round."""

    run_id: str
    epoch: int
    round: int

    @property
    def run(self) -> str:
        """The digest of the run's id that files are named by."""
        return hashlib.sha256(self.run_id.encode()).hexdigest()[:32]


class Finished(NamedTuple):
    """The newest round of a run whose secrets are gone."""

    epoch: int
    round: int
    reason: str  # why this client ended it; empty = as all rounds end


@dataclass(slots=True, repr=False)
class RoundRecord:
    """The durable record of one round.

    Empty values are not known yet.
    """

    command: bytes  # the TrainCmd, without its model
    sealing: bytes  # the three secrets of `RoundSecrets`
    masking: bytes
    own_mask: bytes
    keys: bytes = b""  # SignedKeys, as sent
    roster: bytes = b""  # SecureRoster, as taken
    shares: bytes = b""  # SecureShares, as sent
    own_shares: bytes = b""  # this client's shares of its own masking key, and of the seed of its own mask
    peers: bytes = b""  # SecurePeers, as taken
    payload: bytes = b""  # the name of the one payload that the masks of this round may cover
    survivors: bytes = b""  # SecureSurvivors, as taken
    signature: bytes = b""  # as sent
    released: bytes = b""  # UnmaskShares, as sent


def name_of(message: pb.TrainCmd | wire.SecureStep) -> RoundName:
    """Return the name of the round that a message belongs to."""
    return RoundName(message.run_id, message.epoch, message.round)


class SecureState:
    """The files of one client.

    Any thread may use it, but only one thread at a time may write about one round.

    Args:
        state_dir: the state folder of the client, which the caller has locked.

    Attributes:
        released: for which survivors this client has helped to remove masks.

    Raises:
        ConfigError: if finished.json or released.json is damaged.
    """

    def __init__(self, state_dir: Path) -> None:
        self._folder = state_dir / FOLDER
        self._file = self._folder / _FINISHED
        self._finished: dict[str, Finished] = {}
        self._lock = threading.Lock()  # a round that is over must not be written again
        try:
            data = self._file.read_bytes()
            adopted = data.startswith(b"{")  # no digest does
            text = data if adopted else text_after_digest(data)
            for run, (epoch, round_, reason) in parse_json(text).items():
                self._finished[str(run)] = Finished(int(epoch), int(round_), str(reason))
            if adopted:
                replace_with_digest(self._file, text)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{self._file} says which rounds with secure aggregation are over, and cannot be read ({error}): "
                "restore it, or remove it if no server may ask for one of them again"
            ) from error
        self.released = Released(self._folder)
        self._clear()

    def finished(self, name: RoundName) -> Finished | None:
        """Return the newest finished round of a round's run.

        None if it is older than the given round.
        """
        last = self._finished.get(name.run)
        return last if last and (name.epoch, name.round) <= (last.epoch, last.round) else None

    def load(self, name: RoundName) -> RoundRecord | None:
        """Return the record of a round.

        None if the round has not begun, or is over.

        Raises:
            SecureError: "damaged_state", if its file cannot be read.
        """
        if self.finished(name):
            return None
        try:
            known = parse_json(text_after_digest(self._path(name).read_bytes()))
            return RoundRecord(**{field.name: base64.b64decode(known[field.name]) for field in fields(RoundRecord)})
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SecureError("damaged_state", f"{self._path(name)} cannot be read: {error}") from error

    def begun(self, name: RoundName) -> bool:
        """Return whether a round has begun, and is not over."""
        return not self.finished(name) and self._path(name).exists()

    def find(self, run_id: str, round_: int) -> RoundName | None:
        """Return an open round up to a number; None without one.

        It has begun and is not over, and has this number or a smaller one.
        """
        run = RoundName(run_id, 0, 0).run
        found = (
            RoundName(run_id, at.epoch, at.round) for _, of, at in self._rounds() if of == run and at.round <= round_
        )
        return next(filter(self.begun, found), None)

    def save(self, name: RoundName, record: RoundRecord) -> None:
        """Write the record of a round durably.

        Raises:
            SecureError: "replayed_round", if it is over.
            OSError: if that is impossible.
        """
        values = asdict(record).items()
        text = json.dumps({key: base64.b64encode(value).decode() for key, value in values}).encode()
        with self._lock:
            if self.finished(name):
                raise SecureError("replayed_round", f"round {name.round} is over for this client")
            make_folder(self._folder)
            replace_with_digest(self._path(name), text)

    def finish(self, name: RoundName, reason: str = "") -> None:
        """Note durably that a round is over, and remove its secrets.

        Args:
            name: of the round.
            reason: why this client ended it; empty = as all rounds end.

        Raises:
            OSError: if that is impossible.
        """
        with self._lock:
            self._note(name.run, Finished(name.epoch, name.round, reason))
            crashpoint("client_secure_ended")
            self._remove(self._path(name))
            crashpoint("client_secure_removed")

    def finish_others(self, name: RoundName) -> None:
        """Finish all rounds that have a file, but this one."""
        with self._lock:
            for path, run, last in list(self._rounds()):
                if path != self._path(name):
                    self._note(run, last)
                    self._remove(path)

    def _clear(self) -> None:
        """Remove the leftovers of a killed process.

        It may have been killed while it wrote a file, or before it had removed one.
        """
        for path in self._folder.glob("*.new"):
            path.unlink()
        for path, run, at in list(self._rounds()):
            last = self._finished.get(run)
            if last and (at.epoch, at.round) <= (last.epoch, last.round):
                self._remove(path)

    def _note(self, run: str, last: Finished) -> None:
        known = self._finished.get(run)
        if known and (known.epoch, known.round) >= (last.epoch, last.round):
            return
        finished = {each: at for each, at in self._finished.items() if each != run} | {run: last}
        finished = dict(list(finished.items())[-_KEEP_RUNS:])
        make_folder(self._folder)
        replace_with_digest(self._file, json.dumps(finished).encode())
        self._finished = finished

    def _rounds(self) -> Iterator[tuple[Path, str, Finished]]:
        if self._folder.is_dir():
            for path in self._folder.iterdir():
                if found := _ROUND_FILE.fullmatch(path.name):
                    yield path, found[1], Finished(int(found[2]), int(found[3]), "")

    def _remove(self, path: Path) -> None:
        for each in (path, path.with_name(f"{path.name}.new")):
            each.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            sync(self._folder)

    def _path(self, name: RoundName) -> Path:
        return self._folder / f"{name.run}-{name.epoch}-{name.round}.json"
