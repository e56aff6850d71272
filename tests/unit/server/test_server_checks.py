"""fl-server checks what its configuration names before it starts, and flctl doctor makes the same checks."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests import forks

from fedring.ctl.main import main as flctl
from fedring.daemon.config import ConfigError, load_config
from fedring.daemon.exits import Exit
from fedring.server.config import ServerConfig
from fedring.server.startup_checks import check
from fedring.train.models import digits_mlp, vector
from fedring.train.tensors.files import save_model

VECTOR = {"model": "fedring.train.models:vector", "model_args": {"size": 3}}
DGC = {"mode": "data_parallel", "data_parallel": {"hook": "dgc"}}
WRONG: list[tuple[Mapping[str, Any], str, str]] = [
    ({"job": {"model": "nomod:x"}}, "job.model", "nomod:x is not offered here as model"),
    ({"job": {"model": "nomod:x"}, "trusted": ["nomod"]}, "trusted", "There is no module nomod"),
    ({"job": {"model": "fedring.train.models:nope"}}, "job.model", "models:nope is not offered here as model: did"),
    ({"init_path": "{tmp}/none"}, "init_path", "cannot be read"),
    ({"init_path": "{tmp}/garbage"}, "init_path", "is neither a safetensors file nor a state dict"),
    ({"init_path": "{tmp}/digits", "job": VECTOR}, "init_path", "does not fit the model"),
    ({"data_root": "{tmp}/none", "job": {"evaluate_on_server": True}}, "data_root", "is no folder that can be read"),
    ({"job": {"evaluate_on_server": True, "data": "fedring.data:mnist"}}, "job.data", "set data_root"),
    ({"job": {"evaluate_on_server": True, "loss": "fedring.train:losses"}}, "job.loss", "is not part of fedring"),
    ({"job": {"server_optimizer": {"name": "SGDD"}}}, "job.server_optimizer", "'SGDD' does not treat each value"),
    ({"job": {"server_optimizer": {"args": {"rl": 1.0}}}}, "job.server_optimizer", "SGD takes no rl"),
    ({"job": {"aggregation": {"rule": "nomod:x"}}}, "job.aggregation.rule", "nomod:x is not offered"),
    (
        {"job": {"optimizer_args": {"rl": 1.0}}},
        "job.optimizer_args",
        "fedring.train.optimizers:sgd cannot be called with {'rl': 1.0}",
    ),
    (
        {"job": {"optimizer_args": {"weight_decay": -1.0}}},
        "job.optimizer_args",
        "cannot be made with lr=0.05, momentum=0.9 and opt",
    ),
    ({"job": {**DGC, "optimizer_args": {"nesterov": True}}}, "job.optimizer_args", "use dgc(nesterov=true)"),
    (
        {
            "job": {**DGC, "optimizer": "tests.unit.group_member:nadam"},
            "trusted": ["fedring", "tests.unit.group_member"],
        },
        "job.optimizer",
        "momentum would act twice",
    ),
]
GOOD: list[Mapping[str, Any]] = [
    {},
    {"trusted": ["torch"]},  # nobody has asked for the default model, which lies in fedring
    {"init_path": "{tmp}/digits"},
    {"init_path": "{tmp}/vector"},  # if [job] names no model, each job brings its own
    {"init_path": "{tmp}/vector", "job": VECTOR},
    {"init_path": "{tmp}"},  # a folder, of which jobs name the files
    {"data_root": "{tmp}/none"},  # only a server that evaluates reads its data
    {"job": {"evaluate_on_server": True, "server_optimizer": {"name": "Adam", "args": {"lr": 0.1}}}},
    {"job": {"optimizer_args": {"weight_decay": 0.1}}},
    {"job": {**DGC, "optimizer_args": {"weight_decay": 0.1}}},
    {"job": {"mode": "data_parallel", "optimizer_args": {"nesterov": True}}},
    {"job": {"optimizer": "only.at:clients", "optimizer_args": {"rl": 0.1}}},
    {"job": {"trainer": "only.at:clients", "optimizer": "only.at:clients", "data": "only.at:clients"}},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with two files of weights, and with one file that holds no weights."""
    (tmp_path / "garbage").write_bytes(b"no weights at all")
    save_model(digits_mlp(), tmp_path / "digits")
    save_model(vector(3), tmp_path / "vector")
    return tmp_path


def write_config(keys: Mapping[str, Any], folder: Path) -> Path:
    """Write a configuration file with these keys, free ports and a new state folder, and return its path."""
    own = {"listen": "127.0.0.1:0", "control_listen": "127.0.0.1:0", "state_dir": str(folder / "state")}
    path = folder / "server.json"
    path.write_text(json.dumps({**own, **keys}).replace("{tmp}", str(folder)))
    return path


@pytest.mark.parametrize(("keys", "name", "sentence"), WRONG, ids=str)
def test_a_configuration_that_cannot_work_is_refused_by_the_daemon_and_reported_by_doctor(
    folder: Path, capsys: pytest.CaptureFixture[str], keys: Mapping[str, Any], name: str, sentence: str
) -> None:
    path = write_config(keys, folder)
    with pytest.raises(ConfigError) as refused:
        check(load_config(ServerConfig, path).config)
    assert str(refused.value).startswith(f"{name}: ")
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)
    assert flctl(["doctor", "--server-config", str(path), "--output", "json"]) == Exit.FAILED
    (row,) = (row for row in json.loads(capsys.readouterr().out)["checks"] if row["level"] == "fail")
    assert (row["name"], row["found"] in str(refused.value)) == (name, True)


@pytest.mark.parametrize("keys", GOOD, ids=str)
def test_a_configuration_that_may_work_is_not_refused(folder: Path, keys: Mapping[str, Any]) -> None:
    check(load_config(ServerConfig, write_config(keys, folder)).config)


@pytest.mark.parametrize(
    ("start", "told"), [("newest", True), ("best", True), (3, True), ("fresh", False), ("./vector", False), ("", False)]
)
def test_weights_that_jobs_would_not_read_are_told(
    folder: Path, caplog: pytest.LogCaptureFixture, start: str | int, told: bool
) -> None:
    keys = {"init_path": "{tmp}/vector", "job": {**VECTOR, **({"start": start} if start else {})}}
    check(load_config(ServerConfig, write_config(keys, folder)).config)
    assert (f"vector is ignored by jobs that take start = {start} from [job]" in caplog.text) == told


@pytest.mark.programs
@pytest.mark.parametrize("flags", [["--check-config"], []], ids=["check", "start"])
def test_a_server_exits_with_78_and_one_sentence_before_it_creates_its_state(folder: Path, flags: list[str]) -> None:
    path = write_config({"init_path": "{tmp}/garbage"}, folder)
    done = forks.run("fedring.server.main", path, *flags, timeout=120)
    assert (done.returncode, done.stdout) == (Exit.CONFIG, "")
    assert done.stderr.startswith("fl-server: init_path: ")
    assert len(done.stderr.splitlines()) == 1
    assert not (folder / "state").exists()
