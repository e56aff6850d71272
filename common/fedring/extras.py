"""The optional requirements of fedring's programs, by extras.

A client's machine installs what fl-client imports; the server, flctl's tables and charts are extras. This module
imports none of them.
"""

from importlib.util import find_spec

from fedring.requirements import UnfitVersionError

PACKAGES = {
    "server": ("alembic", "grpc_reflection", "plotly", "sqlalchemy", "starlette", "uvicorn"),
    "ha": ("obstore", "psycopg"),
    "cli": ("rich",),
    "bench": ("matplotlib",),
}
"""The packages that each extra of pyproject.toml brings."""


def require(extra: str) -> None:
    """Check that the packages of an extra are installed.

    For a verb that needs them only after long work.

    Raises:
        ModuleNotFoundError: see `missing`.
    """
    for package in PACKAGES[extra]:
        if find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)


def missing(error: BaseException) -> str:
    """Return the sentence for a package that is not installed, or unfit.

    Args:
        error: what an import has raised.

    Returns:
        The sentence, with the command that helps; "" if the error is another one.
    """
    if isinstance(error, UnfitVersionError):
        return str(error)
    package = (getattr(error, "name", None) or "").partition(".")[0] if isinstance(error, ImportError) else ""
    extra = next((extra for extra, packages in PACKAGES.items() if package in packages), "")
    if not extra:
        return ""
    return f"this needs {package}, which is not installed: pip install 'fedring[{extra}]', or 'fedring[all]' for all"
