"""The report on spent privacy, as flctl privacy shows it."""

from collections import defaultdict
from collections.abc import Sequence

from fedring.privacy.account import epsilon
from fedring.server.state.rows import ChargeRow, JobRow
from fedring.v1 import control_pb2 as pb

_DELTA = 1e-5


def privacy_message(charges: Sequence[ChargeRow], jobs: Sequence[JobRow], delta: float) -> pb.Privacy:
    """Return the message on the spent privacy.

    Args:
        charges: of all rounds with differential privacy that have cost anything.
        jobs: all that are kept, the newest first.
        delta: for which epsilon is computed; 0 = that of the newest job with [dp].

    Raises:
        NoAccountant: if epsilon cannot be computed.
    """
    of_jobs = defaultdict[int, list[ChargeRow]](list)
    for charge in charges:
        of_jobs[charge.job_id].append(charge)
    tables = {job.job_id: job.spec.get("dp") or {} for job in jobs}
    # All epsilons are for one delta, or they could not be compared.
    delta = delta or next((table["delta"] for table in tables.values() if table), _DELTA)
    names = {job.job_id: job.name for job in jobs}
    return pb.Privacy(
        delta=delta,
        epsilon=epsilon([charge.cost for charge in charges], delta),
        rounds=len(charges),
        rounds_without=sum(job.rounds_done for job in jobs if not (tables[job.job_id] or job.spec.get("sample_dp"))),
        jobs=[
            pb.PrivacyOfJob(
                job_id=job_id,
                name=names.get(job_id, ""),
                rounds=len(mine),
                noise_multiplier=mine[-1].noise_multiplier,
                epsilon=epsilon([charge.cost for charge in mine], delta),
            )
            for job_id, mine in sorted(of_jobs.items(), reverse=True)
        ],
    )
