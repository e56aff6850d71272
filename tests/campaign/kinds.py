"""The kinds of cases: a job, its fleet, the harms that suit it, and what must hold afterwards.

A kind registers itself in KINDS: a function that draws a case of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.campaign import checks
from tests.campaign.checks import Check
from tests.campaign.harms import HARMS
from tests.campaign.lessons import SIZE
from tests.fault.residuals import KEEP

_RARE = (
    "save_state", "revert_state", "kill_client_unnoticed", "kill_all_clients", "kill_server_after_a_while",
    "return_late", "lose_update", "revert_client", "damage_update", "fail_client_syncs", "lose_client_syncs",
    "fail_client_disk", "damage_client", "revert_client_late",
)  # fmt: skip
ANY = tuple(name for name in HARMS if name not in _RARE)
CLIENT_DISKS = ("fail_client_syncs", "fail_client_disk")
"""After them, a client may miss a round."""
HARD = (*ANY, *CLIENT_DISKS)
WITHOUT_DAMAGE = tuple(name for name in ANY if name not in ("damage_line", "fail_disk", "fill_disk"))


@dataclass(frozen=True)
class Case:
    """What a case runs, and how it is judged.

    Attributes:
        job: the keys of the job, which runs until it is stopped.
        checks: what must hold, beside what holds everywhere.
        clients: how many there are.
        settings: of the server.
        beside: how many more such jobs run at the same time.
        client: settings of each client.
        harms: the names of those that suit the job.
        last_round: whether the clients train one more round when all harms are over, so that they learn what became
            of their last updates.
        to_the_end: whether the job is not stopped, but runs to its end, and then once more without harms.
        most_harms: how many are done at most.
    """

    job: dict[str, Any]
    checks: Sequence[Check]
    clients: int = 3
    settings: dict[str, Any] = field(default_factory=dict)
    harms: Sequence[str] = ANY
    beside: int = 0
    client: dict[str, Any] = field(default_factory=dict)
    last_round: bool = True
    to_the_end: bool = False
    most_harms: int = 9


Kind = Callable[[Random], Case]

KINDS: dict[str, Kind] = {}
"""Every kind by its name, in the order of this file."""

_LOST_AFTER = {"lost_after_seconds": 4.0}
"""A client that is away for longer misses the round."""

_COMMON: dict[str, Any] = {
    "rounds": 100_000, "max_abandoned": 1000, "deadline_seconds": 120, "evaluate": False, "min_clients": 3,
    "start": "fresh",
}  # fmt: skip


def kind(draw: Kind) -> Kind:
    """Register a kind under the name of its function."""
    KINDS[draw.__name__] = draw
    return draw


def _lessons(**keys: Any) -> dict[str, Any]:
    model = {"model": "fedring.train.models:vector", "model_args": {"size": SIZE}}
    return {**_COMMON, **model, "trainer": "tests.campaign.lessons:lesson", "min_clients_to_aggregate": 1, **keys}


def _training(**keys: Any) -> dict[str, Any]:
    fixed = {"min_clients_to_aggregate": 3, "subset_size": 64, "batch_size": 16, "partition": "shards", "seed": 5}
    return {**_COMMON, "max_abandoned": 5, **fixed, **keys}


@kind
def dense(rng: Random) -> Case:
    """Draw whole updates with weights, of which some clients may miss rounds."""
    job = _lessons(encoding="fp32", weights=rng.choice(["samples", "samples", "uniform"]))
    return Case(job, [checks.deltas_are_lessons, checks.models_are_means], settings=_LOST_AFTER, harms=HARD)


@kind
def taken_over(rng: Random) -> Case:
    """Draw whole updates of clients that return before the server knows that they were gone."""
    harms = ("kill_client_unnoticed", "kill_client_unnoticed", "kill_client", "cut_line", "freeze_client")
    found = [checks.no_client_is_refused, checks.deltas_are_lessons, checks.models_are_means]
    return Case(_lessons(encoding="fp32"), found, harms=harms)


@kind
def sparse(rng: Random) -> Case:
    """Draw sparse updates with error feedback."""
    job = _lessons(encoding="fp32_sparse", keep_ratio=rng.choice([0.02, 0.2]))
    return Case(job, [checks.models_are_means, checks.mass_is_conserved], settings=_LOST_AFTER, harms=HARD)


@kind
def reverts(rng: Random) -> Case:
    """Draw sparse updates to a server whose state is put back to older ones."""
    job = _lessons(
        encoding="fp32_sparse", keep_ratio=KEEP, trainer="tests.fault.user_trainers:known", min_clients=2,
        min_clients_to_aggregate=2,
    )  # fmt: skip
    harms = ("kill_server", "kill_client", "kill_client_and_server", "save_state", "revert_state", "revert_state")
    return Case(job, [checks.residuals_explain_histories], clients=2, harms=harms)


@kind
def reverted_clients(rng: Random) -> Case:
    """Draw sparse updates of clients whose folders are put back to older ones."""
    job = _lessons(encoding="fp32_sparse", keep_ratio=0.05)
    harms = ("revert_client", "revert_client", "revert_client", "kill_server", "kill_client")
    return Case(job, [checks.models_are_means, checks.mass_is_conserved], settings=_LOST_AFTER, harms=harms)


@kind
def damaged(rng: Random) -> Case:
    """Draw whole updates to a server whose disk flips bits of them."""
    harms = ("damage_update", "damage_update", "damage_update", "kill_server", "kill_client")
    job = _lessons(encoding="fp32", min_clients_to_aggregate=1)
    return Case(job, [checks.deltas_are_lessons, checks.models_are_means], harms=harms)


@kind
def packed(rng: Random) -> Case:
    """Draw packed updates with error feedback."""
    job = _lessons(encoding=rng.choice(["packed", "sq8"]), keep_ratio=0.1)
    return Case(job, [checks.models_are_means, checks.mass_is_conserved], settings=_LOST_AFTER, harms=HARD)


@kind
def quantised(rng: Random) -> Case:
    """Draw dense updates of few bits, which need no residual."""
    job = _lessons(encoding=rng.choice(["uniform", "int8", "bf16", "fp16"]))
    return Case(job, [checks.models_are_means], settings=_LOST_AFTER, harms=HARD)


@kind
def private(rng: Random) -> Case:
    """Draw models with a tensor that never leaves its client."""
    model = {"model": "tests.campaign.lessons:halves", "private": ["own"]}
    job = _lessons(encoding="fp32_sparse", keep_ratio=0.05, **model)
    found = [checks.models_are_means, checks.mass_is_conserved, checks.own_tensors_count_rounds]
    return Case(job, found, settings=_LOST_AFTER, harms=HARD)


@kind
def unsynced(rng: Random) -> Case:
    """Draw models with a tensor that never leaves its client, and machines that lose what is not synced."""
    model = {"model": "tests.campaign.lessons:halves", "private": ["own"]}
    harms = ("lose_client_syncs", "lose_client_syncs", "fail_syncs", "fail_client_syncs", "kill_server", "kill_client")
    found = [checks.deltas_are_lessons, checks.models_are_means, checks.own_tensors_count_rounds]
    return Case(_lessons(encoding="fp32", **model), found, settings=_LOST_AFTER, harms=harms)


@kind
def damaged_clients(rng: Random) -> Case:
    """Draw sparse updates of clients whose disks flip bits of what they keep."""
    job = _lessons(encoding=rng.choice(["fp32_sparse", "packed"]), keep_ratio=0.05)
    harms = ("damage_client", "damage_client", "damage_client", "crash_client", "kill_server", "kill_client")
    return Case(job, [checks.models_are_means, checks.mass_is_conserved], settings=_LOST_AFTER, harms=harms)


@kind
def sampled(rng: Random) -> Case:
    """Draw real trainings with noise that protects single samples."""
    table = {"noise_multiplier": 1.0}
    keys = {"encoding": "fp32", "weights": "uniform", "epochs": 2, "min_clients_to_aggregate": 1}
    job = _training(**keys, sample_dp=table) | {"max_abandoned": 1000}
    harms = (*HARD, *["lose_update", "lose_client_syncs", "damage_client"] * 2)
    found = [checks.models_are_means, checks.charges_cover_samples]
    return Case(job, found, settings=_LOST_AFTER, harms=harms)


@kind
def own_noise(rng: Random) -> Case:
    """Draw masked updates to which the clients add the noise themselves."""
    table, dp = {"step_seconds": 60}, {"noise_multiplier": 1.0, "clip": 0.5, "adaptive": False, "noise_by": "clients"}
    keys = {
        "weights": "uniform",
        "min_clients": 5,
        "min_clients_to_aggregate": 4,
        "secure_aggregation": table,
        "dp": dp,
    }
    harms = (*WITHOUT_DAMAGE, *CLIENT_DISKS, "lose_client_syncs")
    found = [checks.charges_cover_sums, checks.noise_is_there_once]
    return Case(_lessons(**keys), found, clients=5, settings=_LOST_AFTER, harms=harms, last_round=False)


@kind
def noisy(rng: Random) -> Case:
    """Draw jobs with noise of the server, in which each training of a client has another result."""
    dp = {"noise_multiplier": 1.0, "clip": 0.5, "adaptive": False}
    keys = {"encoding": "fp32", "weights": "uniform", "min_clients_to_aggregate": 2, "dp": dp}
    job = _lessons(**keys) | {"trainer": "tests.campaign.lessons:whim"}
    harms = (*WITHOUT_DAMAGE, *CLIENT_DISKS, *["lose_update"] * 6, *["lose_client_syncs"] * 2, "damage_client")
    return Case(job, [checks.charges_cover_updates], harms=harms)


@kind
def trained(rng: Random) -> Case:
    """Draw real trainings with a server optimizer and encoded downloads."""
    optimizer = {"name": "SGD", "args": {"lr": 0.9, "momentum": 0.5}}
    keys = {"encoding": rng.choice(["uniform", "fp32"]), "download_encoding": "uniform", "mu": 0.01}
    return Case(_training(server_optimizer=optimizer, **keys), [checks.models_are_those_of_the_twin])


@kind
def scaffold(rng: Random) -> Case:
    """Draw real trainings with control variates, models of the clients' own, and error feedback."""
    keys = {"scaffold": True, "momentum": 0.0, "weights": "uniform", "encoding": "packed", "personal": {"mu": 0.5}}
    return Case(_training(**keys), [checks.models_are_those_of_the_twin])


@kind
def feddyn(rng: Random) -> Case:
    """Draw real trainings with a transform that has a state on both sides, and error feedback."""
    transform = {"name": "feddyn", "args": {"alpha": 0.05, "clients": 3}}
    keys = {"weights": "uniform", "encoding": "packed", "transforms": [transform]}
    return Case(_training(**keys), [checks.models_are_those_of_the_twin])


@kind
def residual(rng: Random) -> Case:
    """Draw real trainings with error feedback."""
    return Case(_training(encoding="fp32_sparse", keep_ratio=0.05, epochs=2), [checks.models_are_those_of_the_twin])


@kind
def secure(rng: Random) -> Case:
    """Draw real trainings whose updates are masked."""
    table = {"step_seconds": 60, "keep_ratio": 0.5}
    keys = {"weights": "uniform", "seed": 0, "min_clients": 4, "min_clients_to_aggregate": 4}
    job = _training(**keys, secure_aggregation=table)
    return Case(job, [checks.models_are_those_of_the_twin], clients=4, harms=WITHOUT_DAMAGE, last_round=False)


@kind
def pruned(rng: Random) -> Case:
    """Draw models with a tensor that never leaves its client, for a server that keeps few updates."""
    model = {"model": "tests.campaign.lessons:halves", "private": ["own"]}
    harms = ("crash_client", "crash_client_during_restart", "return_late", "return_late", "kill_server", "kill_client")
    settings = {"lost_after_seconds": 2.0, "keep_update_rounds": 1}
    job = _lessons(encoding="fp32", **model) | {"min_clients": 2}
    return Case(job, [checks.own_tensors_count_rounds], settings=settings, harms=harms)


@kind
def forgotten(rng: Random) -> Case:
    """Draw sparse updates to a server that keeps few, of clients whose folders are put back to older ones."""
    settings = {"lost_after_seconds": 2.0, "keep_update_rounds": 1}
    job = _lessons(encoding="fp32_sparse", keep_ratio=0.05) | {"min_clients": 2}
    harms = ("revert_client_late", "revert_client_late", "kill_server", "kill_client")
    return Case(job, [checks.older_residuals_are_dropped], settings=settings, harms=harms)


@kind
def masked(rng: Random) -> Case:
    """Draw masked updates of clients that all learn the same, and keep what they do not send."""
    table = {"step_seconds": 60, "first_norm": 0.65, **rng.choice([{}, {"keep_ratio": 0.5}])}
    keys = {"weights": "uniform", "min_clients": 4, "min_clients_to_aggregate": 4, "secure_aggregation": table}
    job = _lessons(**keys) | {"trainer": "tests.campaign.lessons:common_lesson"}
    found = [checks.roundings_differ, checks.sums_conserve_mass]
    return Case(job, found, clients=4, harms=WITHOUT_DAMAGE)


@kind
def deadlines(rng: Random) -> Case:
    """Draw rounds that only their deadline ends, because a client takes too long."""
    job = _lessons(encoding="fp32", min_clients_to_aggregate=3, deadline_seconds=12)
    job |= {"trainer": "tests.campaign.lessons:lesson_of_the_last_is_late"}
    return Case(
        job, [checks.rounds_end_in_time], last_round=False,
        harms=("kill_server_after_a_while", "kill_server_after_a_while", "jump_clock"),
        settings={"lost_after_seconds": 30.0},
    )  # fmt: skip


@kind
def data_parallel(rng: Random) -> Case:
    """Draw groups whose workers are all killed at once, and go on from their checkpoints."""
    hook = rng.choice(["dgc(nesterov=true)", "none", "int8"])
    table = {"hook": hook, "replacement_seconds": 120, "checkpoint_every": 7, "bucket_mb": 0.001, "ratio": 0.05}
    model = {"model": "tests.fault.signalled_models:dropout_net", "model_args": {"hidden": 32}}
    job = {
        **_COMMON, **model, "mode": "data_parallel", "rounds": 8, "batch_size": 32, "data_parallel": table,
        "min_clients": 2, "optimizer_args": {"weight_decay": 0.001},
    }  # fmt: skip
    harms = ("kill_all_clients", "kill_all_clients", "kill_server", "slow_line")
    return Case(
        job, [checks.models_are_those_of_the_second_run], clients=2, harms=harms, last_round=False, to_the_end=True,
        most_harms=5,
    )  # fmt: skip


@kind
def pipeline(rng: Random) -> Case:
    """Draw models in stages, whose workers are killed."""
    table = {"stages": 3, "cut": ["4", "7"], "micro_batches": 4, "checkpoint_every": 10}
    job = {
        **_COMMON, "mode": "pipeline", "model": "tests.fault.signalled_models:stages", "rounds": 5, "batch_size": 16,
        "subset_size": 701, "momentum": 0.9, "pipeline": table,
    }  # fmt: skip
    harms = ("kill_client", "kill_client", "kill_all_clients", "kill_server", "slow_line")
    return Case(
        job, [checks.models_are_those_of_the_second_run], harms=harms, last_round=False, to_the_end=True, most_harms=5
    )


@kind
def asynchronous(rng: Random) -> Case:
    """Draw updates that count in later versions than the ones that they began with, sparse or whole."""
    table = {"concurrency": rng.choice([3, 4]), "buffer": rng.choice([1, 2]), "max_staleness": rng.choice([3, 9])}
    encoding = {"encoding": rng.choice(["fp32", "fp32_sparse"]), "keep_ratio": 0.2}
    job = _lessons(asynchronous=table, weights="uniform", **encoding)
    job |= {"trainer": "tests.campaign.lessons:lesson_in_its_own_time"}
    found = [checks.models_are_buffers]
    found += [checks.mass_is_conserved] if job["encoding"] == "fp32_sparse" else [checks.deltas_are_values]
    return Case(job, found, 4, _LOST_AFTER, HARD)


@kind
def several(rng: Random) -> Case:
    """Draw sparse updates of three jobs at once, for which clients train in turns, or have all rounds at once."""
    job = _lessons(encoding="fp32_sparse", keep_ratio=rng.choice([0.02, 0.2]))
    harms = tuple(name for name in HARD if not name.startswith("damage"))
    client = {"max_jobs": rng.choice([1, 3])}
    settings = {**_LOST_AFTER, "max_running_jobs": 3}
    return Case(job, [checks.models_are_means, checks.mass_is_conserved], 3, settings, harms, beside=2, client=client)
