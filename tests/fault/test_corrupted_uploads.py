"""Bytes that change between a real fl-client and a real fl-server, or on the client's disk between two attempts.

No damaged update is accepted, and the round still gets the right one: a client sends an update up to three times.
"""

import itertools
import random
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedring.ctl.process import stop_all
from tests.conftest import REPEATED, SEED
from tests.damage import ask, flip
from tests.fault.faulty_fleet import StartedJob
from tests.fleets import Control, Fleet, until_watching
from tests.forks import Daemon
from tests.kept import kept_residual
from tests.proxy import Change, FrameChange, Proxy, flip_bits
from tests.system.wire import WireClient, parameters, stop_jobs, vector_job
from tests.waiting import until

HERE = Path(__file__).parent
TRUSTED = ["fedring", "user_trainers"]
SETTINGS = {"trusted": TRUSTED, "keep_update_rounds": 100}
IMPATIENT = {"no_progress_seconds": 1.5, "heartbeat_seconds": 1.0, "lost_after_seconds": 5.0}
SMALL, MIDDLE, LARGE = 1_000, 20_000, 600_000  # values of a model whose update is one message, one chunk, or three
ROUNDS = 4  # with one flipped bit each, in `make test` and in each repeat of `make soak`

_sizes = itertools.count()

_SAMPLES = re.compile(rb"\x1a[\x04\x0b]fp32(?:_sparse)?\x20[\x80-\xff]*[\x00-\x7f]\x28")
"""Matches the bytes before the number of samples in a header."""

_ONES = np.ones(8, "<f4").tobytes()


class Damage:
    """Flips bits of uploads on their way to the server; `uploads` holds the number of each upload's connection.

    Args:
        plan: called with the number of an upload and the number of its connection, both from 1 on; returns where to
            flip a bit, "header" or "payload", or "" for nowhere.
    """

    def __init__(self, plan: Callable[[int, int], str]) -> None:
        self._plan = plan
        self._place = ""
        self.uploads: list[int] = []

    def upward(self, connection: int) -> Change:
        """Return the change for a connection, for `Proxy`."""
        return FrameChange(lambda frame: self._change(connection, frame))

    def _change(self, connection: int, data: bytes) -> bytes:
        if header := _SAMPLES.search(data):  # an upload begins
            self.uploads.append(connection)
            self._place = self._plan(len(self.uploads), connection)
            if self._place == "header":
                return flip_bits(data, header.end(), 0b1000)
        if self._place == "payload" and (at := data.find(_ONES)) >= 0:
            self._place = ""
            return flip_bits(data, at, 0b1000)
        return data


def damage_in_turn(places: Sequence[str]) -> Callable[[int, int], str]:
    """Return a plan that damages the n-th upload at the n-th of `places`, and no later upload."""
    return lambda number, connection: places[number - 1] if number <= len(places) else ""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Start one fl-server for all tests of this file."""
    with Fleet(tmp_path_factory.mktemp("corrupted"), SETTINGS, env={"PYTHONPATH": str(HERE)}) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Start a server with short timeouts: after some flips it waits for bytes that never come."""
    with Fleet(tmp_path_factory.mktemp("impatient"), SETTINGS | IMPATIENT, env={"PYTHONPATH": str(HERE)}) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Start a server that soon gives up a call whose bytes do not come, but not while this machine stands still."""
    settings = SETTINGS | {"no_progress_seconds": 6.0, "heartbeat_seconds": 1.0}
    with Fleet(tmp_path_factory.mktemp("waiting"), settings, env={"PYTHONPATH": str(HERE)}) as fleet:
        yield fleet


@pytest.fixture
def control(server: Fleet) -> Iterator[Control]:
    """Connect to the control service; stop the jobs that the test has left."""
    with Control(server.control) as control:
        yield control
        stop_jobs(control)


@contextmanager
def clients(folder: Path, *addresses: str) -> Iterator[list[Daemon]]:
    """Start an fl-client for each of these addresses of the server, called client-0 and so on."""
    (folder / "logs").mkdir()
    daemons: list[Daemon] = []
    try:
        for index, address in enumerate(addresses):
            name = f"client-{index}"
            settings = {"server": address, "client_id": name, "state_dir": str(folder / name), "trusted": TRUSTED}
            daemons.append(Daemon(name, "fedring.client.main", settings, folder / "logs" / f"{name}.log"))
            daemons[-1].env["PYTHONPATH"] = str(HERE)
            daemons[-1].start()
        yield daemons
    finally:
        stop_all(daemons, 15)


def job(size: int, **keys: Any) -> dict[str, Any]:
    """Return a job that starts from zeros, and in each round of which each client adds 1 to all values."""
    size += next(_sizes)  # another size is another model, so each job starts from zeros
    return vector_job(model_args={"size": size}, trainer="user_trainers:steady", **keys)


def samples_of(fleet: Fleet, client: str, job_id: int) -> list[object]:
    """Return the numbers of samples of the client's accepted updates."""
    query = "SELECT num_samples FROM updates JOIN rounds USING (round) WHERE client_id = ? AND job_id = ?"
    return [number for (number,) in ask(fleet.directory / "state" / "server", query, client, job_id)]


def values(fleet: Fleet) -> set[float]:
    """Return the distinct values of the newest model."""
    with WireClient(fleet.listen) as wire:
        return set(parameters(wire).tolist())


ONCE = [["payload", ""], ["header", ""]]
TWICE = [["payload", "header", ""], ["header", "payload", ""], ["payload", "payload", ""]]


@pytest.mark.parametrize(("size", "rounds"), [(SMALL, [*ONCE, *TWICE, [""]]), (LARGE, [*ONCE, TWICE[0]])])
def test_a_damaged_update_is_sent_again_and_for_its_third_attempt_over_a_new_connection(
    server: Fleet, control: Control, tmp_path: Path, size: int, rounds: list[list[str]]
) -> None:
    damage = Damage(damage_in_turn([*itertools.chain(*rounds)]))
    with Proxy(server.listen, damage.upward) as proxy, clients(tmp_path, proxy.address) as (client,):
        started = StartedJob(server, control, job(size, rounds=len(rounds)))
        for _ in rounds:
            state = started.until("round_published").state
            assert (state.selected, state.delivered) == (1, 1)
        started.until("job_ended")
        assert damage.uploads == [1, 1, 1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4][: len(damage.uploads)]
        assert proxy.connections == damage.uploads[-1]
        until(
            lambda: proxy.open == min(3, proxy.connections)
        )  # those of the session, of the newest upload, and of the one before
    assert values(server) == {float(len(rounds))}
    assert samples_of(server, "client-0", started.job_id) == [1] * len(rounds)
    assert client.log.read_text().count("in session with") == 1


def test_later_updates_do_not_return_to_a_connection_that_damaged_one(
    server: Fleet, control: Control, tmp_path: Path
) -> None:
    damage = Damage(lambda number, connection: "payload" if connection == 1 else "")
    with Proxy(server.listen, damage.upward) as proxy, clients(tmp_path, proxy.address):
        started = StartedJob(server, control, job(SMALL, rounds=3))
        started.until("job_ended")
    assert damage.uploads == [1, 1, 2, 2, 2]
    assert values(server) == {3.0}


def test_a_client_gives_up_after_three_damaged_attempts_and_takes_part_in_the_next_round(
    server: Fleet, control: Control, tmp_path: Path
) -> None:
    damage = Damage(damage_in_turn(["payload", "header", "payload"]))
    with Proxy(server.listen, damage.upward) as proxy, clients(tmp_path, proxy.address, server.listen) as (client, _):
        started = StartedJob(server, control, job(SMALL, rounds=2, min_clients=2))
        failed = started.until("client_failed")
        assert (failed.client_id, "digest_mismatch" in failed.text) == ("client-0", True)
        states = [started.until("round_published").state for _ in range(2)]
        started.until("job_ended")
        assert proxy.connections == 2
    assert [(state.selected, state.delivered) for state in states] == [(2, 1), (2, 2)]
    assert damage.uploads == [1, 1, 2, 2]
    assert values(server) == {2.0}
    assert client.log.read_text().count("takes no update from this client: digest_mismatch") == 1


@pytest.mark.parametrize("place", [-100, 50], ids=["payload", "header"])
def test_an_update_that_was_damaged_on_the_clients_disk_is_trained_again(
    server: Fleet, control: Control, tmp_path: Path, place: int
) -> None:
    second_upload, killed = threading.Event(), threading.Event()

    def plan(number: int, connection: int) -> str:
        if number == 2:
            second_upload.set()
            killed.wait(60)
            raise OSError("the client was killed")
        return ""

    damage = Damage(plan)
    with Proxy(server.listen, damage.upward) as proxy, clients(tmp_path, proxy.address) as (client,):
        started = StartedJob(server, control, job(SMALL, rounds=2, encoding="fp32_sparse", keep_ratio=0.25))
        assert second_upload.wait(60)
        client.kill()
        killed.set()
        spool = tmp_path / "client-0" / "update"
        flip(spool, 8 * (place % spool.stat().st_size))
        client.start()
        states = [started.until("round_published").state for _ in range(2)]
        started.until("job_ended")
        until(lambda: not any(spool.read_bytes()[:8]))  # the client has heard of its acceptance
    assert [(state.selected, state.delivered) for state in states] == [(1, 1), (1, 1)]
    assert damage.uploads == ([1, 1, 2, 2] if place < 0 else [1, 1, 2])
    residual = kept_residual(tmp_path / "client-0")
    assert residual is not None
    with WireClient(server.listen) as wire:
        np.testing.assert_array_equal(parameters(wire) + residual, np.full(residual.size, 2, np.float32))
    assert "Traceback" not in client.log.read_text()


@pytest.mark.soak
def test_a_client_gives_up_on_a_connection_that_keeps_damaging_and_breaking(
    server: Fleet, control: Control, tmp_path: Path
) -> None:
    partial = server.directory / "state" / "server" / "partial"
    passed = 0

    def stored() -> int:
        return sum(path.stat().st_size for path in partial.iterdir())

    def plan(number: int, connection: int) -> str:
        nonlocal passed
        passed = 1 << 30 if stored() else 0  # resumed uploads arrive undamaged
        return "" if passed else "payload"

    class Breaking(Damage):
        def _change(self, connection: int, data: bytes) -> bytes:
            nonlocal passed
            data, passed = super()._change(connection, data), passed + len(data)
            if 9 << 19 < passed < 1 << 30:  # four chunks, which are written together, and part of the next one
                until(stored)
                raise OSError("the connection breaks")
            return data

    damage = Breaking(plan)
    with Proxy(server.listen, damage.upward) as proxy, clients(tmp_path, proxy.address):
        started = StartedJob(server, control, job(1_300_000))
        assert "damaged" in started.until("client_failed").text
        started.until("job_ended")


@pytest.mark.parametrize(("size", "field"), [(SMALL, "number"), (SMALL, "path"), (MIDDLE, "path")])
def test_a_client_leaves_a_connection_that_damaged_headers_have_made_useless(
    waiting: Fleet, tmp_path: Path, size: int, field: str
) -> None:
    """After a damaged stream number, the server ignores later calls, whose numbers are lower.

    A damaged path stays in the header table of HTTP/2, to which later calls refer.
    """
    calls = 0

    def change(frame: bytes) -> bytes:
        nonlocal calls
        calls += 1
        if calls != 3:  # after Join and Watch: an upload of the small model, or a download of the other
            return frame
        return flip_bits(frame, 7, 0x40) if field == "number" else flip_bits(frame, frame.index(b"Service/"), 1)

    with (
        Control(waiting.control) as control,
        Proxy(waiting.listen, lambda number: FrameChange(change, FrameChange.HEADERS)) as proxy,
        clients(tmp_path, proxy.address) as (client,),
    ):
        started = StartedJob(waiting, control, job(size, rounds=2))
        states = [started.until("round_published").state for _ in range(2)]
        started.until("job_ended")
        assert proxy.connections == 2
    assert [state.delivered for state in states] == [1, 1]
    assert values(waiting) == {2.0}
    assert client.log.read_text().count("in session with") == 1


@pytest.mark.parametrize("repeat", REPEATED)
def test_whatever_bit_is_flipped_the_model_has_the_trained_values(
    impatient: Fleet, tmp_path: Path, repeat: int
) -> None:
    rng = random.Random(f"{SEED} {repeat}")
    size = rng.choice([SMALL, MIDDLE])
    left = [-1]  # bytes that clients send before the next byte with a flipped bit; negative for none

    def change(data: bytes) -> bytes:
        left[0], at = left[0] - len(data), left[0]
        return flip_bits(data, at, 1 << rng.randrange(8)) if 0 <= at < len(data) else data

    with (
        Control(impatient.control) as control,
        Proxy(impatient.listen, lambda number: change) as proxy,
        clients(tmp_path, proxy.address),
    ):
        until_watching(control, 1)
        started = StartedJob(impatient, control, job(size, rounds=ROUNDS))
        for _ in range(ROUNDS):
            left[0] = rng.randrange(rng.choice([1_000, 4 * size]))  # half of the flips hit what precedes the payload
            started.until("round_published")
        started.until("job_ended")
        left[0] = -1
        assert values(impatient) == {float(ROUNDS)}
        assert samples_of(impatient, "client-0", started.job_id) == [1] * ROUNDS
