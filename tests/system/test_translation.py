"""An encoder and decoder in stages, each in its own process, whose tensors go straight to the stages that use them."""

import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fedring.pipeline.cut import cut_at
from fedring.pipeline.transport import GroupTransport
from fedring.pipeline.worker import Worker
from fedring.schedules.schedule import make, pipedream
from tests.conftest import ROOT, path_to
from tests.fleets import Control, Fleet, run_job
from tests.system.ring_scripts import ranks
from tests.translators import COUNT, NAMES, STEPS, alone, model_of, sentences, stages_of

EXAMPLES = ROOT / "docs" / "examples"


def train(rank: int, size: int, *, name: str) -> dict[str, Any]:
    """Do this rank's part of a training, and return its losses, parameters and the outputs of an evaluation."""
    cut = cut_at(model_of(), ["encoder.1", "decoder.0", "decoder.1"] if name == "interleaved_1f1b" else NAMES)
    schedule = make(name, len(cut), COUNT, workers=size)
    if name == "pipedream":
        schedule = pipedream(size, COUNT, interval=COUNT)  # one update for each run, as in one process
    built = stages_of(cut, schedule, recompute=name == "gpipe")
    mine = {number: built[number] for number in schedule.stages_of(rank)}
    transport = GroupTransport(credits=1)
    worker, losses = Worker(mine, schedule, transport, routes=cut.routes), []
    read = {tensor for number in mine for tensor in cut.routes.from_batch(number)}
    for step in range(STEPS):
        inputs, targets = sentences(step)
        losses += worker.run(
            {tensor: inputs[tensor] for tensor in read}, targets if len(cut) - 1 in mine else None
        ).losses
    outputs = worker.evaluate({tensor: sentences(0)[0][tensor] for tensor in read})
    return {
        "losses": losses,
        "outputs": None if outputs is None else torch.cat(outputs).tolist(),
        "parameters": {n: p.tolist() for stage in mine.values() for n, p in stage.module.named_parameters()},
    }


@pytest.mark.parametrize(("name", "workers", "backend"), [
    ("1f1b", 3, "fedring"), ("1f1b", 3, "gloo"), ("gpipe", 3, "fedring"), ("interleaved_1f1b", 2, "fedring"),
    ("pipedream", 3, "fedring"),
])  # fmt: skip
def test_tensors_that_skip_stages_train_as_in_one_process(
    name: str, workers: int, backend: str, tmp_path: Path
) -> None:
    results = ranks.run(partial(train, name=name), workers, tmp_path, backend=backend)
    model = model_of()
    assert results[-1]["losses"] == pytest.approx(alone(model), abs=1e-5)
    found = {parameter: values for result in results for parameter, values in result["parameters"].items()}
    expected = dict(model.named_parameters())
    assert set(found) == set(expected)
    for parameter, values in found.items():
        torch.testing.assert_close(torch.tensor(values), expected[parameter].detach(), rtol=1e-4, atol=1e-5)
    inputs, _ = sentences(0)
    outputs = model.eval()(*(torch.cat(list(parts)) for parts in inputs.values()))
    torch.testing.assert_close(torch.tensor(results[-1]["outputs"]), outputs, rtol=1e-4, atol=1e-5)


def test_a_pipeline_job_of_three_clients_translates(tmp_path: Path) -> None:
    """Run docs/examples/translation.toml."""
    trusted = {"trusted": ["fedring", "translation"]}
    spec = tomllib.loads((EXAMPLES / "translation.toml").read_text())
    with Fleet(tmp_path, trusted, [trusted] * 3, env=path_to(EXAMPLES)) as fleet, Control(fleet.control) as control:
        ended = run_job(control, spec)
        assert ended.state == "completed", [daemon.tail(20) for daemon in fleet.clients]
        (round_,) = control.rounds(job_id=ended.job_id)
    assert round_.eval_correct / round_.eval_total > 0.95
    assert sorted(client.metrics["stage"] for client in round_.clients) == [0, 1, 2]
