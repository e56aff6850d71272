"""The installed code that jobs can name, by digests of files."""

import os
import stat
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedring.codec.digest import Digest, name_of
from fedring.version import VERSION

_Stamp = tuple[int, int, int, int]

_VERSIONED = ("fedring", "torch", "torchvision")
"""Their versions stand on the card; their files are too many to be listed one by one."""

_MOST_LISTED = 2_000  # files of a module that a card lists
_CHUNK = 1 << 20


class InstalledCode:
    """The files of a client's trusted modules at its start.

    A process imports a module once: what runs is what was installed then.

    Args:
        trusted: The entries of the client's list.

    Attributes:
        facts: Versions and digests, as they stand on a card.
    """

    def __init__(self, trusted: Iterable[str]) -> None:
        self._roots = sorted({entry.partition(" ")[0].partition(":")[0].partition(".")[0] for entry in trusted})
        self._known: dict[str, tuple[_Stamp, str]] = {}
        self._first = self._read()
        self.facts = _facts_of(self._first)

    def changed(self) -> str:
        """Return the names of the modules that were changed, or nothing."""
        now = self._read()
        return ", ".join(root for root in self._roots if now[root] != self._first[root])

    def _read(self) -> dict[str, dict[str, str]]:
        """Return the digest of each file, by root and relative path."""
        return {root: self._digests(root) for root in self._roots}

    def _digests(self, root: str) -> dict[str, str]:
        # Before each round, this looks at some hundred files: paths stay texts, and each is looked at once.
        found = ((name, self._digest(path)) for name, path in _paths_of(root))
        return {name: digest for name, digest in found if digest}

    def _digest(self, path: str) -> str:
        """Return the digest of a file.

        It is read again only if the system says that it was written. Empty = it is no file."""
        try:
            facts = os.stat(path)  # noqa: PTH116  # as above
            # The time of change cannot be set back, unlike the time of modification.
            stamp = (facts.st_mtime_ns, facts.st_ctime_ns, facts.st_size, facts.st_ino)
            known = self._known.get(path)
            if known is None or known[0] != stamp:
                if not stat.S_ISREG(facts.st_mode):
                    return ""
                digest = Digest()
                with open(path, "rb") as file:  # noqa: PTH123  # as above
                    while chunk := file.read(_CHUNK):
                        digest.update(chunk)
                known = self._known[path] = stamp, digest.name
            return known[1]
        except FileNotFoundError:
            return ""  # a link to nowhere, or removed meanwhile
        except OSError as error:
            return f"unreadable: {error.strerror}"


def _facts_of(files: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    facts: dict[str, Any] = {"torch": {"version": _version("torch")}, "fedring": {"version": VERSION}}
    for root, digests in files.items():
        listed = "".join(f"{name}\0{digest}\n" for name, digest in sorted(digests.items()))
        entry: dict[str, Any] = {"digest": name_of(listed.encode())}
        if root in _VERSIONED:
            entry["version"] = VERSION if root == "fedring" else _version(root)
        elif len(digests) <= _MOST_LISTED:
            entry["files"] = dict(sorted(digests.items()))
        facts[root] = entry
    return facts


def _paths_of(root: str) -> list[tuple[str, str]]:
    """Return the paths in a module or package, with names.

    Nothing is imported. What Python makes of source by itself is left out; bytecode in the place of source is not,
    since it would be imported. An archive that is imported from counts as one file.
    """
    try:
        spec = find_spec(root)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return []
    if isinstance(archive := getattr(spec.loader, "archive", None), str):
        return [(Path(archive).name, archive)]
    if not spec.submodule_search_locations:
        return [(Path(spec.origin).name, spec.origin)] if spec.origin and spec.has_location else []
    found = []
    for folder in spec.submodule_search_locations:
        for where, folders, names in os.walk(folder, followlinks=True):
            folders[:] = [name for name in folders if name != "__pycache__" and not _leads_back(folder, where, name)]
            inner = where[len(folder) :].lstrip(os.sep)
            prefix = f"{inner}/" if inner else ""
            found += [(prefix + name, f"{where}/{name}") for name in names]
    return sorted(found)


def _leads_back(top: str, where: str, name: str) -> bool:
    """Return whether a folder is a link to one above it.

    Links are followed, as an import follows them, and such a one would never end.

    Args:
        top: The folder of the package.
        where: The folder of the link, which begins with `top`.
        name: Of the link.
    """
    path = f"{where}/{name}"
    if not os.path.islink(path):  # noqa: PTH114  # as above
        return False
    real, above = os.path.realpath(path), [where]
    while above[-1] != top and len(above[-1]) > len(top):
        above.append(os.path.dirname(above[-1]))  # noqa: PTH120  # as above
    return any(os.path.realpath(each) == real for each in above)


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
