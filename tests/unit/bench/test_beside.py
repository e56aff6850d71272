"""The frame of the benchmark beside Flower and NVFlare: times, processes, kills, and the work itself."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.bench.beside import __main__ as beside
from tests.bench.beside import fleets, work
from tests.bench.beside.fleets import Run, Task, harm, kill_tree, measure, processes, wait_for
from tests.bench.lab.lines import lines
from tests.processes import lives, tree_of

from fedring.control.failure import Failure
from fedring.train.models import mnist_cnn

# A process with a child in a session of its own, which says its process id.
PARENT = (
    "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], "
    "start_new_session=True); print(p.pid, flush=True); p.wait()"
)


@pytest.fixture
def task(tmp_path: Path) -> Iterator[Task]:
    with lines(1, "") as there:
        yield Task("small", 1, 4, "", tmp_path, there)


def begin(task: Task, start: object) -> list[int]:
    """Start PARENT, and return both processes."""
    pid = start(task.server, [sys.executable, "-c", PARENT])  # type: ignore[operator]
    wait_for(task, lambda: (task.folder / "0.log").read_text() != "")
    return [pid, int((task.folder / "0.log").read_text())]


def test_all_that_was_started_ends_also_in_sessions_of_its_own(task: Task) -> None:
    with processes(task) as start:
        pids = begin(task, start)
        assert tree_of(pids[0]) == pids
        wait_for(task, lambda: fleets._tree_bytes(pids[1]) > 1_000_000, pids=[pids[0]])  # when its program has begun
        assert fleets._tree_bytes(pids[0]) > fleets._tree_bytes(pids[1]) > 1_000_000
    assert not lives(pids[0])
    wait_for(task, lambda: not lives(pids[1]))


def test_a_process_is_killed_with_all_that_it_has_started(task: Task) -> None:
    with processes(task) as start:
        pids = begin(task, start)
        kill_tree(pids[0])
        wait_for(task, lambda: not any(map(lives, pids)))
        with pytest.raises(Failure, match=r"did not end well"):
            wait_for(task, lambda: False, pids=[pids[0]])


def test_what_is_beyond_training_is_that_of_all_rounds_but_the_first(task: Task) -> None:
    rounds = [
        {"began": 103.0, "ended": 110.0, "train": 2.0, "updates": 1},
        {"began": 110.0, "ended": 113.5, "train": 3.0, "updates": 1},
    ]

    @contextmanager
    def system(given: Task) -> Iterator[Run]:
        yield Run(100.0, os.getpid(), [os.getpid()], lambda: rounds, lambda: True, dict, lambda: None)

    found = measure(system, task)
    assert (found.first, found.beyond, found.train) == (8.0, [0.5], [2.0, 3.0])
    assert (found.wire, found.accuracy) == (None, None)


def test_a_harm_is_timed_until_the_next_round_has_ended(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "_TRAINED_SECONDS", 0.0)
    monkeypatch.setattr(fleets, "_MOST_HARM_SECONDS", 0.3)
    rounds: list[dict[str, float]] = [{"began": 0.0, "ended": 1.0}, {"began": 1.0, "ended": 2.0}, {"began": 2.0}]

    @contextmanager
    def system(given: Task) -> Iterator[Run]:
        with processes(given) as start:
            pids = begin(given, start)

            def restart() -> None:
                wait_for(given, lambda: not any(map(lives, pids)))
                rounds.append({"began": 3.0, "ended": time.time() + 5.0, "updates": 1})

            yield Run(0.0, pids[0], [pids[0]], lambda: rounds, lambda: False, dict, restart)

    assert harm(system, task, "client").seconds is None  # nothing ends any more
    found = harm(system, task, "server")
    assert found.seconds == pytest.approx(5.0, abs=1.0)
    assert found.updates == 1


def test_all_systems_train_the_same_network_on_the_samples_of_their_part() -> None:
    mine = {name: value.shape for name, value in work.network("mnist").state_dict().items()}
    assert mine == {name: value.shape for name, value in mnist_cnn().state_dict().items()}
    vector = work.network("small")
    first, second = next(vector.parameters()).detach()[:2].tolist()
    assert work.train("small", vector, "", 0, 1, 1)[0] == 1
    assert next(vector.parameters()).detach()[:2].tolist() == pytest.approx([first + 1.0, second])


def test_a_round_of_the_work_learns_mnist(data_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "_SUBSET", 1280)
    model = work.network("mnist")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    samples, seconds = work.train("mnist", model, str(data_root), 1, 2, 1)
    assert samples == 1280
    assert seconds > 0
    assert work.accuracy(before, str(data_root)) < 0.3
    after = {name: np.asarray(value) for name, value in model.state_dict().items()}
    assert work.accuracy(after, str(data_root)) > 0.5
    assert torch.equal(before["fc2.bias"], work.network("mnist").state_dict()["fc2.bias"])


@pytest.mark.soak  # it installs Flower and NVFlare
@pytest.mark.timeout(1800)
def test_all_three_run_the_smallest_work(tmp_path: Path) -> None:
    words = ["--data-root", str(tmp_path), "--cells", "small", "--turns", "1", "--rounds", "2", "--out", str(tmp_path)]
    beside.main(words)
    assert (tmp_path / "beside.json").exists()
