"""What all tests share: where MNIST is, what a missing tool means, how far hypothesis goes, what took long."""

import os
from collections import defaultdict
from itertools import groupby
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # before any test imports grpc: it logs what is no fault

ROOT = Path(__file__).parent.parent

_REPEATS = int(os.environ.get("FEDRING_REPEATS", "1"))

REPEATED = [0, *(pytest.param(number, marks=pytest.mark.soak) for number in range(1, _REPEATS))]
"""Parameters of a test that does something else each time: one, and those that `make soak` adds by FEDRING_REPEATS."""

# A busy machine is no failure; and what CI says of a commit does not depend on the day: elsewhere examples are new.
settings.register_profile(
    "fedring",
    deadline=None,
    max_examples=100 * _REPEATS,
    derandomize="FEDRING_NO_SKIPS" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("fedring")


SLOWEST = 10
"""How many files are listed at the end of a run."""

_seconds: defaultdict[str, float] = defaultdict(float)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread the slow tests over the run, between files: processes that share it begin with equal, unbroken parts."""
    slow = [item for item in items if item.get_closest_marker("slow")]
    others = [item for item in items if not item.get_closest_marker("slow")]
    items.clear()
    taken = 0
    for _, file in groupby(others, key=lambda item: item.path):
        while taken * len(others) <= (len(items) - taken) * len(slow) and taken < len(slow):
            items.append(slow[taken])
            taken += 1
        items.extend(file)
    items.extend(slow[taken:])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add the time of a test, its fixtures included, to that of its file."""
    _seconds[report.nodeid.partition("::")[0]] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the slowest files, so that a suite that grows is seen to grow."""
    terminalreporter.section(f"the {SLOWEST} slowest files, of {sum(_seconds.values()):.0f} s in all")
    for name, seconds in sorted(_seconds.items(), key=lambda item: -item[1])[:SLOWEST]:
        terminalreporter.line(f"{seconds:7.1f} s  {name}")


def missing(what: str) -> NoReturn:
    """Skip for lack of `what`; but in CI, where everything is to be there, fail."""
    if os.environ.get("FEDRING_NO_SKIPS"):
        pytest.fail(f"{what} is missing")
    pytest.skip(f"{what} is missing")


def path_to(folder: Path) -> dict[str, str]:
    """The environment of daemons that find the modules in `folder`, beside what this process finds."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH", ""))))}


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder that holds MNIST/raw."""
    given = os.environ.get("FEDRING_TEST_DATA")
    for root in (Path(given),) if given else (ROOT.parent / "shared" / "data", ROOT / "data"):
        if (root / "MNIST" / "raw").is_dir():
            return root
    pytest.skip("MNIST is missing: set FEDRING_TEST_DATA to the folder that holds MNIST/raw")
