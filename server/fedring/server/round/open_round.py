"""An open round: the state of its machine, and what the server keeps of it beyond that."""

import asyncio
import time
from dataclasses import dataclass, field, replace
from typing import Any

from fedring.server.group.rendezvous import Rendezvous
from fedring.server.model.guards import Guard, weight_of
from fedring.server.model.private_mean import PrivateRound
from fedring.server.round.events import Phase, State
from fedring.server.round.secure_state import SecureState
from fedring.server.round.trace import RoundTrace
from fedring.server.state.rows import ModelRow, RoundRow, UpdateRow
from fedring.train.job import Job
from fedring.train.metrics import combine, with_origin
from fedring.v1 import federation_pb2 as pb
from fedring.v1.rendezvous_pb2 import Done


@dataclass(slots=True)
class ClientTraffic:
    """The bytes that one client moved in one round, as they were on the wire, and the seconds that took."""

    upload_bytes: int = 0
    download_bytes: int = 0
    upload_seconds: float = 0.0
    download_seconds: float = 0.0


@dataclass(slots=True)
class OpenRound:
    """One open round; owned by `Rounds`.

    Attributes:
        state: the machine's state: all clients that are here, and this round. Only `Rounds` changes it.
        changed: set whenever the state has changed; whoever runs the round clears it.
        settling: held while a phase of the round ends, and while a batch of updates is committed.
        group: its workers, if they train together.
    """

    row: RoundRow
    job: Job  # with the settings of this round
    command: pb.TrainCmd
    base: ModelRow
    model: pb.SmallModel | None = None  # the base model, if it is small enough to travel with the command
    state: State = field(default_factory=State)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    settling: asyncio.Lock = field(default_factory=asyncio.Lock)
    group: Rendezvous | None = None
    trace: RoundTrace = field(default_factory=RoundTrace)
    made: ModelRow | None = None  # the model that it has published
    started: float = 0.0  # when the command was sent, monotonic seconds; 0 = it was not yet
    accepted: dict[str, UpdateRow] = field(default_factory=dict)
    traffic: dict[str, ClientTraffic] = field(default_factory=dict)
    done: dict[str, Done] = field(default_factory=dict)  # what the workers of a group say of their work
    stragglers: frozenset[str] = frozenset()  # clients that straggler_factor has left out
    left_out: frozenset[str] = frozenset()  # clients that are not drawn: they sent wrong shares in an earlier round
    liars: frozenset[str] = frozenset()  # clients that were proved to send wrong shares in this one
    guarded: Guard = field(default_factory=Guard)  # what the job's guards did to the accepted updates
    private: PrivateRound | None = None  # what differential privacy does to it; None = nothing, or not known yet
    secure: SecureState | None = None  # its secure aggregation; None = its job has none, or it has not started
    failures: list[str] = field(default_factory=list)  # sentences: who could not train, what was damaged
    stop_reason: str = ""  # why the round ends without a model if the disk refuses that model; "" = nobody asked
    waits_for_disk: bool = False  # whether its aggregation waits until the disk takes the model
    waits_for_shares: bool = False  # whether its aggregation waits for what clients say to remove masks
    retryable: bool = True  # False if the job's next rounds would end as this one does

    def event(self, seconds: float, model: pb.SmallModel | None = None) -> bytes:
        """Return the serialized command.

        Args:
            seconds: how long the clients have.
            model: the base model, if the command is to carry it.
        """
        command = pb.TrainCmd(deadline_seconds=seconds, model=model)
        command.MergeFrom(self.command)
        return pb.ServerEvent(train=command).SerializeToString()

    @property
    def ids(self) -> dict[str, object]:
        """The round and its job, for logs."""
        return {"round": self.row.round, "job": self.row.job_id}

    @property
    def phase(self) -> Phase | None:
        """The phase that the round is in; None before it begins and after it has finished."""
        return self.state.round.phase if self.state.round else None

    @property
    def stalled(self) -> frozenset[str]:
        """The clients that make no progress."""
        return self.state.round.stalled if self.state.round else frozenset()

    def asks(self, client: str) -> bool:
        """Return whether the client was asked to train or to evaluate."""
        round_ = self.state.round
        return round_ is not None and client in round_.selected | round_.evaluators

    @property
    def title(self) -> str:
        """What people call the round: they know it by its job."""
        return f"round {self.row.job_round} of job {self.row.job_id}"

    @property
    def missing(self) -> list[str]:
        """The selected clients that neither delivered nor were done as members of a group, sorted."""
        return sorted(set(self.row.selected) - self.accepted.keys() - self.done.keys())

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline, above 0."""
        return max(self.job.deadline_seconds - (time.monotonic() - self.started), 0.001)

    def ended(self, phase: Phase, *, reason: str = "", model_version: int = 0) -> RoundRow:
        """Return the row of the round, which ends in this phase."""
        stats = self.stats(time.monotonic() - self.started if self.started else 0.0)
        now = time.time()
        return replace(self.row, phase=phase, reason=reason, model_version=model_version, ended_at=now, stats=stats)

    def stats(self, seconds: float) -> dict[str, Any]:
        """Return the figures that the round's row keeps; `seconds` is the time from the command to the model."""
        clients: dict[str, dict[str, Any]] = {}
        for client in sorted(self.traffic.keys() | self.accepted.keys() | self.done.keys()):
            moved, update = self.traffic.get(client, ClientTraffic()), self.accepted.get(client)
            done = self.done.get(client, Done())
            clients[client] = {
                "num_samples": update.num_samples if update else done.num_samples,
                "train_seconds": update.train_seconds if update else done.train_seconds,
                "encoding": update.packets[0].encoding if update else "",
                "upload_bytes": moved.upload_bytes,
                "download_bytes": moved.download_bytes,
                "upload_seconds": moved.upload_seconds,
                "download_seconds": moved.download_seconds,
                "metrics": dict(update.metrics if update else done.metrics),
            }
        trained = combine((weight_of(self.job, row["num_samples"]), row["metrics"]) for row in clients.values())
        named = {key: sorted(getattr(self, key)) for key in ("stalled", "stragglers", "left_out", "liars")}
        return {
            "seconds": seconds,
            "clients": clients,
            "metrics": with_origin("train", trained),
            "settings": {key: getattr(self.command, key) for key in self.job.scheduled} | (self.row.settings or {}),
            **(self.private.stats() if self.private else self.guarded.stats()),
            **{key: names for key, names in named.items() if names},
            **({"secure": self.secure.figures(self.accepted)} if self.secure else {}),
        }
