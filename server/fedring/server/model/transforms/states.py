"""The states of algorithms, in one safetensors file of a model.

Its tensors are called "feddyn/h", and its metadata says to which job they belong, and to which arguments.
"""

import json
import logging
from collections.abc import Mapping

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from fedring.codec.errors import CodecError
from fedring.server.aggregation.combining import Walk
from fedring.server.aggregation.steps import BaseFiles, Step, VectorFile
from fedring.server.model.transforms.transform import StatefulStep, States
from fedring.server.state.rows import ModelRow
from fedring.untrusted import parse_json

log = logging.getLogger(__name__)

_OWNERS = "owners"


class KeptStates(Step):
    """The states of one round's steps.

    A state is used only by the job, the algorithm and the arguments that have left it. Otherwise, the algorithm begins
    anew: in the first round of a job, and when its arguments are others.

    Args:
        steps: by the names of their algorithms.
        owners: which job and which arguments a state belongs to, as a text, by the same names.
    """

    def __init__(self, steps: Mapping[str, StatefulStep], owners: Mapping[str, str]) -> None:
        self._steps, self._owners = steps, owners

    def read(self, base: ModelRow, files: BaseFiles) -> None:
        """See Step.read."""
        data = files.read(base.transforms_blob)
        try:
            found, owners = read_states(data) if data else ({}, {})
        except CodecError as error:
            raise files.damage_of(error) from error
        for name, step in self._steps.items():
            mine = owners.get(name) == self._owners[name]
            if data and not mine:
                log.info("the state of %s begins anew: model %d has none of this job", name, base.version)
            step.begin(found.get(name, {}) if mine else {}, base.parameters)

    def files(self, walk: Walk) -> Mapping[str, bytes | VectorFile]:
        """See Step.files."""
        states = {name: step.state() for name, step in self._steps.items()}
        return {"transforms_blob": write_states(states, self._owners)} if any(states.values()) else {}


def write_states(states: Mapping[str, States], owners: Mapping[str, str]) -> bytes:
    """Return the file of some states; arguments as KeptStates has them.

    Raises:
        CodecError: "non_finite", if a value is not finite.
    """
    tensors = {f"{name}/{key}": values for name, state in states.items() for key, values in state.items()}
    if lost := [key for key, values in tensors.items() if not np.isfinite(values).all()]:
        raise CodecError("non_finite", f"the state {lost[0]} has a value that is not finite")
    return safetensors.numpy.save(tensors, {_OWNERS: json.dumps(dict(owners), sort_keys=True)})


def read_states(data: bytes) -> tuple[dict[str, dict[str, NDArray[np.float32]]], dict[str, str]]:
    """Return the states in a file, and their owners, by algorithm.

    Raises:
        CodecError: "bad_model", if it is no such file.
    """
    try:
        tensors = safetensors.numpy.load(data)
        header = parse_json(data[8 : 8 + int.from_bytes(data[:8], "little")])
        owners = {str(name): str(owner) for name, owner in parse_json(header["__metadata__"][_OWNERS]).items()}
    except (SafetensorError, KeyError, ValueError, AttributeError, TypeError) as error:
        raise CodecError("bad_model", f"the file of the transforms' states cannot be read: {error}") from error
    states: dict[str, dict[str, NDArray[np.float32]]] = {}
    for key, values in tensors.items():
        name, _, own = key.partition("/")
        states.setdefault(name, {})[own] = values
    return states, owners
