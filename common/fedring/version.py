"""The version of this software."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("fedring")
except PackageNotFoundError:  # run from a source tree that is not installed
    VERSION = "0.0.0"

SOFTWARE = f"fedring/{VERSION}"
"""How the two sides name themselves to each other."""
