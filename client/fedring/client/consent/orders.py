"""The signed jobs of a site, and the rounds it has followed.

orders.json in the state folder has, after a line with its SHA-256, for each signed job: which job of the server it was
first seen as, what must stay the same in all of its commands, and which rounds this site has been asked for. It is
written before a round is trained, so a job that is started again, and a round beyond the last, is seen as such also
after a kill. A job is forgotten when another one is followed that was signed a day after the end of its signature.
"""

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fedring.client.consent.operators import Operators
from fedring.daemon.config import ConfigError
from fedring.daemon.durable import replace_with_digest, text_after_digest
from fedring.signatures.digests import task_digest
from fedring.train.jobs.start import FRESH
from fedring.train.orders.checks import check_evaluate, check_train
from fedring.train.orders.signed_job import BadOrder, JobOrder
from fedring.untrusted import parse_json
from fedring.v1 import federation_pb2 as pb

FILE = "orders.json"

_DAY = 86_400
_MAX_BYTES = 64 << 20
_MOST_TEXT = 128  # characters


@dataclass(frozen=True, slots=True)
class Followed:
    """How far a site has followed one signed job.

    Attributes:
        job_id: Of the server.
        until: When its signature ends, in seconds since 1970.
        fixed: What stays the same in all commands of a job.
        rounds: For how many rounds the site has trained.
        last: The epoch and the number of the newest of them.
        task: The digest of its command: the same round is the same command.
        evaluations: How many models the site has evaluated.
        evaluated: The newest of them: its round and its digest.
        epoch: The latest epoch in which it was asked to evaluate one; 0 = unknown.
    """

    job_id: int
    until: int
    fixed: dict[str, str]
    rounds: int = 0
    last: tuple[int, int] = (0, 0)
    task: str = ""
    evaluations: int = 0
    evaluated: tuple[int, str] = field(default=(0, ""))
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Permit:
    """A command that follows from a signed job.

    Attributes:
        operator: Who has signed it.
        nonce: Names the signed job.
        order: The job.
        followed: How far the site has followed it, with this command.
        starts_fresh: Whether the round starts from a model that follows from the job's seed.
    """

    operator: str
    nonce: str
    order: JobOrder
    followed: Followed
    starts_fresh: bool = False


class Orders:
    """The signed jobs of a site.

    Args:
        operators: Check signatures.
        labels: The labels of this client.
        state_dir: Its state folder.

    Raises:
        ConfigError: If the file there is damaged.
    """

    def __init__(self, operators: Operators, labels: Mapping[str, str], state_dir: Path) -> None:
        self._operators, self._labels = operators, labels
        self._path = state_dir / FILE
        self._followed: dict[str, Followed] = {}
        try:
            if self._path.stat().st_size > _MAX_BYTES:
                raise ValueError("it is too long")
            told = parse_json(text_after_digest(self._path.read_bytes()))
            self._followed = {str(nonce): _read(entry) for nonce, entry in told.items()}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            text = f"{self._path} says which signed jobs this site has followed, and cannot be read ({error})"
            raise ConfigError(f"{text}: restore it; without it, a job that has run could be run again") from error

    def permit(self, command: pb.TrainCmd) -> Permit:
        """Check a round's command. Nothing is written.

        Raises:
            BadOrder: If it does not follow from a signed job, or was followed before.
        """
        order, operator = self._operators.check(command.job)
        check_train(order, command, self._labels)
        known = self._known(order, command)
        now, task = (command.epoch, command.round), task_digest(command).hex()
        if now == known.last:
            if task != known.task:
                raise BadOrder("replayed", f"round {command.round} was asked for before, with another command")
        elif now < known.last:
            raise BadOrder("replayed", f"round {command.round} comes after round {known.last[1]} of the same job")
        else:
            if command.job_round == 1 and known.evaluations and not _begins_anew(known, command):
                raise BadOrder("replayed", "the first round of the job comes after an evaluation of it")
            _check_count(order, known.rounds, "train in")
            known = replace(known, rounds=known.rounds + 1, last=now, task=task)
        fresh = order.job.start == FRESH and not order.job.bounds.start_model and command.job_round == 1
        return Permit(operator, order.nonce, order, known, fresh)

    def permit_evaluation(self, command: pb.EvaluateCmd) -> Permit:
        """Check an evaluation's command. Nothing is written.

        Raises:
            BadOrder: If it does not follow from a signed job, or comes after a later epoch, or more are asked for than
                the job has rounds.
        """
        order, operator = self._operators.check(command.job)
        check_evaluate(order, command)
        known, which = self._known(order, command), (command.round, _short(command.model_digest))
        newest = max(known.last[0], known.epoch)
        if 0 < command.epoch < newest:
            raise BadOrder("replayed", f"an evaluation of epoch {command.epoch} comes after epoch {newest}")
        known = replace(known, epoch=max(known.epoch, command.epoch))
        if which != known.evaluated:
            _check_count(order, known.evaluations, "evaluate")
            known = replace(known, evaluations=known.evaluations + 1, evaluated=which)
        return Permit(operator, order.nonce, order, known)

    def follow(self, permit: Permit) -> None:
        """Note durably that a permitted command is followed.

        Raises:
            OSError: If that is impossible. Then it must not be followed.
        """
        if self._followed.get(permit.nonce) == permit.followed:
            return
        # Whoever signs has a clock, too: one of them that is wrong must not make a job be forgotten before its end.
        oldest = min(time.time(), permit.order.at) - _DAY
        kept = {nonce: each for nonce, each in self._followed.items() if each.until > oldest}
        kept[permit.nonce] = permit.followed
        text = json.dumps({nonce: asdict(each) for nonce, each in kept.items()}, sort_keys=True)
        replace_with_digest(self._path, text.encode())
        self._followed = kept

    def _known(self, order: JobOrder, command: pb.TrainCmd | pb.EvaluateCmd) -> Followed:
        fixed = {
            "frozen_digest": _short(command.job.frozen_digest),
            "schema_hash": _short(command.schema_hash.hex()),
            "residual_after": f"{command.residual_after_epoch}.{command.residual_after}",
        }
        known = self._followed.get(order.nonce)
        if known is None:
            return Followed(command.job.job_id, order.until, fixed)
        if known.job_id != command.job.job_id:
            text = f"this signed job was started before, as job {known.job_id}, and the server starts it as job"
            raise BadOrder("replayed", f"{text} {command.job.job_id}: sign it again")
        if _begins_anew(known, command):
            known = replace(known, fixed=known.fixed | {"residual_after": fixed["residual_after"]})
        if changed := next((key for key, value in fixed.items() if known.fixed.get(key) != value), ""):
            text = f"{changed} is {fixed[changed] or 'empty'}, and was {known.fixed.get(changed) or 'empty'} before"
            raise BadOrder("changed_command", f"{text} in the same job")
        return known


def _short(text: str) -> str:
    """Return a text of the server's, or its SHA-256.

    It is the digest if the text is longer than those of an honest server.
    """
    return text if len(text) <= _MOST_TEXT else hashlib.sha256(text.encode()).hexdigest()


def _begins_anew(known: Followed, command: pb.TrainCmd | pb.EvaluateCmd) -> bool:
    """Return whether a job begins again, as at a restored server.

    A site that is not drawn for its first round, or that only evaluates, sees a later epoch than it knows: such a job
    may also continue an older line of models than before. In an evaluation by an older server, which does not say the
    epoch, only a line that has begun in a later one tells that.
    """
    before = max(known.last[0], known.epoch)
    newest = max(before, int(known.fixed["residual_after"].partition(".")[0]))
    is_first = isinstance(command, pb.TrainCmd) and command.job_round == 1
    return command.epoch > (before if is_first else newest) or command.residual_after_epoch > newest


def _check_count(order: JobOrder, count: int, what: str) -> None:
    most = order.job.rounds + order.job.bounds.repeats
    if count >= most:
        text = f"this site was asked to {what} more than {most} rounds of a job that was signed for {order.job.rounds}"
        raise BadOrder("too_many_rounds", f"{text} (bounds.repeats)")


def _read(entry: Mapping[str, Any]) -> Followed:
    """Return an entry of the file.

    Raises:
        ValueError, KeyError, TypeError: If it has another form.
    """
    epoch, number = map(int, entry["last"])
    evaluated, digest = entry["evaluated"]
    return Followed(
        job_id=int(entry["job_id"]),
        until=int(entry["until"]),
        fixed={str(key): str(value) for key, value in entry["fixed"].items()},
        rounds=int(entry["rounds"]),
        last=(epoch, number),
        task=str(entry["task"]),
        evaluations=int(entry["evaluations"]),
        evaluated=(int(evaluated), str(digest)),
        epoch=int(entry.get("epoch", 0)),
    )
