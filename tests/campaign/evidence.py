"""What a case has left, read from outside: the database, the blobs, the clients' folders, and all logs."""

import json
import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from fedring.codec import decode
from tests.campaign.lessons import SIZE, Values
from tests.damage import ask

_TOLD = re.compile(r"round (\d+): update accepted|the spooled update of round (\d+) had been accepted")


class AcceptedUpdate(NamedTuple):
    """A row of the updates."""

    round: int
    client: str
    name: str
    digest: str
    samples: int
    payload: bytes
    encoding: str
    buffer: int  # the round whose model it is part of
    staleness: int

    @property
    def client_index(self) -> int:
        """The number of the client."""
        return int(self.client.rpartition("-")[2])

    @property
    def values(self) -> Values:
        """The values that were sent, decoded."""
        return self.decoded(SIZE)

    def decoded(self, size: int) -> Values:
        """Return the values that were sent for a model of so many."""
        return decode(self.payload, name=self.encoding, length=size)


class Round(NamedTuple):
    """A row of the rounds."""

    round: int
    job_id: int
    phase: str
    reason: str
    base: int
    model: int  # the version that it published; 0 = none
    ended: bool
    seconds: float  # from its command to its end, if it has ended; until then it has waited for its clients


@dataclass
class Evidence:
    """What is left of a case whose daemons have ended.

    Args:
        state: the server's state folder.
        folders: the clients' state folders.
        logs: of all daemons, by name.
        sent: the names of the updates that have left each client.
        lost: replaced states of the server.
        job: the keys of the job.
        job_id: its id.
        charged_rounds: those of the server's own account of privacy.
        folder: for what checks write.
        second_id: the id of the same job when it ran again without harms, if it did.
        down_seconds: in which the server did not run.
        originals: what blobs contained before a bit of them was flipped, by name.
        reverted: the numbers of clients whose folders were put back to older copies, or damaged.
        must_drop: the numbers of clients that have dropped an older residual, once for each time.
        done: how often each harm was done, and to whom.
        clock: when the server's clock jumped, and by how many seconds it was ahead then.
    """

    state: Path
    folders: Sequence[Path]
    logs: Mapping[str, str]
    sent: Sequence[set[str]] = ()
    lost: Sequence[Path] = ()
    job: Mapping[str, Any] = field(default_factory=dict)
    job_id: int = 1
    charged_rounds: int = 0
    folder: Path = Path()
    second_id: int = 0
    down_seconds: float = 0.0
    originals: Mapping[str, bytes] = field(default_factory=dict)
    reverted: Collection[int] = ()
    must_drop: Sequence[int] = ()
    done: Mapping[str, int] = field(default_factory=dict)
    clock: Sequence[tuple[float, int]] = ((0.0, 0),)

    @cached_property
    def updates(self) -> list[AcceptedUpdate]:
        """All accepted updates of the state, by round and client."""
        return self.updates_of(self.state)

    def updates_of(self, state: Path) -> list[AcceptedUpdate]:
        """Return all accepted updates of a state, by round and client."""
        query = (
            "SELECT round, client_id, name, digest, num_samples, payload, blob, packets, buffer, staleness "
            "FROM updates ORDER BY round, client_id"
        )
        found = []
        for number, client, name, digest, samples, payload, blob, packets, *counts in ask(state, query):
            assert isinstance(number, int)
            assert isinstance(samples, int)
            buffer, staleness = (int(str(each)) for each in counts)
            data = bytes(payload)  # type: ignore[call-overload]
            if blob:
                data = self.originals.get(str(blob)) or (state / "blobs" / str(blob)).read_bytes()
            encoding = json.loads(str(packets))[0]
            encoding = encoding["encoding"] if isinstance(encoding, dict) else encoding[2]
            texts = (str(client), str(name), str(digest))
            found.append(AcceptedUpdate(number, *texts, samples, data, encoding, buffer, staleness))
        return found

    @cached_property
    def by_round(self) -> dict[int, list[AcceptedUpdate]]:
        """The accepted updates of each round's model, by the clients' names."""
        found: defaultdict[int, list[AcceptedUpdate]] = defaultdict(list)
        for update in self.updates:
            found[update.buffer].append(update)
        return {number: sorted(each, key=lambda update: update.client) for number, each in found.items()}

    @cached_property
    def rounds(self) -> list[Round]:
        """All rounds, in order."""
        query = (
            "SELECT round, job_id, phase, reason, base_version, model_version, ended_at, started_at FROM rounds "
            "ORDER BY round"
        )
        commands = "SELECT round, min(at) FROM events WHERE kind = 'round_started' GROUP BY round"
        commanded = {int(str(number)): float(str(at)) for number, at in ask(self.state, commands)}
        found = []
        for number, job_id, phase, reason, base, model, ended, opened in ask(self.state, query):
            began = self._right(commanded.get(int(str(number)), float(str(opened))))
            seconds = self._right(float(str(ended))) - began if ended is not None else 0.0
            first, second, third, fourth = (int(str(each)) for each in (number, job_id, base, model))
            found.append(Round(first, second, str(phase), str(reason), third, fourth, ended is not None, seconds))
        return found

    def _right(self, at: float) -> float:
        """Return the right time of a moment that the server has noted, whose clock may have jumped."""
        for (since, jump), (until, _) in pairwise([*self.clock, (math.inf, 0)]):
            if since - 1 <= at - jump <= until + 1:
                return at - jump
        return at

    @cached_property
    def models(self) -> dict[int, tuple[str, Path]]:
        """The digest and the file of each model, by version."""
        rows = ask(self.state, "SELECT version, digest, blob FROM models ORDER BY version")
        return {int(str(version)): (str(digest), self.state / "blobs" / str(blob)) for version, digest, blob in rows}

    def values_of(self, version: int) -> NDArray[np.float32]:
        """Return the shared parameters of a model as one vector."""
        with safe_open(self.models[version][1], framework="numpy") as file:
            tensors = [file.get_tensor(name).reshape(-1) for name in file.offset_keys()]
        values: NDArray[np.float32] = np.concatenate(tensors)
        return values

    def accepted_of(self, client: int) -> int:
        """Return how many updates of a client were accepted, also those that are not kept any more."""
        name = f"client-{client}"
        pruned = ask(self.state, "SELECT pruned_updates FROM clients WHERE client_id = ?", name)
        return sum(int(str(number)) for (number,) in pruned) + sum(update.client == name for update in self.updates)

    def told(self, client: int) -> list[int]:
        """Return the rounds of which this client was told that its update is accepted, as its log has them."""
        return [int(one or other) for one, other in _TOLD.findall(self.logs.get(f"client-{client}", ""))]
