"""What must be on the disks of a server and of a client after a power loss, as they have told it to others.

Each check starts the daemon's own code on the files that are left, and looks for what was told before the loss. It
returns faults as sentences.
"""

import asyncio
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from safetensors import safe_open

from fedring.client.policy.identity import KEY_FILE, check_own_key
from fedring.client.policy.ledger import LEDGER, Ledger
from fedring.client.policy.secret import SECRET_FILE, kept_secret
from fedring.client.secure.state import RoundName, RoundRecord, SecureState
from fedring.client.transfer.kept import KeptFiles
from fedring.client.transfer.spool import Spool
from fedring.codec.digest import is_called
from fedring.daemon.lock import StateLock
from fedring.rpc.tls import Tls
from fedring.secure import SecureError
from fedring.server.config import ServerConfig
from fedring.server.recovery import recover
from fedring.server.state.backup.contents import read_contents
from fedring.server.state.backup.restore import restore
from fedring.server.state.files import FACTS
from fedring.v1 import secure_pb2 as wire
from tests.damage import ask
from tests.ledgers import account_in
from tests.power.recording import KEPT_MODELS, KEPT_ROUNDS, SAMPLED_STEPS, SETTINGS
from tests.power.records import Told

_MESSAGE_KINDS = {
    "SendKeys": "keys",
    "SendShares": "shares",
    "SignSurvivors": "signature",
    "SendUnmaskShares": "unmask",
}


def server_faults(folder: Path, said: Sequence[Told]) -> Iterator[str]:
    """Yield what is wrong in the state folder of a server that has said these things."""
    try:
        asyncio.run(_recover(folder))
    except Exception as error:  # noqa: BLE001  # any error is a start that fails
        yield f"the server does not start: {type(error).__name__}: {error}"
        return
    for blob in read_contents(folder / FACTS).blobs:
        path = folder / "blobs" / blob.digest
        if not path.exists():
            yield f"blobs/{path.name} is named, and missing"
        elif not is_called(path.read_bytes(), path.name):
            yield f"blobs/{path.name} is damaged"
    facts = _Facts(folder)
    for each in said:
        yield from facts.faults(each.words)


class _Facts:
    """What the database of a server says, beside what the server has said."""

    def __init__(self, folder: Path) -> None:
        self._rounds = _pairs(ask(folder, "SELECT round, ended_at FROM rounds"))
        self._bases = _pairs(ask(folder, "SELECT round, base_version FROM rounds"))
        self._jobs = _pairs(ask(folder, "SELECT job_id, state FROM jobs"))
        self._models = _pairs(ask(folder, "SELECT digest, version FROM models"))
        updates = ask(folder, "SELECT round, client_id, digest FROM updates")
        self._updates = {(number, client): digest for number, client, digest in updates}
        self._messages = set(ask(folder, "SELECT round, client_id, kind FROM secure_messages"))
        self._charged = {number for (number,) in ask(folder, "SELECT round FROM charges")}
        self._tokens = {token for (token,) in ask(folder, "SELECT token_id FROM tokens")}
        self._newest_round, self._newest_model = max(self._rounds, default=0), max(self._models.values(), default=0)

    def faults(self, words: Mapping[str, Any]) -> Iterator[str]:
        match words:
            case {"job": job} if job not in self._jobs:
                yield f"job {job} was queued, and is unknown"
            case {"ended": job, "state": state} if self._jobs.get(job) != state:
                yield f"job {job} was {state}, and is {self._jobs.get(job)}"
            case {"round_begun": number} if number not in self._rounds:
                yield f"round {number} was announced, and is unknown"
            case {"round_begun": number, "model": digest} if (
                digest not in self._models and self._bases[number] > self._newest_model - KEPT_MODELS
            ):
                yield f"the model of round {number} was announced, and is missing"
            case {"published": number, "version": version} if not self._rounds.get(number):
                yield f"round {number} was published as {version}, and is not over"
            case {"published": number, "version": version} if version > self._newest_model:
                yield f"model {version} was published, and is missing"
            case {"token": token} if token not in self._tokens:
                yield f"the token {token} was printed, and is unknown"
            case {"charged_round": number} if number not in self._charged:
                yield f"round {number} was charged, and is not"
            case {"accepted": digest, "client": client, "round": number}:
                found = self._updates.get((number, client))
                old = self._rounds.get(number) and number <= self._newest_round - KEPT_ROUNDS
                if found != digest and not (found is None and old):
                    yield f"the update of {client} in round {number} was accepted, and is {found}"
            case {"taken": method, "client": client, "round": number}:
                if not self._rounds.get(number) and (number, client, _MESSAGE_KINDS[method]) not in self._messages:
                    yield f"{method} of {client} in round {number} was answered, and is forgotten"


def _pairs(rows: list[tuple[Any, ...]]) -> dict[Any, Any]:
    return {key: value for key, value in rows}  # noqa: C416  # mypy does not know that there are two


def backup_faults(folder: Path, said: Sequence[Told]) -> Iterator[str]:
    """Yield what is wrong in a folder of backups, each of which `flctl backup` has said to be made."""
    for name in (each.words["backup"] for each in said):
        try:
            restore(folder / name, folder / f"restored-{name}")
        except Exception as error:  # noqa: BLE001  # any error is a backup that is none
            yield f"the backup {name} cannot be restored: {type(error).__name__}: {error}"


def checkpoint_faults(folder: Path, checkpoints: Mapping[str, bytes]) -> Iterator[str]:
    """Yield what is wrong with the checkpoints of a worker, which it had written before it trained on.

    Args:
        folder: The worker's state.
        checkpoints: What each file contained, by its path below the folder.
    """
    for name, content in checkpoints.items():
        path = folder / name
        if not path.exists():
            yield f"{name} was written, and is missing"
        elif path.read_bytes() != content:
            yield f"{name} is damaged"


def client_faults(
    folder: Path, name: str, said: Sequence[Told], final: Path, kept: Sequence[tuple[str, str]]
) -> Iterator[str]:
    """Yield what is wrong in the state folder of a client.

    Args:
        folder: The folder after the loss.
        name: The client.
        said: What it has said before.
        final: The folder at the end of the recording, in which its secrets are.
        kept: The names of its kept files and the digests of their contents, in order, which it had noted before it said
            the last thing.
    """
    started = folder.exists()
    try:
        with StateLock(folder, client=name):
            yield from _kept_faults(folder, name, said, kept)
            yield from _secure_faults(SecureState(folder), said)
            kept_secret(folder)
            check_own_key(Tls(), folder)
            Ledger(folder)
            Spool(folder, name).pending()
            if left := sorted(path.name for path in folder.iterdir() if path.name.startswith(".")):
                yield f"{left[0]} is left over"
    except Exception as error:  # noqa: BLE001  # any error is a start that fails
        yield f"the client does not start: {type(error).__name__}: {error}"
        return
    charged = len({each.words["round"] for each in said if each.words.get("charged")})
    account = account_in(folder) if (folder / LEDGER).exists() else {"rounds": {}}
    if (counted := sum(account["rounds"].values())) < charged:
        yield f"{charged} updates were charged, and {counted} are in the account"
    sampled = SAMPLED_STEPS * len({each.words["digest"] for each in said if each.words.get("sampled")})
    if (steps := sum(entry["steps"] for entry in account.get("samples", []))) < sampled:
        yield f"updates of {sampled} steps on samples were sent, and {steps} are in the account"
    if said and not started:
        yield "the folder is missing"
    for file, needed in ((SECRET_FILE, "offered"), (KEY_FILE, "said")):
        path = folder / file
        if path.exists() and path.read_bytes() != (final / file).read_bytes():
            yield f"{file} is another one"
        if not path.exists() and (final / file).exists() and any(needed in each.words for each in said):
            yield f"{file} is missing"


async def _recover(folder: Path) -> None:
    with ExitStack() as stack:
        config = ServerConfig.model_validate({**SETTINGS, "trusted": [], "state_dir": folder})
        await recover(config, stack, sweep=True)


def _kept_faults(folder: Path, name: str, said: Sequence[Told], kept: Sequence[tuple[str, str]]) -> Iterator[str]:
    dropped: list[str] = []
    updates, contents = set[str](), dict[str, str]()  # the second by file
    for path in folder.glob("kept-*.safetensors"):
        try:
            with safe_open(path, framework="pt") as opened:
                words = opened.metadata()
        except Exception as error:  # noqa: BLE001  # of the reader
            yield f"{path.name} cannot be read: {error}"
            continue
        updates.add(words["update"])
        contents[path.name] = words["digest"]
        KeptFiles(folder, name, lambda: dropped.append("kept")).load(words["line"])
    if dropped:
        yield "a kept file is damaged"
    order = [content for _, content in kept]
    for file, content in dict(kept).items():
        found = contents.get(file, "nothing")
        if found != content and found in order:
            yield f"{file} was {content[:20]}, and is an earlier one"
        if found == "nothing":
            yield f"{file} was {content[:20]}, and is missing"
    last = next((each.words for each in reversed(said) if "offered" in each.words), None)
    if last and last["precious"] and last["offered"] not in {*updates, _left_by(folder / "update.left")}:
        yield f"what {last['offered'][:20]} leaves is lost"


def _left_by(path: Path) -> str:
    """Return the update that has left the file; empty if it cannot be read."""
    with suppress(Exception), safe_open(path, framework="pt") as opened:
        return str(opened.metadata()["update"])
    return ""


def _secure_faults(state: SecureState, said: Sequence[Told]) -> Iterator[str]:
    for words in (each.words for each in said if "said" in each.words):
        name = RoundName(words["run"], words["epoch"], words["round"])
        if words["said"] == "SendUnmaskShares" and not state.released.sets_of(words["base"]):
            yield f"shares of round {name.round} were released, and that is forgotten"
        if state.finished(name):
            continue
        try:
            record = state.load(name)
        except SecureError as error:
            yield str(error)
            continue
        if record is None:
            yield f"{words['said']} of round {name.round} was sent, and the round is forgotten"
        elif hashlib.sha256(_as_sent(words["said"], name.round, record)).hexdigest() != words["text"]:
            yield f"{words['said']} of round {name.round} was another one"


def _as_sent(method: str, number: int, record: RoundRecord) -> bytes:
    """Return the message that a client sends again."""
    match method:
        case "SendKeys":
            return wire.SecureKeys(round=number, keys=wire.SignedKeys.FromString(record.keys)).SerializeToString()
        case "SendShares":
            return record.shares
        case "SignSurvivors":
            return wire.SurvivorsSignature(round=number, signature=record.signature).SerializeToString()
        case _:
            return record.released
