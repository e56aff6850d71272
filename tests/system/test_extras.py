"""Programs on machines that lack the packages of fedring's extras."""

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fedring.daemon.exits import Exit
from fedring.extras import PACKAGES, missing
from tests.conftest import ROOT
from tests.fleets import Control, Fleet, run_job

DIGITS = {"rounds": 2, "min_clients": 1, "data": "fedring.data:digits", "model": "fedring.train.models:digits_mlp"}
OF_EXTRAS = sorted({package for packages in PACKAGES.values() for package in packages})
REFUSING = """
import sys
from importlib.abc import MetaPathFinder

class Refuse(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {refused}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Refuse())
"""


@pytest.fixture
def lean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let new interpreters find none of the extras' packages."""
    # typer, which fl-client's command line is made of, looks for rich itself and does without it.
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(REFUSING.format(refused=set(OF_EXTRAS)))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}:{':'.join(path for path in sys.path if path)}")


def run(module: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.usefixtures("lean")
def test_a_client_trains_without_the_packages_of_any_extra(tmp_path: Path) -> None:
    with Fleet(tmp_path / "fleet", clients=[]) as fleet:
        keys = [f"state_dir={tmp_path / 'client'}", "insecure=true", "metrics_listen=", "--client-id", "lean"]
        command = [sys.executable, "-m", "fedring.client.main", "--server", fleet.listen, *keys]
        client = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            with Control(fleet.control) as control:
                job = run_job(
                    control,
                    {
                        "rounds": 2,
                        "min_clients": 1,
                        "data": "fedring.data:digits",
                        "model": "fedring.train.models:digits_mlp",
                    },
                )
        finally:
            client.terminate()
            errors = client.communicate(timeout=60)[1]
    assert (job.state, job.rounds_done) == ("completed", 2), errors
    assert client.returncode == Exit.OK


@pytest.mark.usefixtures("lean")
def test_each_program_names_the_extra_that_it_lacks(tmp_path: Path) -> None:
    server = run("fedring.server.main", f"state_dir={tmp_path / 'state'}")
    assert (server.returncode, server.stdout) == (Exit.CONFIG, "")
    sentence = "this needs sqlalchemy, which is not installed: pip install 'fedring[server]', or 'fedring[all]' for all"
    assert server.stderr == f"fl-server: {sentence}\n"
    flctl = run("fedring.ctl.main", "clients")
    assert flctl.returncode == Exit.CONFIG
    assert flctl.stderr.startswith("flctl: this needs rich, which is not installed: pip install 'fedring[cli]'")
    assert len(flctl.stderr.splitlines()) == 1


def test_another_missing_module_is_no_matter_of_extras() -> None:
    assert missing(ModuleNotFoundError("No module named 'mine'", name="mine")) == ""
    assert missing(ImportError("rich is broken")) == ""
    assert "fedring[server]" in missing(ModuleNotFoundError("x", name="sqlalchemy.orm"))


def test_a_client_requires_at_most_16_packages_and_none_of_an_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {line.partition(">")[0].partition("<")[0] for line in project["dependencies"]}
    assert len(names) <= 16
    for extra, packages in PACKAGES.items():
        lines = {line.partition(">")[0].partition("[")[0] for line in project["optional-dependencies"][extra]}
        assert lines == {package.replace("grpc_", "grpcio-") for package in packages}
    assert json.dumps(project["optional-dependencies"]["all"]) == '["fedring[bench,cli,server]"]'


@pytest.fixture
def unfit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Let new interpreters find another version of a package, beside its code of before."""

    def place(package: str, found: str) -> None:
        folder = tmp_path / f"{package}-{found}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {found}\n")
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(path for path in sys.path if path)}")

    return place


@pytest.mark.parametrize(
    ("package", "found", "sentence"),
    [("torch", "2.3.1", "pip install 'torch>=2.4'"), ("grpcio", "1.85.1", "pip install 'grpcio>=1.76,<1.84'")],
)
def test_an_unfit_version_is_told_with_the_command_that_helps(
    tmp_path: Path, unfit: Callable[[str, str], None], package: str, found: str, sentence: str
) -> None:
    unfit(package, found)
    for module, arguments in (
        ("fedring.server.main", [f"state_dir={tmp_path / 'state'}"]),
        ("fedring.client.main", ["client_id=a", f"state_dir={tmp_path / 'a'}", "--check-config"]),
    ):
        done = run(module, *arguments)
        assert (done.returncode, done.stdout) == (Exit.CONFIG, "")
        assert len(done.stderr.splitlines()) == 1
        assert sentence in done.stderr
    done = subprocess.run([sys.executable, "-c", "import fedring.ring"], capture_output=True, text=True, check=False)
    assert f"UnfitVersionError: {package} {found}" in done.stderr


def test_a_processors_torch_says_so_where_cuda_is_asked_for(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("torch finds a GPU")
    done = run("fedring.client.main", "client_id=a", f"state_dir={tmp_path / 'a'}", "device=cuda", "--check-config")
    assert done.returncode == Exit.CONFIG
    assert "There is no device cuda: " in done.stderr
    assert ("is built for processors alone" in done.stderr) == (torch.version.cuda is None)
