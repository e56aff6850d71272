"""Which tensors of a model travel, by their names: what the keys shared, private and send_frozen of a job say."""

from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True)
class Sharing:
    """Which tensors of a model are shared; globs are those of `fnmatch`, in which `*` also matches dots.

    A frozen tensor is a parameter that requires no gradient. Where frozen tensors stay, all sides have the same values
    of them already, and neither list decides about them.
    """

    shared: tuple[str, ...] = ("*",)
    private: tuple[str, ...] = ()  # takes precedence over `shared`
    frozen_stay: bool = False  # whether frozen tensors stay where they are

    def shares(self, name: str) -> bool:
        """Return whether a tensor that does not stay as a frozen one is shared, by its name in the schema."""
        return _matches(name, self.shared) and not _matches(name, self.private)

    def unmatched(self, names: Collection[str]) -> tuple[str, str] | None:
        """Return the first glob that matches none of these names, after the key that it is in; None if all match."""
        globs = [*(("shared", glob) for glob in self.shared), *(("private", glob) for glob in self.private)]
        return next(((key, glob) for key, glob in globs if not any(fnmatchcase(name, glob) for name in names)), None)


def _matches(name: str, globs: Collection[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)
