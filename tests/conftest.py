"""What all tests share: where MNIST is, what a missing tool means, and how far hypothesis goes."""

import os
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # before any test imports grpc: it logs what is no fault

ROOT = Path(__file__).parent.parent

# A busy machine is no failure; and what CI says of a commit does not depend on the day: elsewhere examples are new.
settings.register_profile(
    "fedring",
    deadline=None,
    derandomize="FEDRING_NO_SKIPS" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("fedring")


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
