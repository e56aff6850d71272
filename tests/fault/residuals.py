"""The residuals that clients must have, computed from their notes and from the updates that a server has accepted.

The trainer `user_trainers.known` makes deltas that the tests can compute. With them, everything else follows from which
updates were accepted. The deltas, and so the models and the residuals, are even integers, which float32 adds without
rounding; the mean of two clients that have trained on one sample each is an integer, too.
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

from fedring.codec import Encoding, decode
from fedring.codec.digest import name_of
from fedring.compress.feedback import compress
from tests.damage import ask, model_file
from tests.fault.user_trainers import delta_of
from tests.kept import kept_of, kept_residual

SMALL, LARGE = 20_000, 400_000
"""Sizes of models whose updates, at KEEP, are stored in a row of the database, or in a file."""
KEEP = 0.05
ENCODING = Encoding("fp32_sparse", keep_ratio=KEEP)

Values = NDArray[np.float32]  # [size]


@dataclass(frozen=True, slots=True)
class Training:
    """One training that a client has begun."""

    number: int  # of this client's trainings, from 0; decides the delta
    round: int
    base: str  # digest of the model that it began from


@dataclass(frozen=True, slots=True, eq=False)
class AcceptedUpdate:
    """An accepted update as the client must have sent it."""

    training: Training
    digest: str  # of its payload
    values: Values


History = tuple[list[AcceptedUpdate], Values]
"""A client's accepted updates, and its residual after them."""


def read_trainings(notes: Path) -> list[Training]:
    """Return the trainings that the trainer has noted in this file, in order."""
    lines = notes.read_text().splitlines() if notes.exists() else []
    return [Training(number, *json.loads(line)) for number, line in enumerate(lines)]


def replay(
    client: int, done: Sequence[Training], accepted: Collection[str], size: int, *, lost_before: Collection[int] = ()
) -> History:
    """Compute a client's accepted updates and its residual as error feedback demands.

    Args:
        client: its index, which decides its deltas.
        done: its trainings.
        accepted: the digests of payloads that some server has accepted.
        size: of the model.
        lost_before: numbers of trainings before which the client lost its residual.

    Returns:
        The accepted updates, and the residual after them.
    """
    sent, residual = [], np.zeros(size, np.float32)
    for training in done:
        if training.number in lost_before:
            residual = np.zeros(size, np.float32)
        made = compress(delta_of(client, training.number, size), residual, ENCODING)
        digest = name_of(made.payload)
        if digest in accepted:
            sent.append(AcceptedUpdate(training, digest, decode(made.payload, name=ENCODING.name, length=size)))
            assert made.residual is not None
            residual = made.residual
    return sent, residual


def accepted_digests(*states: Path) -> set[str]:
    """Return the digests of all accepted payloads in the databases of these states."""
    return {str(digest) for state in states for (digest,) in ask(state, "SELECT digest FROM updates")}


def residual_of(folder: Path, size: int) -> Values:
    """Return the residual, [size], that the client has stored in its state folder; zeros if there is none."""
    found = kept_residual(folder)
    return np.zeros(size, np.float32) if found is None else found


def has_spooled_update(folder: Path) -> bool:
    """Return whether the client in this folder has an update of which it does not know whether it was accepted."""
    path = folder / "update"
    return path.exists() and any(path.read_bytes()[:8])


def knows_newest_acceptance(folder: Path, state: Path, client: str) -> bool:
    """Return whether the client has recorded the acceptance of its newest update in the server's state."""
    query = "SELECT name FROM updates WHERE client_id = ? ORDER BY round DESC LIMIT 1"
    names = [str(name) for (name,) in ask(state, query, client)]
    return not has_spooled_update(folder) and [_update_before_residual(folder)] == names


def _update_before_residual(folder: Path) -> str:
    """Return the name of the update that left the client's residual; empty if there is no residual."""
    section = kept_of(folder, "residual")
    return "" if section is None else section.words["name"]


def stored_model(state: Path, version: int, size: int) -> Values:
    """Return the parameters, [size], in the version's file."""
    values: Values = safetensors.numpy.load_file(model_file(state, version))["values"]
    assert values.shape == (size,)
    return values


def possible_histories(
    client: int, done: Sequence[Training], accepted: Collection[str], forgotten: Collection[str], size: int
) -> list[History]:
    """Compute what a client may have seen accepted, when its server has lost part of what it had accepted.

    Args:
        client: its index, which decides its deltas.
        done: its trainings.
        accepted: the digests of payloads that the server has in its database.
        forgotten: those that it had accepted, but has lost; the client may have been told of each, or not.
        size: of the model.

    Returns:
        Each possible list of accepted updates, with the residual after them.
    """
    histories: list[History] = [([], np.zeros(size, np.float32))]
    for training in done:
        after: list[History] = []
        for sent, residual in histories:
            made = compress(delta_of(client, training.number, size), residual, ENCODING)
            digest = name_of(made.payload)
            if digest not in accepted:
                after.append((sent, residual))
            if digest in accepted or digest in forgotten:
                assert made.residual is not None
                values = decode(made.payload, name=ENCODING.name, length=size)
                after.append(([*sent, AcceptedUpdate(training, digest, values)], made.residual))
        histories = after
    return histories


def check_rounds(state: Path, clients: Sequence[Path], size: int, *lost: Path) -> int:
    """Assert that the clients' notes explain every accepted update, every model and every residual.

    Args:
        state: the server's, which keeps all models and updates.
        clients: the state folders of all its clients, named client-0, client-1 and so on; their notes lie beside them.
        size: of the model.
        lost: replaced states of the server; clients may have been told that the updates in them were accepted.

    Returns:
        The number of accepted updates in `state`.
    """
    known, forgotten = accepted_digests(state), accepted_digests(*lost)
    rounds = {number: (version, digest, published) for number, version, digest, published in _rounds(state)}
    counted: defaultdict[int, list[AcceptedUpdate]] = defaultdict(list)
    for index, folder in enumerate(clients):
        updates, stored = dict(_updates(state, f"client-{index}")), residual_of(folder, size)
        histories = possible_histories(index, read_trainings(notes_path(folder)), known, forgotten, size)
        found = [sent for sent, residual in histories if np.array_equal(residual, stored)]
        explained = [by for sent in found if (by := {each.digest: each for each in sent}).keys() >= updates.keys()]
        assert explained, f"none of {len(histories)} histories, {len(found)} of them with this residual"
        for digest, number in updates.items():
            sent = explained[0][digest]
            assert (sent.training.round, sent.training.base) == (number, rounds[number][1])
            counted[number].append(sent)
    for number, (version, _, published) in rounds.items():
        values = [each.values for each in counted[number]]
        if published:
            step = sum(values, np.zeros(size, np.float64)) / len(values)
            expected = stored_model(state, version, size) + step
            np.testing.assert_array_equal(stored_model(state, published, size), expected)
    return sum(map(len, counted.values()))


def notes_path(folder: Path) -> Path:
    """Return where the trainer of the client in this folder keeps its notes."""
    return folder.with_name(f"{folder.name}.notes")


def copy_files(state: Path, copy: Path) -> None:
    """Copy all files of a server that does not run, as `cp -a` or a machine's snapshot does."""
    shutil.copytree(state, copy, symlinks=True)


def _rounds(state: Path) -> Iterator[tuple[int, int, str, int]]:
    """Yield each round's number, the version and digest of its base model, and the version it published, or 0."""
    query = "SELECT r.round, version, digest, model_version FROM rounds r JOIN models ON version = r.base_version"
    for number, version, digest, published in ask(state, query):
        yield int(str(number)), int(str(version)), str(digest), int(str(published))


def _updates(state: Path, client: str) -> Iterator[tuple[str, int]]:
    """Yield the payload's digest and the round of each accepted update of the client."""
    for digest, number in ask(state, "SELECT digest, round FROM updates WHERE client_id = ?", client):
        yield str(digest), int(str(number))
