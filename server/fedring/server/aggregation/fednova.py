"""Normalised averaging, FedNova (Wang et al. 2020).

Clients that took more local steps do not pull the model to them. With the clients' deltas d_i, their weights p_i, which
add up to 1, and a_i, which grows with the number of local steps, the next model is the base plus (sum_j p_j a_j) sum_i
p_i d_i / a_i (section 5). This is the weighted mean of the deltas after each was multiplied by a factor, sum_j p_j a_j
/ a_i. If all clients take the same number of steps, all factors are 1. A client with a learning rate of its own moves
in proportion to it, so its a_i is multiplied by the ratio of that rate to the job's.

A client's word on its steps is not proof. So a_i counts as at least the median over the round's clients divided by
SPREAD, and as at most SPREAD times that median. No factor exceeds SPREAD^2, whatever clients say.
"""

from collections.abc import Mapping, Sequence
from statistics import median_low
from types import MappingProxyType

from fedring.server.state.rows import UpdateRow
from fedring.train.jobs.job import Job
from fedring.train.plan import batches_in

SPREAD = 10.0
"""How far from the median, as a ratio, the a_i of a client counts."""

STEPS = "steps"
"""The metric by which a client says how many steps it took, if the server cannot know it."""

_SGD = "fedring.train.optimizers:sgd"


def factors_of(
    job: Job,
    job_round: int,
    updates: Sequence[UpdateRow],
    weights: Mapping[str, float],
    *,
    told: Mapping[str, Job] = MappingProxyType({}),
) -> dict[str, float]:
    """Return the factors of a round's updates before they are averaged.

    Args:
        job: says whether updates are normalised at all.
        job_round: the number of the round within the job.
        updates: the accepted updates.
        weights: of the same clients in the mean, above 0, by client id.
        told: the jobs of clients that train by other settings, by client id.

    Returns:
        The factors by client id; none if the job does not normalise.
    """
    if not job.normalize_steps:
        return {}
    rate, norms = job.settings_of(job_round).lr, dict[str, float]()
    dampening, nesterov = job.optimizer_args.get("dampening", 0.0), job.optimizer_args.get("nesterov", False)
    for row in updates:
        own = told.get(row.client_id, job)
        settings = own.settings_of(job_round)
        steps = steps_of(row, epochs=settings.epochs, batch_size=own.batch_size)
        norm = accumulation(steps, own.momentum, dampening, nesterov) if own.optimizer == _SGD else steps
        norms[row.client_id] = norm * (settings.lr / rate)
    return factors(weights, norms)


def steps_of(row: UpdateRow, *, epochs: int, batch_size: int) -> float:
    """Return how many local steps an update took.

    Returns:
        The metric STEPS, if the client reports it and it is at least 1; otherwise the steps of the built-in loop, which
        follow from the number of samples.
    """
    told = row.metrics.get(STEPS, 0.0)
    return told if told >= 1 else float(epochs * batches_in(row.num_samples, batch_size))


def factors(weights: Mapping[str, float], told: Mapping[str, float]) -> dict[str, float]:
    """Return the factor of each delta: sum_j p_j a_j / a_i.

    Args:
        weights: of the clients, above 0, by client id; p_i is the share of the client's weight.
        told: a_i of the same clients, above 0, before they are bounded.
    """
    if not told:
        return {}
    middle = median_low(told.values())
    norms = {client: min(max(norm, middle / SPREAD), middle * SPREAD) for client, norm in sorted(told.items())}
    if len(set(norms.values())) == 1:
        return dict.fromkeys(norms, 1.0)
    total = sum(weights[client] for client in norms)
    effective = sum(weights[client] * norm for client, norm in norms.items()) / total
    return {client: effective / norm for client, norm in norms.items()}


def accumulation(steps: float, momentum: float, dampening: float = 0.0, nesterov: bool = False) -> float:
    """Return the total weight of the local gradients in a delta.

    It is tau without momentum rho. With momentum it is A = (tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho) (Wang et
    al. 2020, section 4.1). The same sum over the steps of torch's SGD is (1 - d) A + d (1 - rho^tau) / (1 - rho) with
    the dampening d, which torch does not apply to the first gradient, and tau + rho A with Nesterov's momentum.
    """
    if not momentum:
        return steps
    rest = 1 - momentum
    first = (1 - float(momentum**steps)) / rest  # what the first gradient counts
    plain = (steps - momentum * first) / rest
    return steps + momentum * plain if nesterov else (1 - dampening) * plain + dampening * first
