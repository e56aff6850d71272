"""Run the federated, simulation and ring tests with several versions of torch.

    python -m tests.torch_matrix                    the versions of VERSIONS
    python -m tests.torch_matrix 2.15.0 2.4.1       these

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
FEDERATED = ("tests/unit/train", "tests/unit/simulation", *JOBS)
RING = ("tests/unit/ring", "tests/unit/ddp", "tests/system/test_ring_ddp.py", "tests/system/test_ring_collectives.py")


class Outcome(NamedTuple):
    """The result of the tests with one version."""

    version: str
    federated: str  # the last line of pytest
    ring: str


def main() -> bool:
    """Test with the versions of the command line; return whether all passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=VERSIONS, help=f"versions of torch (default: {VERSIONS})")
    parser.add_argument("--cuda", action="store_true", help="take builds for CUDA where there are no others")
    args = parser.parse_args()
    if not args.cuda and not os.environ.get("TORCH_INDEX"):
        parser.error("set TORCH_INDEX to an index of CPU builds, or give --cuda")
    outcomes = [test(version) for version in args.versions]
    table = Table("torch", "federated", "ring")
    for outcome in outcomes:
        table.add_row(*outcome)
    Console().print(table)
    return all(" passed" in one and " failed" not in one for outcome in outcomes for one in outcome[1:])


def test(version: str) -> Outcome:
    """Run the tests with one version of torch."""
    python = environment(version)
    return Outcome(version, run(python, FEDERATED), run(python, RING))


test.__test__ = False  # type: ignore[attr-defined]  # pytest is not to collect it


def environment(version: str) -> Path:
    """Return the Python of an environment with a version of torch, and this one's other packages."""
    folder = FOLDER / version
    python = folder / "bin" / "python"
    if not (folder / ".made").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        index = ["--index-url", os.environ["TORCH_INDEX"]] if os.environ.get("TORCH_INDEX") else []
        constrained = ["--constraint", str(FOLDER / "constraints.txt")]
        lines = (ROOT / "constraints.txt").read_text().splitlines()
        (FOLDER / "constraints.txt").write_text("\n".join(line for line in lines if not line.startswith("torch")))
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, *constrained, *index, f"torch=={version}"], check=True)
        # The other packages are those with which this runs; they come after torch, so that theirs is not found.
        site = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
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
