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


def check_rounds(state: Path, clients: Sequence[Path], rounds: int, size: int, *lost: Path) -> None:
    """Every accepted update, every model and every residual is what the clients' notes say.

    Args:
        state: the server's, which keeps all models and updates.
        clients: the state folders of all its clients, named client-0, client-1 and so on; their notes lie beside them.
        rounds: how many there were.
        size: of the model.
        lost: states whose updates the clients have been told to be accepted, too.
    """
    bases = {number: (version, digest) for number, version, digest in _bases(state)}
    assert sorted(bases) == list(range(1, rounds + 1))
    counted: defaultdict[int, list[Sent]] = defaultdict(list)
    for index, folder in enumerate(clients):
        sent, owed = replay(index, trainings(notes_of(folder)), accepted_in(state, *lost), size)
        np.testing.assert_array_equal(owed_by(folder, size), owed)
        explained = {each.digest: each for each in sent}
        for number, digest in _updates(state, f"client-{index}"):
            begun = explained[digest].training
            assert (begun.round, begun.base) == (number, bases[number][1])
            counted[number].append(explained[digest])
    for number, (version, _) in bases.items():
        values = [each.values for each in counted[number]]
        step = sum(values, np.zeros(size, np.float64)) / len(values)
        np.testing.assert_array_equal(model(state, version + 1, size), model(state, version, size) + step)


def notes_of(folder: Path) -> Path:
    """Where the trainer of the client in this folder keeps its notes."""
    return folder.with_name(f"{folder.name}.notes")


def copy_state(state: Path, copy: Path) -> None:
    """Copy all files of a server that does not run, as `cp -a` or a machine's snapshot does."""
    shutil.copytree(state, copy, symlinks=True)


def _bases(state: Path) -> Iterator[tuple[int, int, str]]:
    """Each round's number, and the version and the digest of the model that it starts from."""
    query = "SELECT r.round, version, digest FROM rounds r JOIN models ON version = r.base_version"
    for number, version, digest in ask(state, query):
        yield int(str(number)), int(str(version)), str(digest)


def _updates(state: Path, client: str) -> Iterator[tuple[int, str]]:
    """Of each accepted update of the client the round and the payload's digest."""
    for number, digest in ask(state, "SELECT round, digest FROM updates WHERE client_id = ?", client):
        yield int(str(number)), str(digest)
