"""The demands of an algorithm on other keys of a job."""

import json
from collections.abc import Mapping

from fedring.codec.encoding import DELTA_ONLY
from fedring.train.jobs.aggregation_table import MEAN

SCAFFOLD: Mapping[str, object] = {
    "mode": "federated",
    "trainer": "",
    "optimizer": "fedring.train.optimizers:sgd",
    "momentum": 0.0,
    "optimizer_args.nesterov": False,
    "optimizer_args.dampening": 0.0,
    "mu": 0.0,
    "weights": "uniform",
    "update_clip": 0.0,
    "update_clip_factor": 0.0,
    "normalize_steps": False,
    "aggregation.rule": MEAN,
}
"""The demands of scaffold = true: its formulas are those of plain steps, and of a plain mean."""

BUILT_IN_LOOP: Mapping[str, object] = {"mode": "federated", "trainer": ""}
"""The demands of clip_norm and precision: only the built-in loop of a client follows them."""

PERSONAL: Mapping[str, object] = {"mode": "federated", "trainer": "", "shared": ["*"], "private": []}
"""The demands of the table [personal]: the built-in loop trains a client's whole model."""

PRIVATE: Mapping[str, tuple[object, str]] = {
    "mode": ("federated", "the other modes do not bound what one client contributes"),
    "weights": ("uniform", "numbers of samples are not private"),
    "evaluate": (False, "the clients' evaluations are not private; evaluate_on_server may be true"),
    "normalize_steps": (False, "numbers of steps are not private"),
    "scaffold": (False, "control variates are made of updates that are not clipped"),
    "update_clip": (0.0, "dp.clip takes its place"),
    "update_clip_factor": (0.0, "dp.clip takes its place"),
    "close_at_minimum": (False, "another client would take the place of one that does not deliver"),
    "straggler_factor": (0.0, "one client's time would decide which others count"),
    "aggregation.rule": (MEAN, "the noise is not made for other rules"),
}
"""The demands of the table [dp], with reasons."""

BY_CLIENTS: Mapping[str, tuple[object, str]] = {
    "dp.adaptive": (False, "nobody knows how many updates are within the clip: choose dp.clip"),
    "secure_aggregation.keep_ratio": (1.0, "noise covers all values, and nothing is left for later rounds"),
}
"""The demands of noise by clients, with reasons."""

SECURE: Mapping[str, tuple[object, str]] = {
    "mode": ("federated", "the workers of the other modes see each other's gradients"),
    "evaluate": (False, "the clients' evaluations are not masked; evaluate_on_server may be true"),
    "normalize_steps": (False, "numbers of steps are not masked"),
    "scaffold": (False, "control variates are made of single updates"),
    "update_clip_factor": (0.0, "nobody knows the norm of one update"),
    "close_at_minimum": (False, "the server would choose whose updates count"),
    "straggler_factor": (0.0, "the server would choose whose updates count"),
}
"""The demands of the table [secure_aggregation], with reasons."""
SAMPLE_PRIVATE: Mapping[str, tuple[object, str]] = {
    "mode": ("federated", "the workers of the other modes see each other's gradients"),
    "trainer": ("", "only the built-in loop adds the noise"),
    "weights": ("uniform", "numbers of samples are not private"),
    "evaluate": (False, "the clients' evaluations are not private; evaluate_on_server may be true"),
    "normalize_steps": (False, "numbers of steps are not private"),
    "scaffold": (False, "its control variates would count in gradients that are shortened"),
    "clip_norm": (0.0, "the gradient of each sample is shortened to max_grad_norm already"),
    "precision": ("fp32", "gradients of single samples are computed in fp32 only"),
}
"""The demands of the table [sample_dp], with reasons. Later uses of the updates cost no privacy."""


def check_keys(job: object, cause: str, needs: Mapping[str, object]) -> None:
    """Check that keys have the values that an algorithm needs.

    Args:
        job: The job.
        cause: The key that needs them, with its value.
        needs: The values by key, in which a dot leads into a table. A key that is absent from a table fits.

    Raises:
        ValueError: If a key has another value.
    """
    for key, needed in needs.items():
        if (found := _value(job, key, needed)) != needed:
            raise ValueError(f"{cause} needs {key} = {json.dumps(needed)}, and it is {json.dumps(found)}")


def check_private(job: object, table: str, needs: Mapping[str, tuple[object, str]], best_by: str) -> None:
    """Check that no key undoes a job's differential privacy.

    Some keys would reveal more than the noise covers.

    Args:
        job: The job.
        table: The name of the table that makes it private.
        needs: The demands of the table, with reasons: PRIVATE or SAMPLE_PRIVATE.
        best_by: The job's key best_by.

    Raises:
        ValueError: If a key has another value than it must have; the sentence says why.
    """
    _check_needs(job, table, needs, best_by, "figures of the training are not private")


def check_noise_by(job: object) -> None:
    """Check that dp.noise_by fits the job.

    Raises:
        ValueError: If another key must change; the sentence says which, and why.
    """
    secure, by_clients = _value(job, "secure_aggregation", None), _value(job, "dp.noise_by", "") == "clients"
    if secure is not None and not by_clients:
        why = "the server would have to clip each update, and sees none: let the clients clip and add the noise"
        raise ValueError(f'dp: noise_by is "server", and must be "clients" with secure_aggregation, because {why}')
    if by_clients:
        if secure is None:
            why = "the noise of one client alone hides little"
            raise ValueError(f'dp: noise_by = "clients" needs the table [secure_aggregation], because {why}')
        _check_needs(job, 'dp.noise_by = "clients"', BY_CLIENTS, "", "")


def check_secure(job: object, best_by: str) -> None:
    """Check that no key needs updates that secure aggregation hides.

    The arguments are those of check_private.

    Raises:
        ValueError: If a key has another value than it must have; the sentence says why.
    """
    _check_needs(job, "secure_aggregation", SECURE, best_by, "figures of the training are not masked")
    if (encoding := _value(job, "encoding", "")) in DELTA_ONLY:
        why = "which values a client sends would reveal what it learned from: set secure_aggregation.keep_ratio"
        raise ValueError(f"secure_aggregation: encoding is {_written(encoding)}, and must not be sparse, because {why}")
    rule, group_size = _value(job, "aggregation.rule", MEAN), _value(job, "secure_aggregation.group_size", 0)
    if rule != MEAN and not group_size:
        why = "the server has one sum, and no updates to compare: set secure_aggregation.group_size"
        raise ValueError(
            f"secure_aggregation: aggregation.rule is {_written(rule)}, and must be {_written(MEAN)}, because {why}"
        )


def _check_needs(job: object, table: str, needs: Mapping[str, tuple[object, str]], best_by: str, figures: str) -> None:
    for key, (needed, why) in needs.items():
        if (found := _value(job, key, needed)) != needed:
            raise ValueError(f"{table}: {key} is {_written(found)}, and must be {_written(needed)}, because {why}")
    if " train/" in best_by:
        raise ValueError(f"{table}: best_by = {_written(best_by)} is never known, because {figures}")


def _written(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


def _value(job: object, path: str, default: object) -> object:
    value = job
    for key in path.split("."):
        value = value.get(key, default) if isinstance(value, Mapping) else getattr(value, key)
    return value
