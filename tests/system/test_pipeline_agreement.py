"""What rank 0 of a pipeline tells its group, between real processes: numbers that do not fit the job are refused."""

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedring.data import Samples
from fedring.train.errors import TrainError
from fedring.train.jobs.pipeline_table import Pipeline
from fedring.train.losses import cross_entropy
from fedring.train.names.offered import collect
from fedring.train.plan import Plan
from fedring.workers.exchange import gather_integers
from fedring.workers.pipeline_epochs import PipelineSetup, PipelineTraining
from fedring.workers.pipeline_profile import PipelineProfile
from fedring.workers.stage_checkpoints import StageCheckpoints
from fedring.workers.training import Watcher
from tests.system.ring_scripts import ranks

BATCH = 64


def setup_of(folder: Path, table: Pipeline) -> PipelineSetup:
    def nothing(*_: object) -> None:
        raise AssertionError("no tensor is fetched before the group agrees")

    return PipelineSetup(
        model=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)).to("meta"),
        base_digest="",
        fetch=nothing,
        checkpoints=StageCheckpoints(folder, "job", max_file_bytes=1),
        update_file=folder / "update",
        samples=Samples(torch.zeros(BATCH, 4), torch.zeros(BATCH, dtype=torch.int64)),
        plan=Plan(batch_size=BATCH),
        table=table,
        loss=cross_entropy,
        optimizer=lambda parameters, lr, momentum: torch.optim.SGD(parameters, lr),
        device=torch.device("cpu"),
        offered=collect([]),
        counts=[2, 1],
    )


def listen(folder: Path, told: list[list[int]], rank: int, size: int, **table: Any) -> list[str]:
    """Tell rank 1 one row of numbers after the other, as rank 0; return how it answered each."""
    answers = []
    for row in told:
        if rank == 0:
            with suppress(TrainError):
                gather_integers(row)
            continue
        parsed = Pipeline.model_validate({"stages": 2, **table})
        try:
            PipelineTraining(setup_of(folder, parsed), None, Watcher(), profile=PipelineProfile())
        except Exception as error:  # noqa: BLE001  # the test checks whatever it is
            answers.append(f"{getattr(error, 'reason', type(error).__name__)}: {error}")
    return answers


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ({"micro_batches": 4}, [[], [4], [0, 1, 2, 1], [8, 1, 2, 1], [-4, 1, 2, 1], [1 << 20, 1, 2, 1]]),
        ({"micro_batches": 4}, [[4, -1, 2, 1], [4, 1 << 62, 2, 1], [4, 1], [4, 1, 1, 1, 1]]),
        ({"micro_batches": "auto"}, [[-1, 1, 2, 1], [BATCH + 1, 1, 2, 1], [1 << 20, 1, 2, 1]]),
        (
            {"micro_batches": "auto", "stages": 4, "stages_per_worker": 2, "schedule": "interleaved_1f1b"},
            [[3, 1, 2, 1]],
        ),
        ({"micro_batches": 4, "schedule": "pipedream"}, [[0, 1, 2, 1], [1 << 20, 1, 2, 1]]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_numbers_that_do_not_fit_the_job_are_refused_before_use(
    tmp_path: Path, table: dict[str, Any], told: list[list[int]]
) -> None:
    _, answers = ranks.run(partial(listen, tmp_path, told, **table), 2, tmp_path)
    assert len(answers) == len(told)
    for row, answer in zip(told, answers, strict=True):
        assert answer.startswith(f"bad_peer: The worker of rank 0 tells its group {row}")


def test_too_many_numbers_of_a_peer_are_no_fault_of_this_workers_checkpoint(tmp_path: Path) -> None:
    """A worker with bad_checkpoint deletes its files."""
    _, answers = ranks.run(partial(listen, tmp_path, [[0] * ((1 << 16) + 1)], micro_batches=4), 2, tmp_path)
    assert answers == [f"bad_peer: a worker sends {(1 << 16) + 1} integers, above {1 << 16}."]
