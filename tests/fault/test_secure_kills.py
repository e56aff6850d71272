"""Rounds with secure aggregation whose clients and server are killed again and again at random moments.

Every published model is recomputed from what its clients have learned, and nothing leaves a client in two ways: no mask
covers two updates, and no key seals two texts.
"""

import random
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from fedring.client.policy.secret import DITHER, ClientSecret
from fedring.secure.levels import open_blocks, to_integers
from fedring.simulation import client_secret
from fedring.v1 import federation_pb2 as pb
from tests.call_proxy import CallProxy
from tests.conftest import SEED
from tests.damage import ask
from tests.fault.faulty_fleet import job_end, wait_for
from tests.fault.random_kills import KEEP_ALL, wait
from tests.fault.residuals import stored_model
from tests.fault.secure_fleet import SECRET, SecureFleet, secure_job
from tests.fault.secure_record import Record
from tests.fault.user_trainers import lesson_of
from tests.fleets import Control
from tests.waiting import until

CLIENTS = 5  # the threshold is 4
SIZE = 160_000  # its masked values are too large for a row of the database, and go in parts
LONGEST = 1.0  # seconds until the next kill, at most
LAST = 2  # rounds without kills at the end

Values = NDArray[np.float32]


class RecordedFleet(SecureFleet):
    """A fleet of which a test records all that its clients say."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, CLIENTS, KEEP_ALL)
        self.records = [Record() for _ in self.clients]
        self._stack = ExitStack()

    def start(self) -> None:
        for folder in ("logs", "state"):
            (self.directory / folder).mkdir(parents=True, exist_ok=True)
        self.start_server()
        for client, record in zip(self.clients, self.records, strict=True):
            proxy = self._stack.enter_context(CallProxy(self.listen, record.upward, record.downward))
            client.settings["server"] = proxy.address
            client.start()

    def stop(self) -> None:
        super().stop()
        self._stack.close()

    def disturb(self, rng: random.Random) -> None:
        """Kill a client or the server at a random moment, or both of them, and start them again."""
        wait(rng.uniform(0, LONGEST))
        drawn, index = rng.random(), rng.randrange(CLIENTS)
        if drawn < 0.75:
            self.kill(index)
        if drawn > 0.6:
            self.server.kill()
        if 0.6 < drawn < 0.75:
            self._lose_update(index)
        if drawn > 0.6:
            self.start_server()
        if drawn < 0.75:
            wait(rng.uniform(0, 0.2))
            self.clients[index].start()

    def _lose_update(self, index: int) -> None:
        """Remove the update that waits in a client, unless the server has it; neither of them runs."""
        newest = "SELECT 1 FROM updates WHERE client_id = ? AND round = (SELECT max(round) FROM rounds)"
        if not ask(self.state, newest, f"client-{index}"):
            (self.folders[index] / "update").unlink(missing_ok=True)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [6, pytest.param(100, marks=[pytest.mark.soak, pytest.mark.timeout(1200)])])
def test_nothing_is_said_in_two_ways_and_every_model_is_right_however_often_daemons_are_killed(
    tmp_path: Path, kills: int
) -> None:
    rng = random.Random(SEED)
    with RecordedFleet(tmp_path) as fleet:
        keys = {"model_args": {"size": SIZE}, "rounds": 10_000, "max_abandoned": 1000}
        with Control(fleet.control) as control:
            job_id = control.start_job(secure_job(CLIENTS, **keys)).job_id
        for _ in range(kills):
            fleet.disturb(rng)
        with Control(fleet.control) as control:
            enough = control.job(job_id).rounds_done + LAST
            wait_for(fleet, "the last rounds", lambda: until(lambda: control.job(job_id).rounds_done >= enough))
            control.stop_job(job_id)
            job_end(fleet, control, job_id)
        fleet.wait_until_forgotten()
        fleet.stop()
        logs = [daemon.log.read_text() for daemon in (fleet.server, *fleet.clients)]
        records, state = fleet.records, fleet.state
    assert not any("Traceback" in log for log in logs)
    updates = sum(record.check() for record in records)
    published = check_models(state, {number: at for record in records for number, at in record.commands.items()})
    assert ask(state, "SELECT round FROM secure_messages UNION SELECT round FROM secure_rounds") == []
    lost = sum(log.count("lost_masked_update") for log in logs[:1])
    repeated = sum(record.repeated for record in records)
    print(f"{kills} kills, {published} models, {updates} updates, {repeated} messages repeated, {lost} updates lost")


def check_models(state: Path, commands: dict[int, pb.TrainCmd]) -> int:
    """Assert that each model is the one before it, plus the mean of what its clients have learned; return how many."""
    left = [np.zeros(SIZE, np.float32) for _ in range(CLIENTS)]
    found = 0
    for number, base, version in ask(state, "SELECT round, base_version, model_version FROM rounds ORDER BY round"):
        assert isinstance(number, int)
        assert isinstance(base, int)
        assert isinstance(version, int)
        names = [str(name) for (name,) in ask(state, "SELECT client_id FROM updates WHERE round = ?", number)]
        before, total = stored_model(state, base, SIZE), np.zeros(SIZE, np.float64)
        for name in names:
            secure, index = commands[number].secure, int(name.removeprefix("client-"))
            start: Values = before + left[index]  # with blocks, training begins there, and its change is rounded there
            values: Values = (start + lesson_of(index, number, SIZE)) - start + left[index]
            blocks = open_blocks(secure, SIZE)
            dither = ClientSecret(partial(client_secret, SECRET, name)).derive(commands[number], DITHER)
            levels = to_integers(values, secure, 1, dither=dither).integers
            left[index] = values
            places = (blocks.indices[:, None] * blocks.block + np.arange(blocks.block)).reshape(-1)[: blocks.count]
            total[places] += levels * np.repeat(blocks.scales, blocks.block)[: blocks.count].astype(np.float64)
        if version:
            assert len(names) >= CLIENTS - 1
            expected = before + total / len(names)
            # A value that returns to 0 is 0 here and 1e-17 there: a mean is a product with 1 / clients on the server.
            stored = stored_model(state, version, SIZE)
            np.testing.assert_allclose(stored, expected, rtol=2e-7, atol=1e-12, err_msg=str(number))
            found += 1
    return found
