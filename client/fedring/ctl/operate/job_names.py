"""The names of jobs.

Users call one by its id, or by its own name.
"""

from fedring.control.calls import ENDED, MAX_ROWS, Control
from fedring.control.failure import Failure
from fedring.daemon.exits import Exit

HELP = "its id, or its name if only one job of that name runs or waits"
_MOST_NAMED = 10


def find_job(control: Control, name: str, *, ended: bool = False) -> int:
    """Return the id of a named job; 0 for no name.

    Args:
        control: A connection to its server.
        name: An id, or the name of a job that runs or waits.
        ended: Whether, if there is none, it may be the newest job of that name that has ended.

    Raises:
        Failure: No job, or more than one, has that name.
    """
    if not name or (name.isascii() and name.isdecimal() and len(name) < 20):
        return int(name or 0)
    known = [job for job in control.jobs(limit=MAX_ROWS) if job.name == name]
    found = [job.job_id for job in known if job.state not in ENDED]
    if not found and ended:
        found = [job.job_id for job in known[:1]]
    if not found:
        raise Failure(f"no job {name!r} runs or waits at {control.address}: see `flctl jobs`", Exit.USAGE)
    if len(found) > 1:
        ids = ", ".join(map(str, sorted(found)[:_MOST_NAMED]))
        raise Failure(f"several jobs are called {name!r}, so give an id: {ids}", Exit.USAGE)
    return found[0]
