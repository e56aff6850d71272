"""What all tests share: where MNIST is, and what a missing tool means."""

import os
from pathlib import Path
from typing import NoReturn

import pytest

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # before any test imports grpc: it logs what is no fault

ROOT = Path(__file__).parent.parent


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
