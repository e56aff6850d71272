"""The examples of the documentation work as it says."""

import json
import re
import subprocess
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from fedring.train.jobs.job import Job
from tests.conftest import ROOT
from tests.fleets import PATIENT, Control, Flctl, Fleet
from tests.forks import Fork
from tests.pages import Page, commands, exported, written
from tests.ports import free_port

EXAMPLES = ROOT / "docs" / "examples"
CONFIGS = sorted((ROOT / "deploy" / "config").glob("*.toml"))
MODULES = {"flctl": "fedring.ctl.main", "fl-server": "fedring.server.main", "fl-client": "fedring.client.main"}
CHECKS = {"server": "fedring.server.main", "client": "fedring.client.main"}
JOBS = ("job", "data-parallel", "pipeline")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Start one fl-server for all tests of this file."""
    with Fleet(tmp_path_factory.mktemp("examples")) as fleet:
        yield fleet


def run(module: str, *arguments: str | Path, cwd: Path, **variables: str) -> Fork:
    """Start a program as its documentation says, with its output in a pipe."""
    path = [str(ROOT / name) for name in ("docs/examples", "server", "client", "common", "protos")]
    env = {"PYTHONPATH": ":".join(path), "PATH": "/usr/bin:/bin", **variables}
    words = [str(argument) for argument in arguments]
    return Fork(module, words, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.fixture
def example_clients(server: Fleet, tmp_path: Path) -> Iterator[dict[str, Fork]]:
    """Start a client for each example as docs/clients.md says, but with our server's port."""
    commands: dict[str, tuple[str, *tuple[str | Path, ...]]] = {
        "ward-7": ("fedring.client.main", EXAMPLES / "declared.toml", f"server={server.listen}"),
        "ward-8": ("fedring.client.main", EXAMPLES / "trainer.toml", f"server={server.listen}"),
    }
    scripts = {"own-loop": "own_loop", "scikit": "scikit"}
    with ExitStack() as stack:
        processes: dict[str, Fork] = {}
        for name, command in commands.items():
            (tmp_path / name).mkdir()
            processes[name] = stack.enter_context(run(*command, cwd=tmp_path / name))
            stack.callback(processes[name].kill)
        for name, script in scripts.items():
            processes[name] = stack.enter_context(run_script(script, server.listen, tmp_path / name))
        yield processes


@contextmanager
def run_script(script: str, listen: str, cwd: Path) -> Iterator[Fork]:
    """Run an example that is a script of its own, in a new folder."""
    cwd.mkdir()
    with run(script, listen, cwd=cwd) as process:
        try:
            yield process
        finally:
            process.kill()


def test_each_example_of_a_client_takes_part_in_a_round(control: Control, example_clients: dict[str, Fork]) -> None:
    events = control.events()
    job_id = control.start_round({"min_clients": 4, "rounds": 1}).job_id
    for _ in control.follow_job(job_id, events):
        pass
    assert control.job(job_id).state == "completed"
    (round_,) = control.rounds(job_id=job_id)
    assert {client.client_id: client.num_samples for client in round_.clients} == {
        "own-loop": 1437,  # all training samples
        "scikit": 1437,
        "ward-7": 719,  # a half of them
        "ward-8": 718,
    }
    assert round_.eval_total == 360 + 180 + 180  # all test samples, and two halves
    for name, process in example_clients.items():
        process.terminate()
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, f"{name}:\n{output}"


def test_scikit_learn_trains_the_server_s_torch_module(server: Fleet, control: Control, tmp_path: Path) -> None:
    with run_script("scikit", server.listen, tmp_path / "scikit"):
        events = control.events()
        job_id = control.start_job({"min_clients": 1, "rounds": 5, "evaluate_on_server": True}).job_id
        for _ in control.follow_job(job_id, events):
            pass
    rounds = control.rounds(job_id=job_id)
    assert [len(round_.clients) for round_ in rounds] == [1] * 5
    assert max(round_.server_accuracy for round_ in rounds) > 0.9


def test_a_linear_classifier_of_scikit_learn_trains_as_numpy_arrays(
    server: Fleet, control: Control, tmp_path: Path
) -> None:
    job = tomllib.loads((EXAMPLES / "linear.toml").read_text())
    with run_script("linear", server.listen, tmp_path / "linear"):
        events = control.events()
        job_id = control.start_job(job).job_id
        for _ in control.follow_job(job_id, events):
            pass
    rounds = control.rounds(job_id=job_id)
    assert [len(round_.clients) for round_ in rounds] == [1] * 5
    assert rounds[0].metrics["eval/accuracy"] > 0.9


@pytest.mark.parametrize("path", [path for path in CONFIGS if path.stem in CHECKS], ids=lambda path: path.stem)
def test_a_shipped_configuration_is_good(path: Path, tmp_path: Path) -> None:
    ports = ["listen=127.0.0.1:0", "control_listen=127.0.0.1:0"] if path.stem == "server" else []
    with run(CHECKS[path.stem], path, "--check-config", *ports, cwd=tmp_path) as check:
        output, _ = check.communicate(timeout=120)
    assert (check.returncode, "the configuration is good" in output) == (0, True), output


@pytest.mark.parametrize("path", [path for path in CONFIGS if path.stem in JOBS], ids=lambda path: path.stem)
def test_a_shipped_job_is_accepted(path: Path, server: Fleet, control: Control, tmp_path: Path) -> None:
    options = ["--no-wait", "--server", server.control, "--output", "json"]
    with run("fedring.ctl.main", "run", path, *options, cwd=tmp_path) as flctl:
        output, _ = flctl.communicate(timeout=120)
    assert flctl.returncode == 0, output
    job = control.job(int(json.loads(output)["job_id"]))
    table = tomllib.loads(path.read_text())
    assert Job.model_validate(json.loads(job.spec)) == Job.model_validate({"start": "fresh", **table})
    control.stop_job(job.job_id)


@pytest.mark.parametrize("page", ["federated", "data-parallel", "pipeline", "first-job"])
def test_the_commands_of_a_page_work(page: str, tmp_path: Path) -> None:
    """Run the commands of the page in a new folder, with free ports."""
    for folder in ("deploy", "docs"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    block = next(text for _, text in Page(ROOT / "docs" / f"{page}.md").blocks if "fl-server" in text)
    assert json.loads(run_commands(block, tmp_path))["accuracy"] > 0.9


def test_one_command_leads_from_the_example_of_a_module_to_a_model(
    flctl: Flctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    monkeypatch.chdir(tmp_path)
    ((_, *arguments),) = commands(
        next(text for _, text in Page(ROOT / "docs/first-job.md").blocks if "flctl try" in text)
    )
    done = flctl(*arguments)
    assert done.returncode == 0, done.stderr
    assert json.loads(Path("try/report.json").read_text())["rounds"][-1]["metrics"]["eval/recall"] > 0.9
    assert load_file("try/best.safetensors")


def test_the_commands_for_two_machines_work(tmp_path: Path) -> None:
    """Run them on one machine, in one folder."""
    recipe = Page(ROOT / "docs" / "security.md").text.partition("## Two machines")[2]
    blocks = re.findall(r"^```sh\n(.*?)^```$", recipe, re.MULTILINE | re.DOTALL)
    shell = "\n".join(blocks).replace("fl.example.org", "localhost")
    for name in ("ca.crt", "hospital-a.crt", "hospital-a.key"):  # as scp does
        (tmp_path / name).symlink_to(tmp_path / "pki" / name)
    for name, text in written(shell).items():
        (tmp_path / name).write_text(text)
    events = [json.loads(line) for line in run_commands(shell, tmp_path).splitlines()]
    assert "round_published" in [event["kind"] for event in events]


def run_commands(shell: str, cwd: Path) -> str:
    """Run all commands, each daemon as in a terminal of its own; return the output of the last flctl."""
    variables = {"FEDRING_SERVER_LISTEN": "127.0.0.1:0", "FEDRING_SERVER_CONTROL_LISTEN": "127.0.0.1:0"}
    variables |= {"FEDRING_CLIENT_PEER_LISTEN": "127.0.0.1:0", "FLCTL_OUTPUT": "json"} | PATIENT | exported(shell)
    output = ""
    with ExitStack() as stack:
        for program, *arguments in commands(shell):
            process = stack.enter_context(run(MODULES[program], *arguments, cwd=cwd, **variables))
            stack.callback(process.terminate)
            if program == "flctl" or "--check-config" in arguments:
                output, _ = process.communicate(timeout=240)
                assert process.returncode == 0, f"{arguments}:\n{output}"
            elif program == "fl-server":
                addresses = json.loads(first_object(process))
                port = addresses["listen"].rpartition(":")[2]
                variables |= {"FEDRING_CLIENT_SERVER": f"localhost:{port}", "FLCTL_SERVER": addresses["control"]}
    return output


def first_object(process: Fork) -> str:
    """Return the JSON object that a server prints when it serves, from among the lines of its log."""
    assert process.stdout is not None
    return next(line.decode() for line in process.stdout if line.startswith(b'{"listen"'))


def test_every_shipped_configuration_is_tested() -> None:
    assert {path.stem for path in CONFIGS} == {*CHECKS, *JOBS}


def test_the_pages_name_every_example() -> None:
    declared = (EXAMPLES / "declared.toml").read_text().partition("\n")[2]
    assert declared in (ROOT / "docs" / "clients.md").read_text()
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    for path in EXAMPLES.iterdir():
        assert path.name in pages or path.name.startswith("__"), path


def test_the_script_with_dgc_trains_and_evaluates_with_all_workers(tmp_path: Path) -> None:
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    with (
        run("dgc", "3", cwd=tmp_path, RANK="0", **group) as first,
        run("dgc", "3", cwd=tmp_path, RANK="1", **group) as second,
    ):
        out, other = (worker.communicate(timeout=200)[0] for worker in (first, second))
    assert (first.returncode, second.returncode) == (0, 0), out + other
    assert other == ""
    accuracies = re.findall(r"epoch \d: accuracy (0\.\d+) over 360 samples", out)
    assert len(accuracies) == 3
    assert float(accuracies[-1]) > 0.7
    assert re.search(r"steps 41 to 60, means: .* ms waiting \(at most .*\), .* bytes of messages", out)
    share = float(re.search(r"sent (.*) % of the gradients' bytes", out)[1])  # type: ignore[index]
    assert share < 25
