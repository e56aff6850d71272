"""Exports of exact models: what download_encoding has left out is added, as long as the server keeps it."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedring.control.failure import Failure
from tests.control_server import Server
from tests.fleets import Control, Fleet
from tests.system.wire import WireClient, deliver, outcome, run

SIZE = 5000


def test_the_exact_model_is_the_mean_of_what_clients_learned(tmp_path: Path) -> None:
    noise = [np.random.default_rng(seed).standard_normal(SIZE).astype(np.float32) for seed in range(5)]
    keys = {"model_args": {"size": SIZE}, "start": "fresh", "evaluate": False}
    settings = {"keep_models": 4, "keep_jobs": 2}
    with Fleet(tmp_path, settings) as fleet, Control(fleet.control) as control, WireClient(fleet.listen) as client:

        def exported(version: int, *, exact: bool) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
            path = tmp_path / "model.safetensors"
            control.export_model(version, path, exact=exact)
            values = load_file(path)["values"]
            assert values.shape == (SIZE,)
            return values

        job_id, events = run(control, **keys, rounds=3, download_encoding="uniform")
        for values in noise[:3]:
            deliver(client, values)
        assert outcome(control, job_id, events).state == "completed"
        learned = np.sum(noise[:3], axis=0)
        np.testing.assert_allclose(exported(0, exact=True), learned, atol=1e-5)
        assert np.abs(exported(0, exact=False) - learned).max() > 1e-3  # the published one is lossy
        with pytest.raises(Failure, match="left out of model 2 is not kept any more"):
            exported(2, exact=True)
        np.testing.assert_array_equal(exported(1, exact=True), exported(1, exact=False))  # a first model lacks nothing

        job_id, events = run(control, **keys, rounds=2)
        for values in noise[3:]:
            deliver(client, values)
        assert outcome(control, job_id, events).state == "completed"
        np.testing.assert_array_equal(exported(0, exact=True), exported(0, exact=False))
        np.testing.assert_allclose(exported(4, exact=True), learned, atol=1e-5)  # the newest of the job before


def test_an_older_server_is_not_taken_for_one_that_exports_exact_models(tmp_path: Path) -> None:
    server = Server()
    try:
        with Control(server.address) as control, pytest.raises(Failure, match="too old to export exact models"):
            control.export_model(0, tmp_path / "model.safetensors", exact=True)
    finally:
        server.stop()
