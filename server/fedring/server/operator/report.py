"""Jobs, models and events as messages for operators."""

import json
from collections.abc import Sequence

from fedring.server.round.report import round_message
from fedring.server.state.journal import rfc3339
from fedring.server.state.lead import Lead
from fedring.server.state.rows import EvaluationRow, EventRow, JobRow, ModelRow, RoundRow
from fedring.train.jobs.start import NEWEST, spelled
from fedring.v1 import control_pb2 as pb


def job_message(row: JobRow, place: int = 0) -> pb.Job:
    """Return a job as a message.

    `place` is that in the queue; 0 = it is not there.
    """
    return pb.Job(
        job_id=row.job_id,
        name=row.name,
        state=row.state,
        rounds=row.rounds,
        rounds_done=row.rounds_done,
        reason=row.reason,
        created_at=rfc3339(row.created_at),
        spec=json.dumps(row.spec),
        start=spelled(row.spec.get("start", NEWEST)),
        start_version=row.start_version,
        place=place,
        priority=row.priority,
    )


def lead_message(lead: Lead | None) -> pb.Leadership | None:
    """Return which server leads, as a message."""
    if lead is None:
        return None
    return pb.Leadership(
        leader=lead.leader,
        control=lead.control,
        term=lead.term,
        since=rfc3339(lead.since),
        here=lead.here,
        standbys=lead.standbys,
    )


def queue_messages(queue: Sequence[JobRow]) -> list[pb.Job]:
    """Return the queued jobs, in their order, as messages."""
    return [job_message(row, place) for place, row in enumerate(queue, 1)]


def model_message(row: ModelRow, evaluation: EvaluationRow | None, round_: RoundRow | None, *, best: bool) -> pb.Model:
    """Return a model version as a message.

    Args:
        row: The version.
        evaluation: The sum of its evaluations, if there are any.
        round_: The round that published it; None if it is not kept, or for a first model.
        best: Whether it is the best version of its job.
    """
    return pb.Model(
        version=row.version,
        round=row.round,
        digest=row.digest,
        schema_hash=bytes.fromhex(row.schema_hash),
        parameters=row.parameters,
        bytes=row.bytes,
        created_at=rfc3339(row.created_at),
        accuracy=evaluation.accuracy if evaluation else None,
        loss=evaluation.loss if evaluation else None,
        job_id=row.job_id,
        best_of_job=best,
        job_round=round_.job_round if round_ else 0,
    )


def event_message(row: EventRow, round_: RoundRow | None) -> pb.Event:
    """Return a stored event as a message, with its round if ended."""
    return pb.Event(
        id=row.id,
        at=rfc3339(row.at),
        kind=row.kind,
        job_id=row.job_id,
        round=row.round,
        client_id=row.client_id,
        text=row.text,
        state=round_message(round_) if round_ is not None and round_.ended_at else None,
    )
