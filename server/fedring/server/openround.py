"""The round in progress, beyond what the state machine knows of it."""

from dataclasses import dataclass, field
from typing import Any

from fedring.server import rounds as rd
from fedring.server.rows import ModelRow, RoundRow, UpdateRow
from fedring.server.sessions import Traffic
from fedring.train.job import Job
from fedring.v1 import federation_pb2 as pb


@dataclass(slots=True)
class OpenRound:
    """What the shell keeps of it."""

    row: RoundRow
    job: Job
    command: pb.TrainCmd
    base: ModelRow
    started: float = 0.0  # monotonic, when the command went out
    accepted: dict[str, UpdateRow] = field(default_factory=dict)
    traffic: dict[str, Traffic] = field(default_factory=dict)

    def stats(self, seconds: float) -> dict[str, Any]:
        """What the round's row keeps of its clients; `seconds` from the command to the model."""
        clients = {}
        for client in sorted(self.traffic.keys() | self.accepted.keys()):
            moved, update = self.traffic.get(client, Traffic()), self.accepted.get(client)
            clients[client] = {
                "num_samples": update.num_samples if update else 0,
                "train_seconds": update.train_seconds if update else 0.0,
                "encoding": update.packets[0].encoding if update else "",
                "upload_bytes": moved.upload_bytes,
                "download_bytes": moved.download_bytes,
                "upload_seconds": moved.upload_seconds,
                "download_seconds": moved.download_seconds,
            }
        return {"seconds": seconds, "clients": clients}


def progress_text(state: rd.State) -> str:
    """What the round waits for, in one sentence; empty if it waits for nobody."""
    round_ = state.round
    if round_ is None or round_.phase not in (rd.Phase.WAITING, rd.Phase.TRAINING):
        return ""
    rules = round_.rules
    if round_.phase is rd.Phase.WAITING:
        have = len(rd.ready(state, rules))
        return f"round {round_.number} waits: ready={have}/{rules.min_clients} (barrier {rules.barrier})"
    have, expected = len(round_.delivered), len(round_.selected)
    return f"round {round_.number}: ready={have}/{expected} (min={rules.min_to_aggregate})"
