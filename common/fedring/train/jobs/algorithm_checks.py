"""The demands of an algorithm on other keys of a job."""

import json
from collections.abc import Mapping

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
    "select_factor": (1.0, "another client would take the place of one that does not deliver"),
    "straggler_factor": (0.0, "one client's time would decide which others count"),
    "aggregation.rule": (MEAN, "the noise is not made for other rules"),
}
"""The demands of the table [dp], with reasons."""

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
        if (found := value_of(job, key, needed)) != needed:
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
    check_needs(job, table, needs, best_by, "figures of the training are not private")


def check_needs(job: object, table: str, needs: Mapping[str, tuple[object, str]], best_by: str, figures: str) -> None:
    """Check that keys have the values that a table needs.

    Args:
        job: The job.
        table: The name of the table.
        needs: The values by key, as in check_keys, with reasons.
        best_by: The job's key best_by; empty = it is not looked at.
        figures: Why figures of the training are never known.

    Raises:
        ValueError: If a key has another value than it must have; the sentence says why.
    """
    for key, (needed, why) in needs.items():
        if (found := value_of(job, key, needed)) != needed:
            raise ValueError(f"{table}: {key} is {written(found)}, and must be {written(needed)}, because {why}")
    if " train/" in best_by:
        raise ValueError(f"{table}: best_by = {written(best_by)} is never known, because {figures}")


def written(value: object) -> str:
    """Return a key's value for an error's sentence."""
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


def value_of(job: object, path: str, default: object) -> object:
    """Return the value of a key of a job or table.

    A dot in the path leads into a table. The value is the default if the key's table is there, and has no such key.
    """
    value = job
    for key in path.split("."):
        value = value.get(key, default) if isinstance(value, Mapping) else getattr(value, key)
    return value
