"""What flctl does without a server: help, doctor, evaluate, output, plots, and the processes that it starts."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import ROOT

from fedring.control.failure import Failure
from fedring.ctl.help_topics import EXIT_CODES
from fedring.ctl.local.charts import Bars, Series, plot_panels, plot_rounds
from fedring.ctl.local.experiment import Result, make_job
from fedring.ctl.local.presets import PRESETS, Dataset, preset_job
from fedring.ctl.local.runner import unique_names
from fedring.ctl.output import duration, percent, size, to_dict
from fedring.ctl.process import Process, overrides, stop_all
from fedring.daemon.config import parse_overrides
from fedring.daemon.exits import Exit
from fedring.train.models import digits_mlp
from fedring.train.tensors.files import save_model
from fedring.v1 import control_pb2 as pb

Call = Callable[..., tuple[int, str, str]]
SECONDS = 60.0
VERBS = ["start-round", "run", "stop", "status", "clients", "rounds", "watch", "evaluate", "doctor", "health", "try"]


def test_help_explains_every_exit_code(flctl: Call) -> None:
    code, out, _ = flctl("help", "exit-codes")
    assert code == 0
    assert all(f"{code:>4}  " in out for code in Exit)


def test_the_manual_has_the_same_exit_codes() -> None:
    manual = (ROOT / "docs" / "flctl.md").read_text()
    assert all(f"| {code:d} | {meaning} |" in manual for code, meaning in EXIT_CODES.items())


@pytest.mark.parametrize("verb", [*VERBS, "models export"])
def test_the_help_of_every_verb_teaches_with_examples(flctl: Call, verb: str) -> None:
    code, out, _ = flctl("help", *verb.split())
    assert code == 0
    assert f"flctl {verb}" in out[out.index("Examples:") :]


def test_help_on_an_unknown_topic_is_a_usage_error(flctl: Call) -> None:
    assert flctl("help", "dance")[0] == Exit.USAGE
    assert flctl("dance")[0] == Exit.USAGE
    assert flctl("status", "--outptu", "json")[0] == Exit.USAGE


def test_start_round_does_not_take_several_rounds(flctl: Call) -> None:
    code, _, err = flctl("start-round", "rounds=3", "--server", "127.0.0.1:1")
    assert (code, "flctl run" in err) == (Exit.USAGE, True)


def test_version_is_one_line(flctl: Call) -> None:
    code, out, _ = flctl("--version")
    assert (code, out.split()[0], len(out.splitlines())) == (0, "flctl", 1)


@pytest.mark.programs
def test_starting_flctl_does_not_load_torch() -> None:
    script = "import sys, fedring.ctl.main; print({'torch', 'matplotlib', 'sklearn'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "set()\n"


def test_evaluate_counts_on_the_test_samples(flctl: Call, tmp_path: Path) -> None:
    save_model(digits_mlp(), tmp_path / "m.safetensors")
    names = ("--model", "fedring.train.models:digits_mlp", "--data", "fedring.data:digits")
    code, out, _ = flctl("evaluate", tmp_path / "m.safetensors", *names, "--output", "json")
    counts = json.loads(out)
    assert (code, counts["total"]) == (0, 360)
    assert counts["accuracy"] == counts["correct"] / 360


def test_evaluate_explains_which_shapes_do_not_fit(flctl: Call, tmp_path: Path) -> None:
    save_model(digits_mlp(), tmp_path / "m.safetensors")
    names = ("--model", "fedring.train.models:digits_mlp", "--data", "fedring.data:digits")
    code, _, err = flctl("evaluate", tmp_path / "m.safetensors", *names, "--model-args", '{"hidden": 3}')
    assert (code, len(err.splitlines())) == (Exit.CONFIG, 1)
    assert "[64, 64] in the file and [3, 64] in the model" in err
    assert flctl("evaluate", tmp_path / "none.safetensors", *names)[0] == Exit.CONFIG
    code, _, err = flctl("evaluate", tmp_path / "m.safetensors", *names, "--model-args", "[1]")
    assert (code, len(err.splitlines())) == (Exit.USAGE, 1)


def _results(out: str) -> dict[str, list[str]]:
    results: dict[str, list[str]] = {}
    for row in json.loads(out)["checks"]:
        results.setdefault(row["level"], []).append(row["name"])
    return results


def test_doctor_finds_nothing_wrong_with_a_good_host(flctl: Call, tmp_path: Path) -> None:
    config = tmp_path / "server.toml"
    config.write_text(f'listen = "127.0.0.1:0"\ncontrol_listen = "127.0.0.1:0"\nstate_dir = "{tmp_path}/state"\n')
    code, out, _ = flctl("doctor", "--server-config", config, "--output", "json")
    assert (code, json.loads(out)["ok"]) == (0, True)
    assert {"listen", "control_listen", "state_dir", "job.model"} <= set(_results(out)["ok"])
    assert not (tmp_path / "state").exists()


@pytest.mark.slow
def test_doctor_finds_what_is_wrong_with_a_server(flctl: Call, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = tmp_path / "server.toml"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        config.write_text(
            f'listen = "{address}"\ncontrol_listen = "127.0.0.1:0"\nstate_dir = "{tmp_path}/file/state"\n'
            f'init_path = "{tmp_path}/none.pt"\n[job]\nmodel = "os:system"\n'
        )
        code, out, err = flctl("doctor", "--server-config", config, "--output", "json")
    assert code == Exit.FAILED
    assert _results(out)["fail"] == ["listen", "state_dir", "init_path", "job.model"]
    assert err.startswith("flctl: 4 of ")


def test_doctor_suggests_the_key_that_was_misspelt(flctl: Call, tmp_path: Path) -> None:
    config = tmp_path / "server.toml"
    config.write_text('lisen = "127.0.0.1:1"\n')
    code, out, err = flctl("doctor", "--server-config", config)
    assert code == Exit.FAILED
    assert "unknown key 'lisen'" in out
    assert "did you mean 'listen'?" in err


def test_doctor_finds_what_is_wrong_with_a_client(flctl: Call, tmp_path: Path) -> None:
    config = tmp_path / "client.toml"
    config.write_text(
        f'server = "127.0.0.1:1"\nstate_dir = "{tmp_path}/state"\ndata = "fedring.data:mnist"\n'
        f'data_root = "{tmp_path}/none"\n'
    )
    code, out, _ = flctl("doctor", "--client-config", config, "--output", "json")
    assert code == Exit.FAILED
    assert _results(out)["fail"] == ["server", "data_root", "samples"]


def test_doctor_trusts_modules_that_the_client_configuration_names(
    flctl: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "examples"))
    monkeypatch.chdir(tmp_path)
    _, out, _ = flctl("doctor", "--client-config", ROOT / "docs" / "examples" / "trainer.toml", "--output", "json")
    assert "trainer" in _results(out)["ok"]
    assert "samples" in _results(out)["ok"]
    config = tmp_path / "client.json"
    keys = {"server": "127.0.0.1:1", "data": "my_project:records"}
    config.write_text(json.dumps(keys))
    _, out, _ = flctl("doctor", "--client-config", config, "--output", "json")
    assert {"data", "samples"} <= set(_results(out)["ok"])
    config.write_text(json.dumps({**keys, "model": "nomod:x"}))
    _, out, _ = flctl("doctor", "--client-config", config, "--output", "json")
    failed = {row["name"]: row["found"] for row in json.loads(out)["checks"] if row["level"] == "fail"}
    assert "There is no module nomod" in failed.pop("trusted")
    assert failed.keys() == {"server"}


def test_messages_become_dictionaries_of_plain_values() -> None:
    model = to_dict(pb.Model(version=2**60, digest="blake3-01ff", schema_hash=b"\x01\xff"))
    assert (model["version"], model["digest"], model["schema_hash"]) == (2**60, "blake3-01ff", "01ff")
    assert model["accuracy"] is None
    assert to_dict(pb.Event(id=1))["state"] is None
    assert to_dict(pb.Round(missing=["ann"]))["missing"] == ["ann"]


def test_figures_are_formatted_for_people() -> None:
    assert [size(n) for n in (0, 999, 999_499, 999_600, 4_799_528)] == ["0 B", "999 B", "999 kB", "1.00 MB", "4.80 MB"]
    assert [duration(s) for s in (0.0042, 0.4, 12, 200, 18_060)] == [
        "4.2 ms",
        "0.40 s",
        "12.0 s",
        "3 min 20 s",
        "5 h 1 min",
    ]
    assert (percent(0.98765), percent(None)) == ("98.77 %", "-")


def test_overrides_are_parsed_to_the_same_settings() -> None:
    settings = {"client_id": "7", "state_dir": Path("/tmp/x"), "job": {"lr": 0.5}, "insecure": True, "data": "a=b"}
    assert parse_overrides(overrides(settings)) == settings | {"state_dir": "/tmp/x"}


@pytest.mark.parametrize("dataset", Dataset)
def test_every_preset_is_a_valid_job(dataset: Dataset) -> None:
    job = make_job(PRESETS[dataset].clients, preset_job(dataset))
    assert job.min_clients == job.min_clients_to_aggregate == PRESETS[dataset].clients


def test_the_report_has_bytes_per_client(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(b"abc")
    clients = [pb.RoundClient(client_id=name, num_samples=1) for name in "ab"]
    round_ = pb.Round(round=1, delivered=2, clients=clients, upload_bytes=300, download_bytes=500,
                      eval_correct=3, eval_total=4, eval_loss_sum=2.0)  # fmt: skip
    report = Result([round_], 7, tmp_path / "model").report()
    row = report["rounds"][0]
    assert (row["upload_bytes"], row["download_bytes"], row["accuracy"], row["loss"]) == (150, 250, 0.75, 0.5)
    assert (report["accuracy"], report["parameters"], report["model_sha256"][:8]) == (0.75, 7, "ba7816bf")
    assert set(row) == {
        "round", "accuracy", "loss", "clients", "seconds", "evaluate_seconds", "train_seconds_max", "upload_bytes",
        "download_bytes", "metrics",
    }  # fmt: skip


def test_names_to_compare_are_given_once_each() -> None:
    assert unique_names("--hooks", [" none", "", "dgc "]) == ["none", "dgc"]
    for words in ([], [" "], ["dgc", "none", " dgc"]):
        with pytest.raises(Failure, match="--hooks needs names, each once"):
            unique_names("--hooks", words)


def test_plots_are_png_files(tmp_path: Path) -> None:
    rounds = [
        {"round": n, "accuracy": n / 4 if n > 1 else None, "upload_bytes": 5, "download_bytes": 9} for n in (1, 2)
    ]
    plot_rounds({"rounds": rounds}, tmp_path / "rounds.png")
    ones = Series("ones", [1.0, 2.0], [0.1, 0.2])
    twos = Series("twos", [2.0, 3.0])
    panels = [
        Bars("Bytes", "bytes", ["a", "b"], [ones, twos], size, reference=(2.5, "top")),
        Bars("Accuracy", "%", ["a", "b"], [ones], "{:.2f}".format, low=0.5),
    ]
    plot_panels(panels, tmp_path / "all.png")
    pictures = sorted(path.name for path in tmp_path.iterdir() if path.read_bytes().startswith(b"\x89PNG"))
    assert pictures == ["all.png", "rounds.png"]


def _process(folder: Path, program: str, **settings: Any) -> Process:
    (folder / "program.py").write_text(program)
    process = Process("daemon", "program", settings, folder / "daemon.log")
    process.env["PYTHONPATH"] = str(folder)
    return process


def test_a_process_that_ends_early_shows_the_end_of_its_log(tmp_path: Path) -> None:
    process = _process(
        tmp_path, 'import sys; print(\'{"level": "error", "text": "no disk"}\', file=sys.stderr); sys.exit(78)'
    )
    process.start()
    with pytest.raises(Failure, match=r"(?s)daemon ended with exit code 78.*error: no disk"):
        process.first_line(SECONDS)
    stop_all([process], SECONDS)


def test_a_process_gets_its_settings_and_not_the_environment_of_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDRING_SERVER_LISTEN", "somewhere:1")
    process = _process(tmp_path, "import os, sys; print(sys.argv[1:], 'FEDRING_SERVER_LISTEN' in os.environ)", a="x")
    process.start()
    assert process.first_line(SECONDS) == """['a="x"'] False"""
    stop_all([process], SECONDS)


def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    process = _process(tmp_path, program)
    process.start()
    process.first_line(SECONDS)
    stop_all([process], 0.2)
    assert process.poll() == -signal.SIGKILL


def test_a_process_can_be_started_again(tmp_path: Path) -> None:
    process = _process(tmp_path, "import os; print(os.getpid())")
    process.start()
    first = process.first_line(SECONDS)
    assert process.wait(SECONDS) == 0
    process.start()
    assert process.first_line(SECONDS) == str(process.pid) != first
    stop_all([process], SECONDS)
    with pytest.raises(ProcessLookupError):
        os.kill(int(first), 0)
