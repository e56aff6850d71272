"""Numpy arrays in the place of a torch module: the same schema and values, in the client's own types of floats."""

from typing import Any

import numpy as np
import pytest
from torch import nn

from fedring.codec import Vectors
from fedring.train.errors import SeamError
from fedring.train.models import arrays, digits_mlp
from fedring.train.names.offered import collect
from fedring.train.names.seam import build_model
from fedring.train.tensors.arrays import as_module, copy_back
from fedring.train.tensors.state import read_vectors, schema_of, write_vectors

SHAPES = {"coef": [3, 2], "intercept": [3], "scale": []}


def of(dtype: str) -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.ones(shape, dtype) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_arrays_of_any_floats_have_the_schema_of_the_servers_model(dtype: str) -> None:
    assert schema_of(as_module(of(dtype))) == schema_of(arrays(SHAPES))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_values_are_read_from_arrays_and_written_into_them(dtype: str, order: Any) -> None:
    mine = {name: np.asarray(array, order=order) for name, array in of(dtype).items()}
    mine["coef"][...] = np.arange(6).reshape(3, 2)
    kept = dict(mine)
    module = as_module(mine)
    assert read_vectors(module).parameters.tolist() == [0, 1, 2, 3, 4, 5, 1, 1, 1, 1]
    write_vectors(module, schema_of(module), Vectors(np.arange(10, 20, dtype=np.float32), np.empty(0)))
    copy_back(module, mine)
    assert mine["coef"].tolist() == [[10, 11], [12, 13], [14, 15]]
    assert mine["scale"] == 19
    assert all(mine[name] is kept[name] for name in mine)


def test_large_arrays_of_float32_are_not_copied() -> None:
    mine = {"w": np.zeros(5, np.float32)}
    assert np.shares_memory(as_module(mine).get_parameter("w").detach().numpy(), mine["w"])


def test_a_torch_module_stays_itself() -> None:
    model = nn.Linear(2, 2)
    assert as_module(model) is model


def test_arrays_with_the_names_of_a_torch_module_fit_it() -> None:
    """So that clients with and without torch can train one model."""
    model = digits_mlp()
    mine = {name: np.zeros(tensor.shape) for name, tensor in model.state_dict().items()}
    assert schema_of(as_module(mine)) == schema_of(model)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ({}, "there are no arrays"),
        ({"w": np.zeros(3, np.int64)}, "w is of the kind array of int64: give a numpy array of floats"),
        ({"w": [1.0]}, "w is of the kind list: give a numpy array of floats"),
        ({"": np.zeros(3)}, "'' cannot name an array"),
        ({3: np.zeros(3)}, "3 cannot name an array: give text"),
        ({"a": np.zeros(3), "a.b": np.zeros(3)}, "'a.b' cannot name an array"),
    ],
)
def test_what_is_no_model_is_refused_in_one_sentence(model: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match="^" + sentence.replace("'", ".")):
        as_module(model)


@pytest.mark.parametrize("shapes", [{}, {"w": [-1]}, {"w": "x"}, "w", {"w": [1.5]}])
def test_a_job_whose_shapes_are_none_is_refused(shapes: Any) -> None:
    with pytest.raises(SeamError):
        build_model("fedring.train.models:arrays", {"shapes": shapes}, 0, collect(["fedring"]))


def test_an_array_that_may_not_be_written_to_is_not_filled() -> None:
    mine = {"w": np.zeros(3)}
    mine["w"].flags.writeable = False
    module = as_module(mine)
    with pytest.raises(ValueError, match="read-only"):
        copy_back(module, mine)
