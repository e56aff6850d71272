"""Workers are killed and frozen while they train, and the others go on: docs/examples/rejoin.py as real processes."""

import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.forks import Fork
from tests.ports import free_port
from tests.system.ring_scripts import generations, ranks

SECONDS = 120.0
SIZE = 3
KILLS = 3
REPEATS = int(os.environ.get("FEDRING_REPEATS", "1"))
PATH = os.pathsep.join(str(ROOT / part) for part in ("docs/examples", "client", "common", "protos"))


class Program:
    """A process, and the lines that it has printed so far, each with the time when it came."""

    def __init__(self, module: str, *arguments: str, **variables: str) -> None:
        environment = {"PATH": os.defpath, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "ERROR"}
        self.process = Fork(
            module, arguments, env=environment | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self.lines: list[str] = []
        self.more = threading.Condition(threading.RLock())
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, pattern: str, *, after: int = 0) -> re.Match[str]:
        """Wait for a line with the pattern, not before line number `after`."""
        deadline = time.monotonic() + SECONDS
        with self.more:
            while True:
                for line in self.lines[after:]:
                    if found := re.search(pattern, line):
                        return found
                assert self.more.wait(deadline - time.monotonic()), (pattern, self.lines[-20:])

    def wait_for_step(self, step: int) -> None:
        """Wait until it has finished this step or a later one."""
        deadline = time.monotonic() + SECONDS
        with self.more:
            while self.step < step:
                assert self.more.wait(deadline - time.monotonic()), (step, self.lines[-20:])

    @property
    def step(self) -> int:
        """The last step that it has finished."""
        with self.more:
            steps = [line for line in self.lines if line.startswith("step")]
        return int(steps[-1].split()[1]) if steps else 0

    def last_step_before(self, text: str) -> int:
        """Return the last step that it had finished when it first printed the text."""
        with self.more:
            first = next(number for number, line in enumerate(self.lines) if text in line)
            return int(next(line for line in reversed(self.lines[:first]) if line.startswith("step")).split()[1])

    def digests(self) -> dict[int, str]:
        """Return the digest of the parameters after each step of the generation that it is in."""
        with self.more:
            lines = list(self.lines)
        begin = max(number for number, line in enumerate(lines) if line.startswith("goes on"))
        words = [line.split() for line in lines[begin:] if line.startswith("step")]
        return {int(step): digest for _, step, digest, *_ in words}

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            with self.more:
                self.lines.append(line.decode().rstrip())
                self.more.notify_all()


class Training:
    """Workers of the example, and the store where they meet."""

    def __init__(self, ended: ExitStack, steps: int, *, min_size: int = SIZE, pause: float = 0.05) -> None:
        self._ended, self._steps, self._min_size, self._pause = ended, steps, min_size, pause
        self.store = self._program("fedring.ctl.main", "store", "--listen", "127.0.0.1:0")
        self.port = self.store.wait_for(r"listens on 127\.0\.0\.1:(\d+)")[1]
        self.workers = [self.start(slot) for slot in range(SIZE)]

    def start(self, slot: int, module: str = "rejoin") -> Program:
        """Start the worker of a slot, or another one in its place."""
        return self._program(
            module,
            str(self._steps),
            str(self._min_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=self.port,
            RANK=str(slot),
            WORLD_SIZE=str(SIZE),
            LAST_CALL_SECONDS="2",
            PAUSE_SECONDS=str(self._pause),
        )

    def _program(self, module: str, *arguments: str, **variables: str) -> Program:
        program = Program(module, *arguments, **variables)
        self._ended.callback(program.end)
        return program


@pytest.fixture
def ended() -> Iterator[ExitStack]:
    """Return a stack of callbacks that are called when the test ends."""
    with ExitStack() as stack:
        yield stack


def check_all_done(workers: list[Program], steps: int) -> None:
    """Assert that all workers end, with all steps done and bit for bit the same parameters."""
    found = {worker.wait_for(r"^done (\d+) (\w+)").groups() for worker in workers}
    assert len(found) == 1
    assert int(found.pop()[0] or "") == steps
    assert [worker.process.wait(SECONDS) for worker in workers] == [0] * len(workers)


def check_every_step(workers: list[Program], steps: int) -> None:
    """Assert that the workers have together printed every step."""
    printed = {int(line.split()[1]) for worker in workers for line in worker.lines if line.startswith("step")}
    assert printed == set(range(1, steps + 1))


@pytest.mark.parametrize(
    "kills", [KILLS, pytest.param(20, marks=pytest.mark.soak)] if REPEATS > 1 else [KILLS], ids=lambda n: f"{n} kills"
)
def test_training_goes_on_from_the_last_step_after_each_kill(ended: ExitStack, kills: int) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    choose = random.Random(seed)
    steps = 40 * kills + 120  # the workers are far from the end whenever this process is slow to kill one
    training = Training(ended, steps)
    workers, dead = training.workers, []
    slots = [0, *(choose.randrange(SIZE) for _ in range(kills - 1))]
    for number, slot in enumerate(slots):
        for worker in workers:
            worker.wait_for_step(40 * number + choose.randrange(5, 15))
        others = [worker for worker in workers if worker is not workers[slot]]
        seen = [len(worker.lines) for worker in others]
        killed = time.time()
        workers[slot].process.kill()
        dead.append(workers[slot])
        workers[slot] = training.start(slot)
        step, at = 0, 0.0
        for worker, after in zip(others, seen, strict=True):
            step = int(worker.wait_for(r"goes on at step (\d+)", after=after)[1])
            at = float(worker.wait_for(rf"^step {step + 1} \w+ at (\S+)", after=after)[1])
        assert step == max(worker.last_step_before(f"goes on at step {step}") for worker in others)
        print(f"slot {slot} killed: step {step + 1} finished {at - killed:.2f} s after the kill")
    check_all_done(workers, steps)
    check_every_step([*workers, *dead], steps)
    training.store.process.terminate()
    assert training.store.process.wait(SECONDS) == 0


def test_the_others_go_on_without_a_worker_and_take_a_new_one_in_later(ended: ExitStack) -> None:
    training = Training(ended, 1_000_000, min_size=2)
    first, second, third = training.workers
    first.wait_for_step(5)
    third.process.kill()
    for worker in (first, second):
        worker.wait_for(r"goes on at step \d+ as rank \d of 2")
    new = training.start(2)
    step = int(new.wait_for(r"goes on at step (\d+) as rank 2 of 3")[1])
    assert step > 5
    for worker in (first, second, new):
        worker.wait_for_step(step + 10)
    digests = [worker.digests()[step + 10] for worker in (first, second, new)]
    assert len(set(digests)) == 1


def test_a_frozen_worker_that_wakes_does_not_disturb_those_that_went_on(ended: ExitStack) -> None:
    training = Training(ended, 120)
    first, frozen, third = training.workers
    first.wait_for_step(5)
    frozen.process.send_signal(signal.SIGSTOP)
    new = training.start(1)
    step = int(new.wait_for(r"goes on at step (\d+) as rank \d of 3")[1])
    frozen.process.send_signal(signal.SIGCONT)
    frozen.wait_for("^lost at step")
    check_all_done([first, new, third], 120)
    assert frozen.step <= step


def test_a_worker_whose_group_fails_while_it_takes_over_the_state_has_all_of_it_or_nothing(ended: ExitStack) -> None:
    training = Training(ended, 1_000_000)
    training.workers[1].wait_for_step(5)
    training.workers[0].process.kill()
    new = training.start(0, "tests.system.ring_scripts.torn")
    step = int(new.wait_for(r"goes on at step (\d+) as rank 0 of 3")[1])
    brought = new.wait_for(r"^brings (\w+)")[1]
    others = [line for worker in training.workers for line in worker.lines if line.startswith(f"step {step} ")]
    assert brought in {line.split()[2] for line in others}


@pytest.mark.parametrize("kills", [4, pytest.param(60, marks=pytest.mark.soak)], ids=lambda n: f"{n} kills")
def test_nobody_goes_back_a_step_whenever_others_are_killed(ended: ExitStack, kills: int) -> None:
    """Workers die at any moment: before they have come, while the group forms, while they share the state."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    choose = random.Random(seed)
    training = Training(ended, 1_000_000, pause=0.01)
    workers = list(training.workers)
    workers[2].wait_for_step(1)  # this one stays, and with it the state
    everybody = list(workers)
    for _ in range(kills):
        threading.Event().wait(choose.choice([0.0, choose.uniform(0, 1), choose.uniform(0, 4)]))  # any moment
        slot = choose.randrange(2)
        workers[slot].process.kill()
        workers[slot] = training.start(slot)
        everybody.append(workers[slot])
    for worker in workers:
        worker.wait_for_step(1)
    last = max(worker.step for worker in workers) + 10
    for worker in workers:
        worker.wait_for_step(last)
    assert len({worker.digests()[last] for worker in workers}) == 1
    for worker in everybody:
        with worker.more:
            steps = [int(line.split()[1]) for line in worker.lines if line.startswith("step")]
        assert all(before < after for before, after in pairwise(steps)), steps


def test_a_group_of_init_process_group_forms_again_on_its_own_store(tmp_path: Path) -> None:
    found = ranks.run(generations.rejoin_after_init, 2, tmp_path)
    assert found == [{"rank": 1, "shared": 6.0}, {"rank": 0, "shared": 6.0}]  # the one with more steps is rank 0


def test_a_worker_says_that_the_store_is_gone_with_the_rank_that_hosted_it(tmp_path: Path) -> None:
    host, other = ranks.run(partial(generations.lose_the_store, port=free_port()), 2, tmp_path, backend="")
    assert host["kind"] == ""
    assert other["kind"] == "RingError"
    assert "is gone: if a worker hosted it" in other["text"]


@pytest.mark.parametrize("count", [8, pytest.param(20, marks=pytest.mark.soak)])
def test_old_generations_leave_nothing_behind(count: int, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    body = partial(generations.leftovers, folder=str(folder), generations=count)
    for held in ranks.run(body, 2, tmp_path / "run", backend=""):
        most = {name: max(one[name] for one in held) for name in held[0]}
        assert (most["Endpoint"], most["World"], most["RingProcessGroup"]) == (1, 1, 2), most
        for name in ("files", "threads", "python_threads"):  # a second stream more or less, and its threads
            assert held[-1][name] <= max(one[name] for one in held[:4]) + 8, held
        assert most["files"] < 60, most
