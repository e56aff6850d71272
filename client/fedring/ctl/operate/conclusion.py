"""The end of a job, in the last line of `flctl run`."""

import json
from collections.abc import Sequence

from fedring.control import figures
from fedring.control.calls import Control
from fedring.ctl.output import quality
from fedring.daemon.wording import counted, listed
from fedring.train.metrics import best_of, result_of
from fedring.v1 import control_pb2 as pb

MOST_ROUNDS = 1000  # that are read for the sentence
_MOST_NAMED = 5  # clients in the sentence


def conclude(control: Control, job: pb.Job) -> str:
    """Return the sentence about a job that has completed."""
    return conclusion(job, control.rounds(job_id=job.job_id, limit=MOST_ROUNDS))


def conclusion(job: pb.Job, rounds: Sequence[pb.Round]) -> str:
    """Return the sentence about a job that has completed.

    It has the figure that the job's best_by compares, of the last round and of the best one, and the clients that were
    asked and never trained.

    Args:
        job: The job.
        rounds: Its rounds, newest first; of a long job, the newest ones.
    """
    published = [round_ for round_ in reversed(rounds) if round_.model_version]
    rule = str(json.loads(job.spec or "{}").get("best_by") or "")
    parts = [f"job {job.job_id} completed: {counted(job.rounds_done, 'round')}", _figure(published, rule)]
    sentence = ", ".join(filter(None, parts))
    # Of a job with more rounds, nobody can say "never".
    return sentence if len(rounds) < job.rounds_done else "; ".join(filter(None, [sentence, _never(rounds)]))


def _figure(rounds: Sequence[pb.Round], rule: str) -> str:
    """Return the figure of the last round, and of the best one."""
    if not rounds:
        return ""
    last, best = rounds[-1], best_of([round_.metrics for round_ in rounds], rule)
    told = _told(last, rule)
    if best is None or rounds[best] is last:
        return told
    found = rounds[best]
    return ", ".join(filter(None, [told, f"best {_told(found, rule)} in round {found.job_id}.{found.job_round}"]))


def _told(round_: pb.Round, rule: str) -> str:
    if rule:
        return result_of(round_.metrics, rule)
    return quality(figures.accuracy(round_), figures.loss(round_))


def _never(rounds: Sequence[pb.Round]) -> str:
    """Return which clients were asked, and delivered in no round."""
    trained = {client.client_id for round_ in rounds for client in round_.clients if client.num_samples}
    never = sorted({name for round_ in rounds for name in round_.missing} - trained)
    if not never:
        return ""
    logs = "its log" if len(never) == 1 else "their logs"
    return f"{listed(never, _MOST_NAMED)} never trained: see `flctl rounds`, and {logs}"
