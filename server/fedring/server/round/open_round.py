"""The round in progress, beyond what the state machine knows of it."""

import time
from dataclasses import dataclass, field, replace
from typing import Any

from fedring.server.round.events import Phase
from fedring.server.round.sessions import Traffic
from fedring.server.state.rows import ModelRow, RoundRow, UpdateRow
from fedring.train.job import Job
from fedring.v1 import federation_pb2 as pb
from fedring.v1.rendezvous_pb2 import Done


@dataclass(slots=True)
class OpenRound:
    """What the shell keeps of it."""

    row: RoundRow
    job: Job
    command: pb.TrainCmd
    base: ModelRow
    model: pb.SmallModel | None = None  # the base, where the command can carry it
    started: float = 0.0  # monotonic, when the command went out
    accepted: dict[str, UpdateRow] = field(default_factory=dict)
    traffic: dict[str, Traffic] = field(default_factory=dict)
    done: dict[str, Done] = field(default_factory=dict)  # by the workers of a group, one of which delivers
    failures: list[str] = field(default_factory=list)  # why clients could not train, a sentence each
    stop: str = ""  # why it is to end without a model, should the disk refuse that model
    waits_for_disk: bool = False  # with its aggregation
    retryable: bool = True  # False if the job's next rounds would end as this one does

    def event(self, seconds: float, model: pb.SmallModel | None = None) -> bytes:
        """The command as it is sent to clients that have so many seconds, with the model if given."""
        command = pb.TrainCmd(deadline_seconds=seconds, model=model)
        command.MergeFrom(self.command)
        return pb.ServerEvent(train=command).SerializeToString()

    @property
    def missing(self) -> list[str]:
        """The selected clients of which nothing came, sorted."""
        return sorted(set(self.row.selected) - self.accepted.keys() - self.done.keys())

    @property
    def seconds_left(self) -> float:
        """What clients have until the deadline, > 0."""
        return max(self.job.deadline_seconds - (time.monotonic() - self.started), 0.001)

    def ended(self, phase: Phase, *, reason: str = "", model_version: int = 0) -> RoundRow:
        """Its row, now that it has ended in this phase."""
        stats = self.stats(time.monotonic() - self.started if self.started else 0.0)
        now = time.time()
        return replace(self.row, phase=phase, reason=reason, model_version=model_version, ended_at=now, stats=stats)

    def stats(self, seconds: float) -> dict[str, Any]:
        """What the round's row keeps of its clients; `seconds` from the command to the model."""
        clients = {}
        for client in sorted(self.traffic.keys() | self.accepted.keys() | self.done.keys()):
            moved, update = self.traffic.get(client, Traffic()), self.accepted.get(client)
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
        return {"seconds": seconds, "clients": clients}
