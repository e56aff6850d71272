"""The source files of modules that a daemon has imported.

A process imports a module once. People edit a module and wonder why nothing changes, so the daemons tell them.
"""

import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import ModuleType

Stamp = tuple[int, int]


class Sources:
    """The files of some packages, as they were when this was made.

    Args:
        packages: Names of packages or modules, with all that has been imported below them.
    """

    def __init__(self, packages: Iterable[str] = ()) -> None:
        roots = {package.partition(".")[0] for package in packages}
        modules = [(name, sys.modules[name]) for name in sorted(sys.modules) if name.partition(".")[0] in roots]
        files = {name: _file_of(module) for name, module in modules if isinstance(module, ModuleType)}
        self._read = {name: (file, stamp) for name, file in files.items() if file and (stamp := _stamp(file))}

    def edited(self) -> list[str]:
        """Return the names of the modules whose files have changed since."""
        stamps = {name: (_stamp(file), stamp) for name, (file, stamp) in self._read.items()}
        return [name for name, (now, then) in stamps.items() if now not in (None, then)]


def _file_of(module: ModuleType) -> Path | None:
    path = getattr(module, "__file__", None)
    return Path(path) if isinstance(path, str) and path.endswith(".py") else None


def _stamp(file: Path) -> Stamp | None:
    with suppress(OSError, ValueError):  # it may be in an archive, or was removed
        facts = file.stat()
        return facts.st_mtime_ns, facts.st_size
    return None
