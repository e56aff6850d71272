"""A hundred clients in one process, the largest group of secure aggregation, with a real server."""

import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedring.client import Federation, RoundOver, connect
from fedring.client.policy.secret import DITHER, kept_secret
from fedring.secure.levels import to_integers
from fedring.secure.limits import MAX_GROUP
from fedring.train.models import vector
from fedring.v1 import federation_pb2 as pb
from tests.fault.faulty_fleet import FaultyFleet, wait_for
from tests.fault.residuals import stored_model
from tests.fault.user_trainers import lesson_of
from tests.fleets import Control
from tests.system.wire import run

SIZE, STEP = 2000, 0.5


def serve(federation: Federation, number: int, commands: dict[int, pb.TrainCmd]) -> None:
    """Train every round that the server asks for, until it is gone; note the last command."""
    with federation:
        for task in federation:
            model, commands[number] = vector(SIZE), task.command
            try:
                task.load_into(model)
                with torch.no_grad():
                    next(model.parameters()).add_(torch.from_numpy(lesson_of(number, task.round, SIZE)))
                task.submit(model, samples=1)
            except RoundOver:
                continue


@pytest.mark.soak
def test_the_sum_of_a_hundred_clients_is_exact(tmp_path: Path) -> None:
    with FaultyFleet(tmp_path) as fleet, ExitStack() as stack:
        threads, commands = [], dict[int, pb.TrainCmd]()
        for number in range(MAX_GROUP):
            settings: dict[str, Any] = {
                "server": fleet.listen,
                "client_id": f"c{number:03}",
                "state_dir": tmp_path / f"c{number:03}",
            }
            federation = connect(**settings)
            threads.append(threading.Thread(target=serve, args=(federation, number, commands)))
            stack.callback(threads[-1].join)
            stack.callback(federation.close)
            threads[-1].start()
        with Control(fleet.control) as control:
            needed = {"min_clients": MAX_GROUP, "min_clients_to_aggregate": MAX_GROUP, "deadline_seconds": 240}
            table = {"step_seconds": 120, "step": STEP, "first_norm": 1.0}
            keys = {"weights": "uniform", "model_args": {"size": SIZE}, "secure_aggregation": table}
            job_id, events = run(control, **needed, **keys)
            wait_for(fleet, "the end of the job", lambda: list(events))
            (round_,) = control.rounds(job_id=job_id)
        state = Path(fleet.server.settings["state_dir"])
        assert (round_.phase, round_.delivered, round_.secure.step) == ("published", MAX_GROUP, "done")
        print(f"the round took {round_.seconds:.1f} s")
        before, after = (stored_model(state, version, SIZE) for version in (1, 2))
    step = np.float32(STEP / np.sqrt(SIZE))
    total = np.zeros(SIZE, np.int64)
    for number, command in commands.items():
        learned = (before + lesson_of(number, 1, SIZE)) - before
        dither = kept_secret(tmp_path / f"c{number:03}").derive(command, DITHER)
        total += to_integers(learned, command.secure, 1, dither=dither).integers
    np.testing.assert_allclose(after, before + np.float64(step) * total / MAX_GROUP, rtol=2e-7)
