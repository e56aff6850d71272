"""What a training begins with: what updates without masks have left out never goes into updates with masks."""

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from fedring.client import connect
from fedring.v1 import federation_pb2 as pb
from fedring.v1 import secure_pb2 as wire

if TYPE_CHECKING:
    from tests.scripted_server import ScriptedServer

SECONDS = 60.0
SIZE = 48
EVERY = wire.SecureRound(scales=np.ones(3, "<f4").tobytes(), block=16, levels=7)
SOME = wire.SecureRound(scales=np.ones(1, "<f4").tobytes(), blocks=b"\1", block=16, levels=7)
PRIVATE = pb.JobSpec(mode="federated", rounds=9, job_id=2, sample_dp='{"noise_multiplier": 1.0}')


def parameters_of(model: nn.Module) -> NDArray[np.float32]:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy().copy()


@pytest.mark.parametrize(
    "fields",
    [{"secure": SOME}, {"secure": EVERY}, {}, {"secure": SOME, "job": PRIVATE}],
    ids=["some blocks", "all blocks", "no secure aggregation", "first round of a job with noise for samples"],
)
def test_training_begins_with_the_model_alone_after_an_update_without_masks(
    server: "ScriptedServer", settings: dict[str, Any], fields: dict[str, Any]
) -> None:
    model = nn.Linear(SIZE, 1, bias=False)
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        server.train(server.command(model, encoding="fp32_sparse"))
        task = next(federation)
        task.load_into(model)
        base = parameters_of(model)
        with torch.no_grad():
            model.weight += torch.arange(SIZE, dtype=torch.float32)
        task.submit(model, samples=1)
        server.train(server.command(model, round_=2, **fields))
        next(federation).load_into(model)
    np.testing.assert_array_equal(parameters_of(model), base)
