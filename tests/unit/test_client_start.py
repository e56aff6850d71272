"""What a training begins with: the model, and in rounds that leave blocks out what the client has not sent yet."""

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
    from tests.unit.conftest import ScriptedServer

SECONDS = 60.0
SIZE = 48
EVERY = wire.SecureRound(scales=np.ones(3, "<f4").tobytes(), block=16, levels=7)
SOME = wire.SecureRound(scales=np.ones(1, "<f4").tobytes(), blocks=b"\1", block=16, levels=7)
PRIVATE = pb.JobSpec(mode="federated", rounds=9, job_id=2, sample_dp='{"noise_multiplier": 1.0}')


def parameters_of(model: nn.Module) -> NDArray[np.float32]:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy().copy()


@pytest.mark.parametrize(
    ("fields", "waits"),
    [({"secure": SOME}, True), ({"secure": EVERY}, False), ({}, False), ({"secure": SOME, "job": PRIVATE}, False)],
    ids=["some blocks", "all blocks", "no secure aggregation", "first round of a job with noise for samples"],
)
def test_what_waits_is_added_to_the_model_if_only_some_blocks_are_sent(
    server: "ScriptedServer", settings: dict[str, Any], fields: dict[str, Any], waits: bool
) -> None:
    model = nn.Linear(SIZE, 1, bias=False)
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        server.train(server.command(model, encoding="fp32_sparse"))
        task = next(federation)
        task.load_into(model)
        base, added = parameters_of(model), np.arange(SIZE, dtype=np.float32)
        with torch.no_grad():
            model.weight += torch.from_numpy(added)
        task.submit(model, samples=1)
        server.train(server.command(model, round_=2, **fields))
        next(federation).load_into(model)
    kept = np.where(added < SIZE - SIZE // 4, added, 0)  # the largest quarter was sent
    np.testing.assert_allclose(parameters_of(model), base + kept if waits else base, atol=1e-5)
