"""What an algorithm demands of the other keys of a job."""

import json
from collections.abc import Mapping

from fedring.train.aggregation_table import MEAN

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
"""What scaffold = true needs: its formulas are those of plain steps, and of a plain mean."""

PERSONAL: Mapping[str, object] = {"mode": "federated", "trainer": "", "shared": ["*"], "private": []}
"""What the table [personal] needs: the built-in loop trains a client's whole model."""


def check_keys(job: object, cause: str, needs: Mapping[str, object]) -> None:
    """Check that keys of a job have the values that an algorithm needs.

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


def _value(job: object, path: str, default: object) -> object:
    value = job
    for key in path.split("."):
        value = value.get(key, default) if isinstance(value, Mapping) else getattr(value, key)
    return value
