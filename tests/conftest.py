"""Settings and fixtures of all tests: MNIST, missing tools, hypothesis, the order of slow tests, and their times."""

import gc
import os
import random
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # before grpc is imported: it also logs harmless events
# Before torch is imported: more tests run than there are processors, and waiting threads of OpenMP would burn them.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

ROOT = Path(__file__).parent.parent

_REPEATS = int(os.environ.get("FEDRING_REPEATS", "1"))

REPEATED = [0, *(pytest.param(number, marks=pytest.mark.soak) for number in range(1, _REPEATS))]
"""Parameters of a randomised test: one run, and the repeats that `make soak` asks for with FEDRING_REPEATS."""

_DRAWN = random.SystemRandom().randrange(1, 1 << 31) if _REPEATS > 1 else 32

SEED = int(os.environ.get("FL_TEST_SEED", "0")) or _DRAWN
"""The seed of all random draws of tests: the same each time, but drawn by `make soak`; a test that fails shows it."""

os.environ["FL_TEST_SEED"] = str(SEED)  # for the other processes of this run

# A busy machine must not fail a test. Examples are the same each time, except in `make soak`.
settings.register_profile(
    "fedring",
    deadline=None,
    max_examples=100 * _REPEATS,
    derandomize=_REPEATS == 1,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("fedring")


SLOWEST = 10
"""How many files are listed at the end of a run."""

_seconds: defaultdict[str, float] = defaultdict(float)

_passed = pytest.StashKey[frozenset[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option with which a long run goes on where one before it was ended.

    It is given as `--passed=FILE`: an existing FILE in a word of its own would be the path of tests until this is read.
    """
    parser.addoption("--passed", type=Path, metavar="FILE", help="leave out the tests in FILE; add those that pass")


def pytest_configure(config: pytest.Config) -> None:
    """Heed Ctrl-C, and read which tests have passed already; processes of xdist get the list from the first one."""
    # A run that a shell has started in the background ignores SIGINT, and so would all programs that it starts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if (given := getattr(config, "workerinput", None)) is not None:
        config.stash[_passed] = frozenset(given["passed"])
    elif file := config.getoption("passed"):
        config.stash[_passed] = frozenset(file.read_text("utf-8").splitlines() if file.exists() else ())
        config.pluginmanager.register(_Passing(file))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give a process of xdist the list of the tests that have passed, so that all of them collect the same."""
    node.workerinput["passed"] = sorted(node.config.stash.get(_passed, ()))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without looking for garbage; what is there then stays, so no collection need look at it later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what has passed; spread the slow tests over the run, so that parallel processes get equal parts."""
    if passed := config.stash.get(_passed, frozenset()):
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
        items[:] = [item for item in items if item.nodeid not in passed]
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


@pytest.hookimpl(tryfirst=True)  # before fixtures draw
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let each test draw the same numbers from `random`, numpy and torch, whichever tests came before it."""
    seed = crc32(f"{SEED} {item.nodeid}".encode())
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)
    print(f"FL_TEST_SEED={SEED}")


class _Passing:
    """Writes each test that passes or is skipped to the file of `--passed`."""

    def __init__(self, file: Path) -> None:
        self._file, self._failed = file, set[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)
        if report.when == "teardown" and report.nodeid not in self._failed:
            with self._file.open("a", encoding="utf-8") as lines:
                lines.write(report.nodeid + "\n")

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self._file.exists():
            session.exitstatus = pytest.ExitCode.OK  # all of them had passed before


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add the time of a test, its fixtures included, to that of its file."""
    _seconds[report.nodeid.partition("::")[0]] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the slowest files, so that everybody notices when the suite becomes slow."""
    terminalreporter.section(f"the {SLOWEST} slowest files, of {sum(_seconds.values()):.0f} s in all")
    for name, seconds in sorted(_seconds.items(), key=lambda item: -item[1])[:SLOWEST]:
        terminalreporter.line(f"{seconds:7.1f} s  {name}")


def missing(what: str) -> NoReturn:
    """Skip the test because `what` is missing; fail it in CI, where everything must be installed."""
    if os.environ.get("FEDRING_NO_SKIPS"):
        pytest.fail(f"{what} is missing")
    pytest.skip(f"{what} is missing")


def path_to(folder: Path) -> dict[str, str]:
    """Return variables with which daemons also find the modules in `folder`."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH", ""))))}


@pytest.fixture(scope="session")
def data_root() -> Path:
    """Return the folder that contains MNIST/raw."""
    given = os.environ.get("FEDRING_TEST_DATA")
    for root in (Path(given),) if given else (ROOT.parent / "shared" / "data", ROOT / "data"):
        if (root / "MNIST" / "raw").is_dir():
            return root
    pytest.skip("MNIST is missing: set FEDRING_TEST_DATA to the folder that holds MNIST/raw")
