"""Facts as JSON for the page: short, finite, named as in control.proto.

docs/web.md describes them.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from math import inf, isfinite
from types import MappingProxyType
from typing import Any

from google.protobuf.message import Message

from fedring.server.group import machine as gr
from fedring.server.group.rendezvous import Rendezvous
from fedring.server.round import machine as rd
from fedring.server.round.events import Phase, Round
from fedring.server.round.open_round import OpenRound
from fedring.server.round.report import PROGRESS, open_message
from fedring.server.sessions.sessions import Session, Sessions
from fedring.server.state.journal import rfc3339
from fedring.server.state.lead import Lead
from fedring.server.state.rows import EvaluationRow, JobRow, ModelRow, RoundRow
from fedring.train.jobs.job import Job
from fedring.train.jobs.labels import match, shown
from fedring.v1 import control_pb2 as pb
from fedring.v1 import federation_pb2 as fed

Summary = dict[str, Any]

MOST_CLIENTS = 200
MOST_NAMES = 10
MOST_CURVES = 20
"""Clients of a round whose parts are told one by one."""
_GROUP_MODES = ("data_parallel", "pipeline")
_JOB_KEYS = ("mode", "model", "data", "encoding", "download_encoding", "start", "best_by")
_ROUND_KEYS = (
    *("round", "job_id", "job_round", "phase", "reason", "selected", "delivered", "base_version", "model_version"),
    *("seconds", "evaluate_seconds", "train_seconds_max", "upload_bytes", "download_bytes", "started_at"),
)
_PART_KEYS = ("client_id", "num_samples", "train_seconds", "upload_bytes", "download_bytes")
_DEFAULTS = Job.model_validate({}).model_dump(mode="json")
_WHOLE = ("model_args", "optimizer_args", "clients", "aggregation", "personal")
"""The keys of a job whose tables are shown as one value."""
_EVENT_KEYS = ("id", "at", "kind", "job_id", "round", "client_id", "text")


def lead_summary(lead: Lead | None) -> Summary | None:
    """Return which server leads; None if nobody shares the state."""
    if lead is None:
        return None
    return {
        "leader": lead.leader,
        "term": lead.term,
        "since": rfc3339(lead.since),
        "here": lead.here,
        "standbys": list(lead.standbys),
    }


def job_summary(row: JobRow) -> Summary:
    """Summarize a job, with the settings that explain the figures."""
    return {
        "job_id": row.job_id,
        "name": row.name,
        "state": row.state,
        "reason": row.reason,
        "rounds": row.rounds,
        "rounds_done": row.rounds_done,
        "created_at": rfc3339(row.created_at),
        **{key: row.spec.get(key, "") for key in _JOB_KEYS},
        "start_version": row.start_version,
        "max_epsilon": (row.spec.get("dp") or {}).get("max_epsilon", 0.0),
    }


def job_settings(spec: Mapping[str, Any]) -> Summary:
    """Return a job's settings by dotted names, and the changed names.

    The changed ones differ from the defaults.
    """
    settings, defaults = _flat(spec), _flat(_DEFAULTS)
    changed = [key for key, value in settings.items() if key not in defaults or value != defaults[key]]
    return {"settings": settings, "changed": changed}


def round_summary(message: pb.Round, *, clients: bool = False) -> Summary:
    """Summarize a round.

    Of its clients, only sums, unless `clients` asks for the part of each of the first ones.
    """
    by_encoding: dict[str, int] = {}
    for client in message.clients:
        if client.upload_bytes:
            name = client.encoding or "none"
            by_encoding[name] = by_encoding.get(name, 0) + client.upload_bytes
    metrics, known = message.metrics, {field.name: value for field, value in message.ListFields()}
    # Lists are cut: a page for thousands of clients must stay small. NaN is no JSON, so it becomes None.
    return {
        **{key: getattr(message, key) for key in _ROUND_KEYS},
        "missing": list(message.missing[:MOST_NAMES]),
        "stalled": list(message.stalled[:MOST_NAMES]),
        "stragglers": list(message.stragglers[:MOST_NAMES]),
        "clipped": list(message.clipped[:MOST_NAMES]),
        "capped": list(message.capped[:MOST_NAMES]),
        "liars": list(message.liars[:MOST_NAMES]),
        "left_out": list(message.left_out[:MOST_NAMES]),
        "warnings": list(message.warnings[:MOST_NAMES]),
        "accuracy": message.eval_correct / message.eval_classified if message.eval_classified else None,
        "loss": _finite(message.eval_loss_sum / message.eval_total) if message.eval_total else None,
        "server_accuracy": _finite(message.server_accuracy) if message.HasField("server_accuracy") else None,
        "server_loss": _finite(message.server_loss) if message.HasField("server_loss") else None,
        "metrics": {name: float(f"{metrics[name]:.6g}") for name in sorted(metrics)},
        "upload_by_encoding": by_encoding,
        "peer_bytes": _sum(client.metrics.get("bytes_sent", 0.0) for client in message.clients),
        **{name: _progress_summary(known[name]) if name in known else None for name in PROGRESS},
        **({"clients": [_part_summary(client) for client in message.clients[:MOST_CURVES]]} if clients else {}),
    }


def _progress_summary(message: Message) -> Summary:
    """Summarize the progress of a kind of rounds, figure by figure."""
    found = {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
    return {name: _short(value) if isinstance(value, Mapping) else value for name, value in found.items()}


def _short(figures: Mapping[str, float]) -> Summary:
    return {name: float(f"{value:.3g}") if isinstance(value, float) else value for name, value in figures.items()}


def privacy_summary(message: pb.Privacy | None) -> Summary | None:
    """Summarize the clients' spent privacy; None if none is known.

    An epsilon that is not finite becomes None.
    """
    if message is None:
        return None
    jobs = {str(job.job_id): {"rounds": job.rounds, "epsilon": _finite(job.epsilon)} for job in message.jobs}
    return {"delta": message.delta, "epsilon": _finite(message.epsilon), "rounds": message.rounds, "jobs": jobs}


def model_summary(row: ModelRow, evaluation: EvaluationRow | None, round_: RoundRow | None, *, best: bool) -> Summary:
    """Summarize a model version, with the sum of any evaluations.

    Args:
        row: The version.
        evaluation: The sum of its evaluations.
        round_: The round that published it; None if it is not kept, or for a first model.
        best: Whether it is the best version of its job.
    """
    return {
        "version": row.version,
        "round": row.round,
        "digest": row.digest,
        "parameters": row.parameters,
        "bytes": row.bytes,
        "created_at": rfc3339(row.created_at),
        "accuracy": evaluation.accuracy if evaluation else None,
        "loss": evaluation.loss if evaluation else None,
        "job_id": row.job_id,
        "best_of_job": best,
        "job_round": round_.job_round if round_ else 0,
    }


def event_summary(event: pb.Event) -> Summary:
    """Summarize an event, without the state of its round."""
    return {key: getattr(event, key) for key in _EVENT_KEYS}


def client_names(
    sessions: Iterable[Session], updates: Iterable[str], round_: Round | None, search: str = ""
) -> list[str]:
    """Return the clients in session, and then those that are away.

    Args:
        sessions: of the clients, by name.
        updates: the clients of whom updates were accepted.
        round_: the round whose clients are told, too.
        search: a part of the name, software or address of a client, in lower case; others are left out.
    """
    here = {session.client_id: session for session in sessions}
    asked = round_.selected | round_.evaluators if round_ else frozenset()
    away = sorted({*updates, *asked} - here.keys())
    if not search:
        return [*here, *away]
    found = (name for name, each in here.items() if search in f"{name} {each.software} {each.address}".lower())
    return [*found, *(name for name in away if search in name.lower())]


def client_summaries(
    sessions: Iterable[Session],
    updates: Mapping[str, int],
    round_: Round | None,
    held: Mapping[str, Sequence[int]] = MappingProxyType({}),
    *,
    shown_job: int = 0,
    names: Sequence[str] | None = None,
    absent_as: str = "away",
) -> list[Summary]:
    """Summarize clients, at most MOST_CLIENTS of them.

    Args:
        sessions: of the clients.
        updates: how many of each client were accepted.
        round_: the round whose clients' parts are told.
        held: the jobs in whose open rounds each client takes part.
        shown_job: the job of that round.
        names: which clients; by default all of `client_names`.
        absent_as: the state of a client without a session.
    """
    here = {session.client_id: session for session in sessions}
    names = client_names(here.values(), updates, round_) if names is None else names
    return [
        {
            "client_id": name,
            "state": absent_as if (session := here.get(name)) is None else "watching" if session.matched else "joined",
            "activity": activity_name(session.activity) if session else "",
            "progress": _finite(session.progress) if session else None,
            "software": session.software if session else "",
            "address": session.address if session else "",
            "updates": updates.get(name, 0),
            "part": _part(name, round_) if round_ else "",
            "late_round": session.work.round if session and session.late_since else 0,
            "late_job": session.work.job_id if session and session.late_since else 0,
            "late_since": rfc3339(session.late_since) if session else "",
            "jobs": list(held.get(name, ())),
            "why": _why_not_ready(name, session, round_) or _why_elsewhere(held.get(name, ()), session, shown_job),
        }
        for name in names[:MOST_CLIENTS]
    ]


def open_round_summary(open_: OpenRound) -> Summary:
    """Summarize an open round, with its wait, for a list of several."""
    message = open_message(open_, clients=False)
    return {"round": round_summary(message) if message else None, "waits_for": wait_summary(open_)}


def wait_summary(open_: OpenRound | None) -> Summary | None:
    """Summarize an open round's wait; None if there is none."""
    if open_ is None or (round_ := open_.state.round) is None or round_.phase is Phase.ABANDONED:
        return None
    now = time.monotonic()
    waits = rd.pending(open_.state, now) - open_.done.keys()
    match round_.phase:
        case Phase.WAITING:
            what, have, need = "clients", len(rd.ready(open_.state, round_.rules)), rd.needed(round_.rules)
        case Phase.TRAINING:
            what, have, need = "updates", len(round_.delivered | open_.done.keys()), len(round_.selected)
            need = round_.rules.buffer or need
        case Phase.AGGREGATING:
            return {"what": "aggregation", "have": 0, "need": 0, "clients": [], "until": ""}
        case _:
            what, have, need = "evaluations", len(round_.evaluated), len(round_.evaluators)
    ends = rd.waits_until(open_.state, round_)
    until = rfc3339(round(time.time() + ends - now)) if ends < inf else ""
    return {"what": what, "have": have, "need": need, "clients": sorted(waits)[:MOST_NAMES], "until": until}


def group_summary(rendezvous: Rendezvous | None, sessions: Sessions, job: JobRow) -> Summary | None:
    """Summarize the newest group of a job with grouped clients.

    Its members come first, by rank, then the others.
    """
    mode = job.spec.get("mode", "")
    if rendezvous is None or mode not in _GROUP_MODES:
        return None
    state = rendezvous.state
    cut = job.spec.get(mode, {})
    replicas = cut.get("replicas", 1)
    others = sorted((state.workers.keys() | state.expected) - set(state.members))
    return {
        "mode": mode,
        "round": rendezvous.round,
        "generation": state.generation,
        "phase": state.phase,
        "reason": state.reason,
        "target": state.rules.target,
        "replicas": replicas if isinstance(replicas, int) else 1,
        "stage_workers": [] if isinstance(replicas, int) else replicas,
        "stages_per_worker": cut.get("stages_per_worker", 1),
        "steps": max((worker.steps for worker in state.workers.values()), default=0),
        "members": [_worker(state, name, sessions) for name in state.members[:MOST_CLIENTS]],
        "others": [_worker(state, name, sessions) for name in others[:MOST_CLIENTS]],
    }


def activity_name(value: int) -> str:
    """Return a client's activity as a word.

    Empty if it does nothing, or something that is not known here.
    """
    if not value or value not in fed.Activity.values():
        return ""
    return fed.Activity.Name(fed.Activity.ValueType(value)).removeprefix("ACTIVITY_").lower()


def _part_summary(client: pb.RoundClient) -> Summary:
    metrics = {name: float(f"{value:.6g}") for name, value in sorted(client.metrics.items()) if isfinite(value)}
    return {**{key: getattr(client, key) for key in _PART_KEYS}, "metrics": metrics}


def _flat(spec: Mapping[str, Any]) -> Summary:
    """Return a job's keys with those of most tables as `table.key`."""
    flat: Summary = {}
    for key, value in spec.items():
        if key not in _WHOLE and isinstance(value, Mapping):
            flat |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            flat[key] = value
    return flat


def _worker(state: gr.GroupState, name: str, sessions: Sessions) -> Summary:
    worker, session = state.workers.get(name), sessions.get(name)
    if worker is None:
        what = "lost" if name in state.members or session is None else "expected"
    elif worker.digest is not None:
        what = "done"
    elif worker.joined:
        what = "joined"
    else:
        what = "ready" if worker.generation == state.generation else "expected"
    return {
        "client_id": name,
        "state": what,
        "steps": worker.steps if worker else 0,
        "progress": _finite(session.progress) if session else None,
    }


def _part(name: str, round_: Round) -> str:
    """Return the client's part in the round, as a word."""
    if name in round_.evaluated:
        return "evaluated"
    if name in round_.failed:
        return "failed"
    if name in round_.delivered:
        return "delivered"
    if name in round_.stalled:
        return "stalled"
    return "asked" if name in round_.selected or name in round_.evaluators else ""


def _why_not_ready(name: str, session: Session | None, round_: Round | None) -> str:
    """Return why a round cannot draw the client, or nothing."""
    if session is None:
        return "it has no session: its fl-client does not run, or does not reach this server"
    if not session.matched:
        return "it has joined, and has not confirmed its stream of commands yet"
    if session.late_since:
        since = rfc3339(session.late_since)
        return f"it still works on a round of job {session.work.job_id} that has ended without it, since {since}"
    rules = round_.rules if round_ else None
    if session.unapproved:
        jobs = ", ".join(map(str, sorted(session.unapproved)))
        return f"its site has not approved job {jobs} yet: see fl-client cards there"
    if rules and name in rules.left_out:
        return "an earlier round has proved that it sent wrong shares (bad_share)"
    if rules and not match(session.labels, rules.labels):
        return f"its labels are {shown(session.labels) or 'none'}, and the job wants {shown(rules.labels)}"
    return ""


def _why_elsewhere(jobs: Sequence[int], session: Session | None, shown: int) -> str:
    """Return why only other rounds can have a client, or nothing."""
    return "" if session is None or shown in jobs else why_busy(jobs, session.max_jobs)


def why_busy(jobs: Sequence[int], max_jobs: int, unapproved: Iterable[int] = ()) -> str:
    """Return why no other round can have a client now.

    Args:
        jobs: in whose open rounds it takes part.
        max_jobs: its own limit.
        unapproved: the jobs that nobody at its site has approved yet.

    Returns:
        A sentence; empty if another round can have it.
    """
    if not max_jobs:
        return "it takes part in no job: its max_jobs is 0"
    if waiting := ", ".join(map(str, sorted(unapproved))):
        return f"its site has not approved job {waiting} yet (fl-client cards)"
    if len(jobs) < max_jobs:
        return ""
    names = ", ".join(map(str, jobs))
    return f"it takes part in a round of job {names}, and in no more at once: its max_jobs is {max_jobs}"


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None


def _sum(values: Iterable[float]) -> int:
    return int(sum(value for value in values if 0 <= value < 2**53))
