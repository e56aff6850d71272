"""Rounds as messages for operators, and their events."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fedring.daemon.notify import sd_notify
from fedring.daemon.wording import counted
from fedring.server.round.open_round import OpenRound
from fedring.server.state.journal import Journal, rfc3339
from fedring.server.state.rows import RoundRow, UpdateRow
from fedring.v1 import control_pb2 as pb

PROGRESS = tuple(
    field.name for field in pb.Round.DESCRIPTOR.fields if field.message_type is not None and field.has_presence
)
"""The fields for the progress of a kind of rounds. Its figures have the name of its field, and the fields of that."""


def round_message(row: RoundRow, *, delivered: int | None = None) -> pb.Round:
    """Return a round as a message.

    `delivered` counts its updates if the row does not know them yet.
    """
    stats: dict[str, Any] = row.stats
    clients = [pb.RoundClient(client_id=name, **facts) for name, facts in stats.get("clients", {}).items()]
    took_part = [client for client in clients if client.num_samples]
    delivered_ids = {client.client_id for client in took_part}
    return pb.Round(
        round=row.round,
        job_id=row.job_id,
        job_round=row.job_round,
        phase=row.phase,
        reason=row.reason,
        selected=len(row.selected),
        delivered=len(took_part) if delivered is None else delivered,
        model_version=row.model_version,
        seconds=stats.get("seconds", 0.0),
        evaluate_seconds=stats.get("evaluate_seconds", 0.0),
        train_seconds_max=max((client.train_seconds for client in clients), default=0.0),
        upload_bytes=sum(client.upload_bytes for client in clients),
        download_bytes=sum(client.download_bytes for client in clients),
        eval_correct=stats.get("correct", 0),
        eval_total=stats.get("total", 0),
        eval_loss_sum=stats.get("loss_sum", 0.0),
        server_accuracy=stats.get("server_accuracy"),
        server_loss=stats.get("server_loss"),
        started_at=rfc3339(row.started_at),
        base_version=row.base_version,
        stalled=stats.get("stalled", ()),
        stragglers=stats.get("stragglers", ()),
        update_clip=stats.get("update_clip", 0.0),
        clipped=stats.get("clipped", ()),
        capped=stats.get("capped", ()),
        eval_classified=stats.get("classified", stats.get("total", 0)),
        metrics=stats.get("metrics"),
        settings=stats.get("settings"),
        warnings=stats.get("warnings"),
        missing=[name for name in row.selected if name not in delivered_ids] if row.ended_at else [],
        clients=clients,
        liars=stats.get("liars", ()),
        left_out=stats.get("left_out", ()),
        **{name: stats[name] for name in PROGRESS if name in stats},
    )


def open_message(open_: OpenRound | None, *, clients: bool = True) -> pb.Round | None:
    """Return an open round as a message; None gives None.

    `clients` says whether it lists what each client did.
    """
    if open_ is None or (state := open_.state.round) is None:
        return None
    row = replace(open_.row, phase=state.phase)
    if not clients:
        row = replace(row, stats=open_.kind.figures())
    elif not row.stats:
        row = replace(row, stats=open_.stats(0.0))
    return round_message(row, delivered=len(state.delivered | open_.done.keys()))


class RoundJournal:
    """Writes the events of rounds, with the state of each."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def tell(self, open_: OpenRound, kind: str, text: str) -> None:
        """Write an event of a round, which is also systemd's status."""
        sd_notify(f"STATUS={text}")
        self._journal.write(kind, text, job_id=open_.row.job_id, state=open_message(open_))

    def note(self, open_: OpenRound, kind: str, text: str, client: str, *, clients: bool = False) -> None:
        """Write an event of a client in a round.

        `clients` says whether the round is described with each client's part.
        """
        state = open_message(open_, clients=clients)
        self._journal.write(kind, text, job_id=open_.row.job_id, client_id=client, state=state)

    def accepted(self, open_: OpenRound, rows: Sequence[UpdateRow]) -> None:
        """Write that updates of a round became durable together."""
        state = open_message(open_, clients=False)  # the same for all of them
        for row in rows:
            text = f"{row.client_id} delivered {counted(row.num_samples, 'sample')}, {row.total_bytes} bytes"
            self._journal.write("update_accepted", text, job_id=open_.row.job_id, client_id=row.client_id, state=state)
