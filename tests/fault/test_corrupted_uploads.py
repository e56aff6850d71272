"""Bytes that change on the way from a real fl-client to a real fl-server, or on the client's disk between two tries.

Nothing counts but what was trained, and the round gets it all the same: an update is sent again, at most three times.
"""

import itertools
import os
import random
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedring.ctl.process import stop_all
from tests.conftest import REPEATED
from tests.damage import ask, flip
from tests.fault.patience import Story
from tests.fleets import Control, Fleet, until_watching
from tests.forks import Daemon
from tests.lines import Change, Frames, Line, flipped
from tests.system.wire import WireClient, parameters, stop_jobs, vector_job
from tests.waiting import until

HERE = Path(__file__).parent
TRUSTED = ["fedring", "user_trainers"]
SETTINGS = {"trusted": TRUSTED, "keep_update_rounds": 100}
HASTY = {"no_progress_seconds": 1.5, "heartbeat_seconds": 1.0, "lost_after_seconds": 5.0}
SMALL, MIDDLE, LARGE = 1_000, 20_000, 600_000  # values of a model: its update goes in a message, a chunk, or three
ROUNDS = 4  # in which one bit is flipped each, in the ordinary suite and in each of the repeats of `make soak`
SEED = int(os.environ.get("FL_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 31)

_sizes = itertools.count()

_SAMPLES = re.compile(rb"\x1a[\x04\x0b]fp32(?:_sparse)?\x20[\x80-\xff]*[\x00-\x7f]\x28")
"""What is before the number of samples in a header."""

_ONES = np.ones(8, "<f4").tobytes()


class Damage:
    """Flips bits of uploads on their way; `uploads` tells over which connection each came, from 1 on.

    Args:
        plan: What is done to an upload, given its number and that of its connection, both from 1 on: the place
            of a bit that is flipped, "header" or "payload", or nothing.
    """

    def __init__(self, plan: Callable[[int, int], str]) -> None:
        self._plan = plan
        self._place = ""
        self.uploads: list[int] = []

    def upward(self, connection: int) -> Change:
        """As Line asks for it."""
        return Frames(lambda frame: self._change(connection, frame))

    def _change(self, connection: int, data: bytes) -> bytes:
        if header := _SAMPLES.search(data):  # an upload begins
            self.uploads.append(connection)
            self._place = self._plan(len(self.uploads), connection)
            if self._place == "header":
                return flipped(data, header.end(), 0b1000)
        if self._place == "payload" and (at := data.find(_ONES)) >= 0:
            self._place = ""
            return flipped(data, at, 0b1000)
        return data


def in_turn(places: Sequence[str]) -> Callable[[int, int], str]:
    """A plan: the first upload is damaged in the first place, and so on; those that follow are not."""
    return lambda number, connection: places[number - 1] if number <= len(places) else ""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One fl-server for all tests of this file."""
    with Fleet(tmp_path_factory.mktemp("corrupted"), SETTINGS, env={"PYTHONPATH": str(HERE)}) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One that waits for nobody who is silent: some flips have it wait for bytes that never come."""
    with Fleet(tmp_path_factory.mktemp("hasty"), SETTINGS | HASTY, env={"PYTHONPATH": str(HERE)}) as fleet:
        yield fleet


@pytest.fixture
def control(server: Fleet) -> Iterator[Control]:
    """flctl's connection; at the end no job is left."""
    with Control(server.control) as control:
        yield control
        stop_jobs(control)


@contextmanager
def clients(folder: Path, *addresses: str) -> Iterator[list[Daemon]]:
    """A real fl-client for each address of the server, called client-0 and so on."""
    (folder / "logs").mkdir()
    started: list[Daemon] = []
    try:
        for index, address in enumerate(addresses):
            name = f"client-{index}"
            settings = {"server": address, "client_id": name, "state_dir": str(folder / name), "trusted": TRUSTED}
            started.append(Daemon(name, "fedring.client.main", settings, folder / "logs" / f"{name}.log"))
            started[-1].env["PYTHONPATH"] = str(HERE)
            started[-1].start()
        yield started
    finally:
        stop_all(started, 15)


def job(size: int, **keys: Any) -> dict[str, Any]:
    """A job in each of whose rounds all clients learn to add 1 to each value, beginning with zeros, of one sample."""
    size += next(_sizes)  # a model of another size is another model: it begins anew
    return vector_job(model_args={"size": size}, trainer="user_trainers:steady", **keys)


def samples_of(fleet: Fleet, client: str, job_id: int) -> list[object]:
    """The numbers of samples of the client's accepted updates."""
    query = "SELECT num_samples FROM updates JOIN rounds USING (round) WHERE client_id = ? AND job_id = ?"
    return [number for (number,) in ask(fleet.directory / "state" / "server", query, client, job_id)]


def values(fleet: Fleet) -> set[float]:
    """The different values of the newest model."""
    with WireClient(fleet.listen) as wire:
        return set(parameters(wire).tolist())


ONCE = [["payload", ""], ["header", ""]]
TWICE = [["payload", "header", ""], ["header", "payload", ""], ["payload", "payload", ""]]


@pytest.mark.parametrize(("size", "rounds"), [(SMALL, [*ONCE, *TWICE, [""]]), (LARGE, [*ONCE, TWICE[0]])])
def test_a_damaged_update_is_sent_again_and_the_third_time_over_a_new_connection(
    server: Fleet, control: Control, tmp_path: Path, size: int, rounds: list[list[str]]
) -> None:
    damage = Damage(in_turn([*itertools.chain(*rounds)]))
    with Line(server.listen, damage.upward) as line, clients(tmp_path, line.address) as (client,):
        story = Story(server, control, job(size, rounds=len(rounds)))
        for _ in rounds:
            state = story.until("round_published").state
            assert (state.selected, state.delivered) == (1, 1)
        story.until("job_ended")
        assert damage.uploads == [1, 1, 1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4][: len(damage.uploads)]
        assert line.connections == damage.uploads[-1]
        until(lambda: line.open == min(3, line.connections))  # the session's, the newest, and the one before
    assert values(server) == {float(len(rounds))}
    assert samples_of(server, "client-0", story.job_id) == [1] * len(rounds)
    assert client.log.read_text().count("in session with") == 1


def test_after_a_damaging_connection_all_updates_take_the_new_one(
    server: Fleet, control: Control, tmp_path: Path
) -> None:
    damage = Damage(lambda number, connection: "payload" if connection == 1 else "")
    with Line(server.listen, damage.upward) as line, clients(tmp_path, line.address):
        story = Story(server, control, job(SMALL, rounds=3))
        story.until("job_ended")
    assert damage.uploads == [1, 1, 2, 2, 2]
    assert values(server) == {3.0}


def test_after_three_damaged_tries_a_client_gives_up_and_takes_part_in_the_next_round(
    server: Fleet, control: Control, tmp_path: Path
) -> None:
    damage = Damage(in_turn(["payload", "header", "payload"]))
    with Line(server.listen, damage.upward) as line, clients(tmp_path, line.address, server.listen) as (client, _):
        story = Story(server, control, job(SMALL, rounds=2, min_clients=2))
        failed = story.until("client_failed")
        assert (failed.client_id, "digest_mismatch" in failed.text) == ("client-0", True)
        states = [story.until("round_published").state for _ in range(2)]
        story.until("job_ended")
        assert line.connections == 2
    assert [(state.selected, state.delivered) for state in states] == [(2, 1), (2, 2)]
    assert damage.uploads == [1, 1, 2, 2]
    assert values(server) == {2.0}
    assert client.log.read_text().count("takes no update from this client: digest_mismatch") == 1


@pytest.mark.parametrize("place", [-100, 50], ids=["payload", "header"])
def test_an_update_that_was_damaged_on_the_clients_disk_is_trained_again(
    server: Fleet, control: Control, tmp_path: Path, place: int
) -> None:
    came, killed = threading.Event(), threading.Event()

    def plan(number: int, connection: int) -> str:
        if number == 2:
            came.set()
            killed.wait(60)
            raise OSError("nobody is there any more")
        return ""

    damage = Damage(plan)
    with Line(server.listen, damage.upward) as line, clients(tmp_path, line.address) as (client,):
        story = Story(server, control, job(SMALL, rounds=2, encoding="fp32_sparse", keep_ratio=0.25))
        assert came.wait(60)
        client.kill()
        killed.set()
        spool = tmp_path / "client-0" / "update"
        flip(spool, 8 * (place % spool.stat().st_size))
        client.start()
        states = [story.until("round_published").state for _ in range(2)]
        story.until("job_ended")
        until(lambda: not any(spool.read_bytes()[:8]))  # the client knows it, too
    assert [(state.selected, state.delivered) for state in states] == [(1, 1), (1, 1)]
    assert damage.uploads == ([1, 1, 2, 2] if place < 0 else [1, 1, 2])
    left_out = load_file(tmp_path / "client-0" / "residual.safetensors")["residual"]
    with WireClient(server.listen) as wire:
        np.testing.assert_array_equal(parameters(wire) + left_out, np.full(left_out.size, 2, np.float32))
    assert "Traceback" not in client.log.read_text()


@pytest.mark.soak
def test_a_line_that_damages_uploads_and_breaks_is_not_tried_for_ever(
    server: Fleet, control: Control, tmp_path: Path
) -> None:
    partial = server.directory / "state" / "server" / "partial"
    passed = 0

    def stored() -> int:
        return sum(path.stat().st_size for path in partial.iterdir())

    def plan(number: int, connection: int) -> str:
        nonlocal passed
        passed = 1 << 30 if stored() else 0  # what is gone on with arrives
        return "" if passed else "payload"

    class Breaking(Damage):
        def _change(self, connection: int, data: bytes) -> bytes:
            nonlocal passed
            data, passed = super()._change(connection, data), passed + len(data)
            if 3 << 19 < passed < 1 << 30:  # one chunk is through, and part of the next
                until(stored)
                raise OSError("the line breaks")
            return data

    damage = Breaking(plan)
    with Line(server.listen, damage.upward) as line, clients(tmp_path, line.address):
        story = Story(server, control, job(LARGE))
        assert "damaged" in story.until("client_failed").text
        story.until("job_ended")


@pytest.mark.parametrize(("size", "field"), [(SMALL, "number"), (SMALL, "path"), (MIDDLE, "path")])
def test_a_connection_that_a_damaged_head_has_made_useless_is_left(
    hasty: Fleet, tmp_path: Path, size: int, field: str
) -> None:
    """After a number that is too high, the calls to come are not noticed; a path is sent once, and then referred to."""
    heads = 0

    def change(frame: bytes) -> bytes:
        nonlocal heads
        heads += 1
        if heads != 3:  # after Join and Watch, an upload of the small model, or a download of the other
            return frame
        return flipped(frame, 7, 0x40) if field == "number" else flipped(frame, frame.index(b"Service/"), 1)

    with (
        Control(hasty.control) as control,
        Line(hasty.listen, lambda number: Frames(change, Frames.HEADS)) as line,
        clients(tmp_path, line.address) as (client,),
    ):
        story = Story(hasty, control, job(size, rounds=2))
        states = [story.until("round_published").state for _ in range(2)]
        story.until("job_ended")
        assert line.connections == 2
    assert [state.delivered for state in states] == [1, 1]
    assert values(hasty) == {2.0}
    assert client.log.read_text().count("in session with") == 1


@pytest.mark.parametrize("repeat", REPEATED)
def test_whatever_bit_is_flipped_what_counts_is_what_was_trained(hasty: Fleet, tmp_path: Path, repeat: int) -> None:
    rng = random.Random(f"{SEED} {repeat}")
    print(f"FL_TEST_SEED={SEED}")
    size = rng.choice([SMALL, MIDDLE])
    left = [-1]  # bytes to the one in which a bit is flipped next, of all that goes up; negative = none

    def change(data: bytes) -> bytes:
        left[0], at = left[0] - len(data), left[0]
        return flipped(data, at, 1 << rng.randrange(8)) if 0 <= at < len(data) else data

    with (
        Control(hasty.control) as control,
        Line(hasty.listen, lambda number: change) as line,
        clients(tmp_path, line.address),
    ):
        until_watching(control, 1)
        story = Story(hasty, control, job(size, rounds=ROUNDS))
        for _ in range(ROUNDS):
            left[0] = rng.randrange(rng.choice([1_000, 4 * size]))  # every other time in what comes before a payload
            story.until("round_published")
        story.until("job_ended")
        left[0] = -1
        assert values(hasty) == {float(ROUNDS)}
        assert samples_of(hasty, "client-0", story.job_id) == [1] * ROUNDS
