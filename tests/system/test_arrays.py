"""Clients whose model is numpy arrays, on a real server: alone, beside torch, and with arrays that do not fit."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedring.client import WrongModel, connect
from fedring.train.models import digits_mlp
from tests.fleets import Control, Fleet, until_watching

Arrays = dict[str, np.ndarray[Any, Any]]

JOB: dict[str, Any] = {
    "model": "fedring.train.models:arrays",
    "model_args": {"shapes": {"coef": [2, 3], "intercept": [2]}},
    "encoding": "fp32",
    "min_clients": 1,
    "rounds": 2,
}


def test_arrays_are_trained_and_evaluated_and_become_the_servers_model(tmp_path: Path) -> None:
    mine: Arrays = {"coef": np.zeros((2, 3)), "intercept": np.zeros(2, np.float16)}
    seen: list[float] = []

    def evaluate(arrays: Arrays) -> dict[str, float]:
        seen.append(float(arrays["coef"][1, 2]))
        return {"num_samples": 5, "loss": 0.25}

    with (
        Fleet(tmp_path) as fleet,
        Control(fleet.control) as control,
        connect(
            server=fleet.listen, client_id="ann", state_dir=tmp_path / "ann", model=mine, evaluate=evaluate
        ) as federation,
    ):
        until_watching(control, 1)
        events = control.events()
        job_id = control.start_job(JOB).job_id
        for _ in range(2):
            task = next(federation)
            task.load_into(mine)
            mine["coef"] += np.arange(6).reshape(2, 3)
            mine["intercept"] -= 1
            task.submit(mine, samples=5)
        last = threading.Thread(target=list, args=(federation,))  # evaluates the second model
        last.start()
        for _ in control.follow_job(job_id, events):
            pass
        federation.close()
        last.join()
        assert control.job(job_id).state == "completed"
        control.export_model(0, tmp_path / "out.safetensors")
    assert seen == [5, 10]
    out = load_file(tmp_path / "out.safetensors")
    assert out["coef"].tolist() == [[0, 2, 4], [6, 8, 10]]
    assert out["intercept"].tolist() == [-2, -2]


def test_arrays_that_change_shape_end_the_round_for_this_client_with_one_sentence(tmp_path: Path) -> None:
    mine = {"coef": np.zeros((2, 3)), "intercept": np.zeros(2)}
    with (
        Fleet(tmp_path) as fleet,
        Control(fleet.control) as control,
        connect(server=fleet.listen, client_id="ann", state_dir=tmp_path / "ann") as federation,
    ):
        until_watching(control, 1)
        events = control.events()
        job_id = control.start_job(JOB | {"evaluate": False}).job_id
        first = next(federation)
        first.load_into(mine)
        with pytest.raises(WrongModel, match=r"expected parameter coef float32\[2, 3\], got .* float32\[2, 4\]"):
            first.submit(mine | {"coef": np.zeros((2, 4))}, samples=5)
        second = next(federation)
        with pytest.raises(WrongModel, match=r"coef"):
            second.load_into(mine | {"coef": np.zeros((3, 3))})
        told = [event.text for event in control.follow_job(job_id, events) if event.kind == "client_failed"]
        assert [text.startswith("ann could not train: wrong_") for text in told] == [True, True]
        assert [round_.delivered for round_ in control.rounds(job_id=job_id)] == [0, 0]


def test_a_client_with_arrays_trains_the_same_model_as_one_with_torch(tmp_path: Path) -> None:
    mine = {name: np.empty(tensor.shape) for name, tensor in digits_mlp().state_dict().items()}
    with (
        Fleet(tmp_path, None, [{}]) as fleet,
        Control(fleet.control) as control,
        connect(server=fleet.listen, client_id="ann", state_dir=tmp_path / "ann") as federation,
    ):
        until_watching(control, 2)
        events = control.events()
        job_id = control.start_job({"evaluate": False, "subset_size": 64}).job_id
        task = next(federation)
        task.load_into(mine)
        task.submit(mine, samples=1)
        for _ in control.follow_job(job_id, events):
            pass
        (round_,) = control.rounds(job_id=job_id)
        assert [client.client_id for client in round_.clients if client.num_samples] == ["ann", "client-0"]
