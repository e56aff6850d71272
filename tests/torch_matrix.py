"""Run the federated, simulation and ring tests with several versions of torch.

    python -m tests.torch_matrix                    the versions of VERSIONS
    python -m tests.torch_matrix 2.15.0 2.4.1       these
    python -m tests.torch_matrix --python python3.13 2.15.0

Each version gets an environment in .torch-matrix, which stays for the next run. All packages but torch are those of
constraints.txt. Give TORCH_INDEX the address of an index of CPU builds: the default index serves builds for CUDA to
Linux, of five gigabytes each, so without it a version is only taken if --cuda says so.
"""

import argparse
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from tests.conftest import ROOT

VERSIONS = ("2.15.0", "2.4.1")
FOLDER = ROOT / ".torch-matrix"
JOBS = ("tests/system/test_jobs.py", "tests/system/test_second_runs.py")
WORKERS = ("tests/system/test_data_parallel.py", "tests/system/test_pipeline_mode.py")
FEDERATED = ("tests/unit/train", "tests/unit/simulation", *JOBS, *WORKERS)
RING = ("tests/unit/ring", "tests/unit/ddp", "tests/system/test_ring_ddp.py", "tests/system/test_ring_collectives.py")


class Outcome(NamedTuple):
    """The result of the tests with one version."""

    python: str
    version: str
    federated: str  # the last line of pytest
    ring: str


def main() -> bool:
    """Test with the versions of the command line; return whether all passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=VERSIONS, help=f"versions of torch (default: {VERSIONS})")
    parser.add_argument(
        "--python", action="append", help="an interpreter to test with (default: this one); may be repeated"
    )
    parser.add_argument("--cuda", action="store_true", help="take builds for CUDA where there are no others")
    args = parser.parse_args()
    if not args.cuda and not os.environ.get("TORCH_INDEX"):
        parser.error("set TORCH_INDEX to an index of CPU builds, or give --cuda")
    pythons = args.python or [sys.executable]
    outcomes = [test(python, version) for python in pythons for version in args.versions]
    table = Table("Python", "torch", "federated", "ring")
    for outcome in outcomes:
        table.add_row(*outcome)
    Console().print(table)
    return all(" passed" in one and " failed" not in one for outcome in outcomes for one in outcome[2:])


def test(base: str, version: str) -> Outcome:
    """Run the tests with one version of Python and one of torch."""
    ask = "import sys; print(*sys.version_info[:2], sep='.')"
    number = subprocess.run([base, "-c", ask], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    python = environment(base, number, version)
    return Outcome(number, version, run(python, FEDERATED), run(python, RING))


test.__test__ = False  # type: ignore[attr-defined]  # pytest is not to collect it


def environment(base: str, number: str, version: str) -> Path:
    """Return the Python of an environment with a version of torch, and all that the tests need."""
    folder = FOLDER / f"{version}-{number}"
    python = folder / "bin" / "python"
    if not (folder / ".made").exists():
        subprocess.run([base, "-m", "venv", folder], check=True)
        index = ["--index-url", os.environ["TORCH_INDEX"]] if os.environ.get("TORCH_INDEX") else []
        constrained = ["--constraint", str(FOLDER / "constraints.txt")]
        lines = (ROOT / "constraints.txt").read_text().splitlines()
        (FOLDER / "constraints.txt").write_text("\n".join(line for line in lines if not line.startswith("torch")))
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, *constrained, *index, f"torch=={version}"], check=True)
        if number == f"{sys.version_info[0]}.{sys.version_info[1]}":
            # The other packages are those with which this runs; they come after torch, so that theirs is not found.
            site = folder / "lib" / f"python{number}" / "site-packages"
            (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
        else:
            # torch is there, so that none of these brings another one; --no-deps would leave out what they need.
            held = [f"torch=={version}", "-e", f"{ROOT}[all]"]
            subprocess.run([*pip, "--upgrade", "pip"], check=True)
            subprocess.run([*pip, *constrained, *held, "--group", f"{ROOT}/pyproject.toml:dev"], check=True)
        (folder / ".made").touch()
    return python


def run(python: Path, tests: tuple[str, ...]) -> str:
    """Run some tests, and return pytest's last line."""
    command = [str(python), "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, file=sys.stderr)
    return done.stdout.strip().rpartition("\n")[2]


if __name__ == "__main__":
    sys.exit(not main())
