"""Attackers that speak the real wire, beside honest daemons: the mean is spoilt, and centered clipping holds."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedring.data import Samples, digits, load_part
from fedring.train.evaluation import evaluate
from fedring.train.losses import cross_entropy
from fedring.train.models import digits_mlp
from tests.attacks import formulas
from tests.attacks.attacker import ADAPTIVE, Attack, Attacker
from tests.attacks.clients import attack, attacker_session
from tests.fleets import Control, Fleet, run_job, until_watching

HONEST, MALICIOUS = 5, 2
CLIENTS = HONEST + MALICIOUS
BRIGHT = 1.0  # digits are stored from 0 to 1
JOB: dict[str, Any] = {
    "epochs": 4,
    "batch_size": 16,
    "min_clients": CLIENTS,
    "partition": "iid",
    "encoding": "fp32",
    "start": "fresh",
    "evaluate": False,
}


def part(index: int) -> Samples:
    """Return the training samples of a client."""
    train = load_part(digits(), "iid", index=index, count=CLIENTS, alpha=0.5, seed=0).train
    assert isinstance(train, Samples)
    return train


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Start a server and the honest clients, each with its part of the digits."""
    clients = [{"partition_index": index, "partition_count": CLIENTS, "threads": 1} for index in range(HONEST)]
    with Fleet(tmp_path_factory.mktemp("attacks"), None, clients) as started:
        yield started


def train_under(fleet: Fleet, folder: Path, kind: Attack, rule: dict[str, Any], rounds: int = 4) -> tuple[float, float]:
    """Run a job under an attack. Returns the accuracy of its last model, and the success of the backdoor."""
    honest = {f"client-{index}": part(index) for index in range(HONEST)}
    with ExitStack() as stack:
        control = stack.enter_context(Control(fleet.control))
        for index in range(HONEST, CLIENTS):
            federation = stack.enter_context(attacker_session(fleet.listen, f"attacker-{index}", folder))
            attacker = Attacker(kind, part(index), 10, BRIGHT, CLIENTS, MALICIOUS)
            thread = threading.Thread(target=attack, args=(federation, attacker, digits_mlp(), honest))
            stack.callback(thread.join)
            stack.enter_context(closing(federation))
            thread.start()
        until_watching(control, CLIENTS)
        job = run_job(control, JOB | {"rounds": rounds, "aggregation": rule})
        assert job.state == "completed", job.reason
        assert [round_.delivered for round_ in control.rounds(job_id=job.job_id)] == [CLIENTS] * rounds
        control.export_model(0, folder / "model.safetensors")
    model = digits_mlp()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    test = digits().test
    assert isinstance(test, Samples)
    counts = [
        evaluate(model, samples, loss=cross_entropy, device=torch.device("cpu")).accuracy
        for samples in (test, formulas.triggered(test, BRIGHT))
    ]
    return counts[0] or 0.0, counts[1] or 0.0


@pytest.mark.parametrize("kind", ["inflation", "backdoor"])
def test_an_attack_spoils_the_mean_and_centered_clipping_holds(fleet: Fleet, tmp_path: Path, kind: Attack) -> None:
    spoilt, backdoor = train_under(fleet, tmp_path, kind, {"rule": "mean"})
    if kind == "backdoor":
        assert backdoor > 0.9
    else:
        assert spoilt < 0.6
    accuracy, backdoor = train_under(fleet, tmp_path, kind, {"rule": "centered_clip"})
    assert accuracy > 0.8
    assert backdoor < 0.1


@pytest.mark.parametrize("kind", ["inner_product", *ADAPTIVE])
def test_attackers_who_compute_what_the_others_send_take_part_in_every_round(
    fleet: Fleet, tmp_path: Path, kind: Attack
) -> None:
    accuracy, _ = train_under(fleet, tmp_path, kind, {"rule": "centered_clip"}, rounds=3)
    assert accuracy > 0.8
