"""Versions of packages with which fedring fails.

pip keeps to the versions of pyproject.toml, but others change packages afterwards.
"""

from importlib.metadata import PackageNotFoundError, version

TORCH_FROM = (2, 4)
GRPCIO_BELOW = (1, 84)


class UnfitVersionError(ImportError):
    """A package is installed in a version with which fedring fails."""


def check_torch() -> None:
    """Check that torch is new enough, without importing it.

    Raises:
        UnfitVersionError: It is older than 2.4; one sentence, with the command that helps.
    """
    if (found := _version("torch")) and _numbers(found) < TORCH_FROM:
        raise UnfitVersionError(
            f"torch {found} is too old: fedring needs 2.4 or newer: pip install 'torch>=2.4' 'torchvision>=0.19'",
            name="torch",
        )


def check_grpcio() -> None:
    """Check that no stranger's call can end a port here.

    From 1.84 on, a call whose path is no UTF-8 ends the loop of a port of grpc.aio (`_server_main_loop`).

    Raises:
        UnfitVersionError: It is such a version; one sentence, with the command that helps.
    """
    if (found := _version("grpcio")) and _numbers(found) >= GRPCIO_BELOW:
        raise UnfitVersionError(
            f"grpcio {found} lets any stranger end a port by one call: pip install 'grpcio>=1.76,<1.84'", name="grpcio"
        )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # it was installed by other means
        return ""


def _numbers(found: str) -> tuple[int, int]:
    major, minor = found.split(".")[:2]
    return int(major), int(minor)
