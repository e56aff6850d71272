"""Calls, graphs and optimizers over several processes, each of which is a rank."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import forks
from tests.conftest import ROOT
from tests.pages import Page
from tests.ports import free_port
from tests.system.ring_scripts import ranks, remote_calls

NOTICED_WITHIN = 30.0  # seconds; it takes less than a tenth of one unless the machine is busy
SIGKILL = -9
EXAMPLES = ROOT / "docs" / "examples"


def test_two_owners_train_as_one_process(tmp_path: Path) -> None:
    losses, *owned = ranks.run(remote_calls.train_stages, 3, tmp_path)
    for kind, both in remote_calls.stages().items():
        alone = nn.Sequential(*both)
        optimizer = getattr(torch.optim, kind)(alone.parameters(), **remote_calls.KINDS[kind])
        for seed, found in enumerate(losses[kind]):
            loss = (alone(remote_calls.batch(seed)) - 1).square().mean()
            assert found == pytest.approx(loss.item(), abs=1e-6)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for stage, found in zip(alone, owned, strict=True):
            assert found[kind] == pytest.approx(remote_calls.flat(stage), abs=1e-6)


def test_four_callers_at_once_step_one_owner_each_with_its_own_gradients(tmp_path: Path) -> None:
    sums, *wrong = ranks.run(remote_calls.step_one_owner, 1 + remote_calls.CALLERS, tmp_path)
    assert wrong == [[]] * remote_calls.CALLERS
    turns = range(remote_calls.TURNS)
    assert sums == [-sum(100 * rank + turn for rank in range(1, 5) for turn in turns)] * 2


@pytest.mark.parametrize("local_transport", ["true", "false"])
def test_all_callers_name_an_owner_that_is_killed_in_the_middle_of_a_backward_pass(
    local_transport: str, tmp_path: Path
) -> None:
    body = partial(remote_calls.lose_an_owner, size=4, folder=tmp_path, owner=2)
    environment = partial(with_variables, {"FEDRING_RING_LOCAL_TRANSPORT": local_transport})
    codes = forks.call_all([partial(environment, partial(body, rank)) for rank in range(4)], seconds=120)
    assert codes == [0, 0, SIGKILL, 0]
    killed = float((tmp_path / "killed").read_text())
    for rank in (0, 1, 3):
        error = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (error["kind"], error["rank"]) == ("PeerLost", 2), error
        assert re.match(r"rank 2 is lost: ", error["text"])
        print(f"rank {rank} has raised after {error['at'] - killed:.3f} s")
        assert error["at"] - killed < NOTICED_WITHIN


def with_variables(variables: dict[str, str], body: Any) -> None:
    os.environ.update(variables)
    body()


def test_what_a_caller_had_is_freed_when_it_is_lost(tmp_path: Path) -> None:
    body = partial(remote_calls.lose_a_caller, size=2, folder=tmp_path)
    codes = forks.call_all([partial(body, rank) for rank in range(2)], seconds=120)
    assert codes == [SIGKILL, 0]
    found = json.loads((tmp_path / "1.json").read_text())
    assert found["sizes"] == [1, 1, 0, 0]
    assert (found["kind"], found["rank"]) == ("PeerLost", 0)


def test_the_script_with_which_the_page_begins_trains(tmp_path: Path) -> None:
    language, script = Page(ROOT / "docs" / "remote.md").blocks[0]
    assert language == "python"
    (tmp_path / "train.py").write_text(script)
    body = partial(remote_calls.run_example, path=tmp_path / "train.py", port=free_port())
    output, *others = ranks.run(body, 3, tmp_path, backend="")
    assert re.fullmatch(r"the last loss is 0\.\d+\n", output)
    assert others == ["", ""]


def test_the_example_of_stages_trains(tmp_path: Path) -> None:
    body = partial(remote_calls.run_example, path=EXAMPLES / "remote_stages.py", port=free_port())
    output, *others = ranks.run(body, 3, tmp_path, backend="")
    first, last = map(float, re.findall(r"0\.\d{6}", output))
    assert last < first / 2
    assert others == ["", ""]


def test_the_example_of_a_parameter_server_trains(tmp_path: Path) -> None:
    body = partial(remote_calls.run_example, path=EXAMPLES / "parameter_server.py", port=free_port())
    output, *trainers = ranks.run(body, 3, tmp_path, backend="")
    assert output == ""
    for rank, text in enumerate(trainers, 1):
        found = re.fullmatch(rf"trainer {rank}: error (\S+) at first, (\S+) after \d+ steps\n", text)
        assert found is not None, text
        assert float(found[2]) < float(found[1]) / 10


LEAVES_A_CALL = """
import threading
import torch.distributed as dist
from fedring import remote
from fedring.offers import offers

@offers("remote")
def wait_forever():
    threading.Event().wait()

if __name__ == "__main__":
    dist.init_process_group("fedring", init_method="tcp://127.0.0.1:{port}", rank=0, world_size=1)
    with remote.serve(trusted=["leaves_a_call"]) as owners:
        owners[0].call_async("leaves_a_call:wait_forever")
    dist.destroy_process_group()
    print("ended")
"""


LEAVES_A_BLOCK = """
from fedring import remote
from tests.ring_groups import ring_groups

kept = ring_groups(2)
blocks = [remote.serve(group=group) for group in kept.__enter__()]
owners = [block.__enter__() for block in blocks]
del kept  # the groups leave; the blocks stay, each with an endpoint that is not that of the default group
assert len(owners[0]) == 2
print("ended")
"""


@pytest.mark.parametrize(("name", "text"), [("leaves_a_call", LEAVES_A_CALL), ("leaves_a_block", LEAVES_A_BLOCK)])
def test_what_is_left_open_does_not_keep_the_interpreter(name: str, text: str, tmp_path: Path) -> None:
    script = tmp_path / f"{name}.py"
    script.write_text(text.replace("{port}", str(free_port())))
    path = os.pathsep.join([ranks.PROGRAM_ENVIRONMENT["PYTHONPATH"], str(ROOT)])
    environment = {**os.environ, **ranks.PROGRAM_ENVIRONMENT, "PYTHONPATH": path}
    ended = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == "ended\n"
