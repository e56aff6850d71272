"""The wheel, built and installed into an environment of its own, runs flctl try.

To install all dependencies takes long, so only `make soak` does it, for the build and for flctl try. Otherwise both use
the packages of this environment except fedring.
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
        "signatures",
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


def build_wheel(folder: Path, *options: str) -> Path:
    """Build the wheel from a copy of the sources without generated files."""
    if importlib.util.find_spec("build") is None:
        missing("the package `build`")
    source = folder / "source"
    source.mkdir(parents=True)
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*_pb2*"))
        else:
            shutil.copy(ROOT / name, source)
    run(sys.executable, "-m", "build", "--wheel", *options, "--outdir", folder, source, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def check_contents(wheel: Path) -> None:
    """Assert that the wheel contains the program and its data, but no tests."""
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
        "c10d.py",
        "extras.py",
        "job_code.py",
        "offers.py",
        "requirements.py",
        "untrusted.py",
        "version.py",
    }
    assert [name for name in names if "test" in name and name != "fedring/server/model/testset.py"] == []
    assert "fedring/__init__.py" not in names


@pytest.mark.slow
def test_the_wheel_contains_all_that_flctl_try_needs_and_no_tests(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path / "wheel", "--no-isolation")
    check_contents(wheel)
    venv.create(tmp_path / "venv", with_pip=False)
    python, elsewhere = tmp_path / "venv" / "bin" / "python", tmp_path / "elsewhere"
    elsewhere.mkdir()
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", wheel, cwd=elsewhere)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (packages / "beside.pth").write_text(sysconfig.get_paths()["purelib"])  # Python does not read the .pth files there
    check_try(python.parent, elsewhere)


@pytest.mark.soak
def test_flctl_try_runs_from_the_wheel_and_what_it_declares(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path / "wheel")
    check_contents(wheel)
    venv.create(tmp_path / "venv", with_pip=False)
    python, elsewhere = tmp_path / "venv" / "bin" / "python", tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", python, "install"]
    run(*pip, "--constraint", ROOT / "constraints.txt", f"{wheel}[all]", cwd=elsewhere)
    check_try(python.parent, elsewhere)


def check_try(programs: Path, elsewhere: Path) -> None:
    """Run flctl try of an installed wheel, and assert that its report is complete."""
    where = run(programs / "python", "-c", "import fedring.version as m; print(m.__file__)", cwd=elsewhere)
    assert where.startswith(str(programs.parent))
    output = run(programs / "flctl", "try", "rounds=3", "--clients", "1", "--output", "json", cwd=elsewhere)
    report = json.loads(output)
    assert {"rounds", "accuracy", "parameters", "model_sha256"} <= report.keys()
    assert report["accuracy"] > 0.85
    assert [round_["round"] for round_ in report["rounds"]] == [1, 2, 3]
    keys = "round accuracy loss clients seconds train_seconds_max upload_bytes download_bytes evaluate_seconds"
    assert all(set(keys.split()) <= round_.keys() for round_ in report["rounds"])
    for name in ("fl-server", "fl-client", "flctl"):
        assert run(programs / name, "--version", cwd=elsewhere).strip() == f"{name} {VERSION}"
