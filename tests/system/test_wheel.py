"""The wheel, built and installed into an environment of its own, runs the demo.

To install all dependencies takes long, so only `make soak` does it. Otherwise the environment uses this one's packages
except fedring.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

from fedring.version import VERSION
from tests.conftest import ROOT, missing

SOURCES = ("server", "client", "common", "protos", "pyproject.toml", "README.md", "LICENSE")
PARTS = (
    *("client", "codec", "compress", "control", "ctl", "daemon", "data", "ddp", "pipeline"),
    *(
        "privacy",
        "remote",
        "ring",
        "rpc",
        "schedules",
        "secure",
        "server",
        "simulation",
        "train",
        "v1",
        "vision",
        "web",
        "workers",
    ),
)

pytestmark = pytest.mark.timeout(1200)


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command that must succeed, without variables that lead to this checkout; return its output."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "FEDRING_", "FLCTL_", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, (
        f"{command[0]} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    )
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of the sources without generated files."""
    if importlib.util.find_spec("build") is None:
        missing("the package `build`")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*_pb2*"))
        else:
            shutil.copy(ROOT / name, source)
    run(sys.executable, "-m", "build", "--wheel", "--outdir", folder, source, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_contains_the_program_and_its_data_but_no_tests(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for needed in (
        "fedring/data/digits.npz",
        "fedring/offers.py",
        "fedring/v1/federation_pb2.py",
        "fedring/v1/federation_pb2_grpc.py",
        "fedring/v1/control_pb2.py",
        "fedring/v1/federation.proto",
        *(f"fedring/web/static/{path.name}" for path in (ROOT / "server/fedring/web/static").iterdir()),
        *(f"fedring/{part}/py.typed" for part in PARTS),
    ):
        assert needed in names
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"fedring"}
    assert {name.split("/")[1] for name in names if name.startswith("fedring/")} - {*PARTS} <= {
        "offers.py",
        "version.py",
    }
    assert [name for name in names if "test" in name and name != "fedring/server/model/testset.py"] == []
    assert "fedring/__init__.py" not in names


@pytest.mark.slow
@pytest.mark.parametrize("empty", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["beside", "empty"])
def test_the_demo_runs_from_the_wheel_alone(wheel: Path, tmp_path: Path, empty: bool) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    programs, elsewhere = tmp_path / "venv" / "bin", tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", programs / "python", "install"]
    if empty:
        run(*pip, "--constraint", ROOT / "constraints.txt", wheel, cwd=elsewhere)
    else:
        run(*pip, "--no-deps", wheel, cwd=elsewhere)
        (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
        (packages / "beside.pth").write_text(
            sysconfig.get_paths()["purelib"]
        )  # Python does not read the .pth files there
    where = run(programs / "python", "-c", "import fedring.server.main as m; print(m.__file__)", cwd=elsewhere)
    assert where.startswith(str(tmp_path))
    output = run(programs / "flctl", "demo", "--rounds", "3", "--clients", "2", "--output", "json", cwd=elsewhere)
    report = json.loads(output)
    assert {"rounds", "accuracy", "parameters", "model_sha256"} <= report.keys()
    assert report["accuracy"] > 0.85
    assert [round_["round"] for round_ in report["rounds"]] == [1, 2, 3]
    keys = "round accuracy loss clients seconds train_seconds_max upload_bytes download_bytes evaluate_seconds"
    assert all(set(keys.split()) <= round_.keys() for round_ in report["rounds"])
    for name in ("fl-server", "fl-client", "flctl"):
        assert run(programs / name, "--version", cwd=elsewhere).strip() == f"{name} {VERSION}"
