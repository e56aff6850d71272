"""The names of rounds: JOB.ROUND, or the server's own numbers.

For example, 3.12 is round 12 of job 3.
"""

import re

from fedring.control.calls import Control
from fedring.control.failure import Failure
from fedring.daemon.exits import Exit
from fedring.v1 import control_pb2 as pb

_NAME = re.compile(r"(?:(?P<job>\d{1,18})\.)?(?P<number>\d{1,18})")


def round_name(job_id: int, job_round: int) -> str:
    """Return the name of a round; "-" if it is unknown.

    Tables show it, and `flctl rounds` takes it.
    """
    return f"{job_id}.{job_round}" if job_id and job_round else "-"


def round_title(control: Control, number: int) -> str:
    """Return a round's title for a sentence, by the server's number."""
    for round_ in control.rounds(number=number):
        return f"round {round_.job_round} of job {round_.job_id}"
    return f"round number {number}"


def find_round(control: Control, name: str, job_id: int) -> pb.Round:
    """Return the round that the user has named.

    Args:
        control: The server.
        name: JOB.ROUND; or a number, which counts the rounds of `job_id`, or those of the server if that is 0.
        job_id: The job that the user has named, or 0.

    Raises:
        Failure: The name has another form, or there is no such round.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise Failure(f"{name!r} names no round: give JOB.ROUND, such as 3.12, or a number", Exit.USAGE)
    number, job = int(match["number"]), int(match["job"] or job_id)
    if job_id and job != job_id:
        raise Failure(f"round {name} is not one of job {job_id}: leave --job out", Exit.USAGE)
    found = _of_job(control, job, number) if job else control.rounds(number=number) if number else []
    for round_ in found:
        return round_
    what = f"job {job} has no round {number}" if job else f"there is no round with the number {number}"
    raise Failure(f"{what} at {control.address}: see `flctl rounds`", Exit.USAGE)


def _of_job(control: Control, job_id: int, job_round: int) -> list[pb.Round]:
    newest = next(iter(control.rounds(job_id=job_id, limit=1)), None)
    if newest is None or not 0 < job_round <= newest.job_round:
        return []
    # A job counts its rounds without gaps, so this many lead back to the one that is wanted; or more, since those that
    # its sites had not approved have the number of the next one.
    below, limit = 0, newest.job_round - job_round + 1
    while limit > 0 and (rounds := control.rounds(job_id=job_id, limit=limit, below=below)):
        if found := [round_ for round_ in rounds if round_.job_round == job_round]:
            return found
        below, limit = rounds[-1].round, rounds[-1].job_round - job_round
    return []
