"""The monitored barrier: a barrier that names the ranks that are missing."""

from fedring.ring.engine import collectives
from fedring.ring.engine.group import Group
from fedring.ring.engine.operation import Operation
from fedring.ring.errors import CollectiveTimeout, RingError

_LATER = 5.0  # seconds by which rank 0 is overdue later than it waits, as it raises itself


def monitored_barrier(group: Group, seconds: float, *, name_all: bool) -> None:
    """Wait until all ranks have reached the barrier.

    Errors have the words of torch's monitored_barrier.

    Args:
        group: The group.
        seconds: How long rank 0 waits for the others.
        name_all: Whether rank 0 names all ranks that are missing, and not only the first.

    Raises:
        CollectiveTimeout: A rank has not come in time. As every RingError it ends the generation, on every rank.
        RingError: The generation has ended for another reason.
    """
    leads = group.rank == 0
    program = collectives.monitored_barrier(group.rank, group.size)
    operation = group.start("monitored_barrier", program, timeout=seconds + _LATER * leads)
    try:
        passed = operation.wait(seconds if leads else None)
    except RingError as error:
        group.fail(error)  # if nothing has failed before
        raise _as_seen_by(group.rank, error) from error
    if not passed:
        missing = _missing(operation, group.size, seconds, name_all=name_all)
        group.fail(missing)
        raise missing


def _missing(operation: Operation, size: int, seconds: float, *, name_all: bool) -> CollectiveTimeout:
    """Return rank 0's error if ranks are missing."""
    first = operation.waiting_for
    after = f"monitoredBarrier after {1000 * seconds:.0f} ms"
    if first is None or seconds <= 0:
        return CollectiveTimeout(f"Rank 0 timed out in {after}", rank=0)
    missing = operation.without_frames(range(first, size)) if name_all else [first]
    names = f"Ranks {', '.join(map(str, missing))}" if name_all else f"Rank {first}"
    return CollectiveTimeout(f"{names} failed to pass {after}", rank=first)


def _as_seen_by(rank: int, error: RingError) -> RingError:
    """Return the error in the words of torch's barrier on this rank."""
    if rank:
        reached = f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for"
        return type(error)(f"{reached} send/recv from rank 0: {error}", rank=error.rank)
    if error.rank:
        return type(error)(f"Rank {error.rank} failed to pass monitoredBarrier: {error}", rank=error.rank)
    return error
