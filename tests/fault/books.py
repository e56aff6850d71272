"""What a client owes, to the last entry: its trainer's deltas are known, and all else follows from which counted.

The deltas, and so the models and the residuals, are even integers, which float32 adds without rounding: the mean of two
clients that have trained on one sample each is an integer, too.
"""

import json
import shutil
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import safe_open

from fedring.codec import Encoding, decode
from fedring.codec.digest import name_of
from fedring.compress.feedback import compress
from tests.damage import ask, model_file
from tests.fault.user_trainers import delta_of

SMALL, LARGE = 20_000, 400_000
"""Sizes of a model whose updates lie in a row of the database, or in a file, at the share that is kept."""
KEEP = 0.05
ENCODING = Encoding("fp32_sparse", keep_ratio=KEEP)

Values = NDArray[np.float32]  # [size]


@dataclass(frozen=True, slots=True)
class Training:
    """One training that a client began."""

    number: int  # of this client's, from 0; decides the delta
    round: int
    base: str  # digest of the model that it began from


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """An update that counted, as it must have been."""

    training: Training
    digest: str  # of its payload
    values: Values


def trainings(notes: Path) -> list[Training]:
    """What the trainer has noted, in order."""
    lines = notes.read_text().splitlines() if notes.exists() else []
    return [Training(number, *json.loads(line)) for number, line in enumerate(lines)]


def replay(
    client: int, done: Sequence[Training], accepted: Collection[str], size: int, *, lost_before: Collection[int] = ()
) -> tuple[list[Sent], Values]:
    """Keep the client's books as error feedback demands.

    Args:
        client: its index, which decides its deltas.
        done: its trainings.
        accepted: the digests of payloads that some server has accepted.
        size: of the model.
        lost_before: numbers of trainings before whose updates what was owed was lost.

    Returns:
        The updates that counted, and what the client owes after them.
    """
    sent, owed = [], np.zeros(size, np.float32)
    for training in done:
        if training.number in lost_before:
            owed = np.zeros(size, np.float32)
        made = compress(delta_of(client, training.number, size), owed, ENCODING)
        digest = name_of(made.payload)
        if digest in accepted:
            sent.append(Sent(training, digest, decode(made.payload, name=ENCODING.name, length=size)))
            assert made.residual is not None
            owed = made.residual
    return sent, owed


def accepted_in(*states: Path) -> set[str]:
    """The digests of all payloads of which the databases of these states know."""
    return {str(digest) for state in states for (digest,) in ask(state, "SELECT digest FROM updates")}


def owed_by(folder: Path, size: int) -> Values:
    """What the client in this folder says that it owes."""
    path = folder / "residual.safetensors"
    if not path.exists():
        return np.zeros(size, np.float32)
    found: Values = safetensors.numpy.load_file(path)["residual"]
    return found


def noted_by(folder: Path) -> str:
    """The name of the update that left that out; empty if there is none."""
    path = folder / "residual.safetensors"
    if not path.exists():
        return ""
    with safe_open(path, "numpy") as file:
        return str(file.metadata()["name"])


def is_spooled(folder: Path) -> bool:
    """Whether the client in this folder has an update of which it does not know what has become."""
    path = folder / "update"
    return path.exists() and any(path.read_bytes()[:8])


def has_noted(folder: Path, state: Path, client: str) -> bool:
    """Whether the client in this folder has noted the newest update that the server in `state` has of it."""
    query = "SELECT name FROM updates WHERE client_id = ? ORDER BY round DESC LIMIT 1"
    names = [str(name) for (name,) in ask(state, query, client)]
    return not is_spooled(folder) and [noted_by(folder)] == names


def model(state: Path, version: int, size: int) -> Values:
    """The parameters of the version, as its file has them."""
    values: Values = safetensors.numpy.load_file(model_file(state, version))["values"]
    assert values.shape == (size,)
    return values


def stories(
    client: int, done: Sequence[Training], accepted: Collection[str], forgotten: Collection[str], size: int
) -> list[tuple[list[Sent], Values]]:
    """Keep the client's books in each way in which they can have been kept.

    Args:
        client: its index, which decides its deltas.
        done: its trainings.
        accepted: the digests of payloads that the server knows to have accepted.
        forgotten: those that it knows no more; the client may have been told of each, or not.
        size: of the model.

    Returns:
        Of each way the updates that counted for the client, and what it owes after them.
    """
    ways: list[tuple[list[Sent], Values]] = [([], np.zeros(size, np.float32))]
    for training in done:
        after: list[tuple[list[Sent], Values]] = []
        for sent, owed in ways:
            made = compress(delta_of(client, training.number, size), owed, ENCODING)
            digest = name_of(made.payload)
            if digest not in accepted:
                after.append((sent, owed))
            if digest in accepted or digest in forgotten:
                assert made.residual is not None
                values = decode(made.payload, name=ENCODING.name, length=size)
                after.append(([*sent, Sent(training, digest, values)], made.residual))
        ways = after
    return ways


def check_rounds(state: Path, clients: Sequence[Path], size: int, *lost: Path) -> int:
    """Every accepted update, every model and every residual is what the clients' notes say.

    Args:
        state: the server's, which keeps all models and updates.
        clients: the state folders of all its clients, named client-0, client-1 and so on; their notes lie beside them.
        size: of the model.
        lost: states whose updates the clients have been told to be accepted, too.

    Returns:
        How many updates counted.
    """
    known, forgotten = accepted_in(state), accepted_in(*lost)
    rounds = {number: (version, digest, published) for number, version, digest, published in _rounds(state)}
    counted: defaultdict[int, list[Sent]] = defaultdict(list)
    for index, folder in enumerate(clients):
        updates, owes = dict(_updates(state, f"client-{index}")), owed_by(folder, size)
        ways = stories(index, trainings(notes_of(folder)), known, forgotten, size)
        found = [sent for sent, owed in ways if np.array_equal(owed, owes)]
        explained = [way for sent in found if (way := {each.digest: each for each in sent}).keys() >= updates.keys()]
        assert explained, f"none of {len(ways)} ways, {len(found)} of them with this residual"
        for digest, number in updates.items():
            sent = explained[0][digest]
            assert (sent.training.round, sent.training.base) == (number, rounds[number][1])
            counted[number].append(sent)
    for number, (version, _, published) in rounds.items():
        values = [each.values for each in counted[number]]
        if published:
            step = sum(values, np.zeros(size, np.float64)) / len(values)
            np.testing.assert_array_equal(model(state, published, size), model(state, version, size) + step)
    return sum(map(len, counted.values()))


def notes_of(folder: Path) -> Path:
    """Where the trainer of the client in this folder keeps its notes."""
    return folder.with_name(f"{folder.name}.notes")


def copy_state(state: Path, copy: Path) -> None:
    """Copy all files of a server that does not run, as `cp -a` or a machine's snapshot does."""
    shutil.copytree(state, copy, symlinks=True)


def _rounds(state: Path) -> Iterator[tuple[int, int, str, int]]:
    """Each round's number, the version and the digest of the model that it starts from, and what it published or 0."""
    query = "SELECT r.round, version, digest, model_version FROM rounds r JOIN models ON version = r.base_version"
    for number, version, digest, published in ask(state, query):
        yield int(str(number)), int(str(version)), str(digest), int(str(published))


def _updates(state: Path, client: str) -> Iterator[tuple[str, int]]:
    """Of each accepted update of the client the payload's digest and the round."""
    for digest, number in ask(state, "SELECT digest, round FROM updates WHERE client_id = ?", client):
        yield str(digest), int(str(number))
