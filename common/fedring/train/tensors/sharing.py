"""The choice of a model's tensors that travel, by their names.

It follows from the keys shared, private and send_frozen of a job.
"""

from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True)
class Sharing:
    """The tensors of a model that are shared.

    Globs are those of `fnmatch`, in which `*` also matches dots. A frozen tensor is a parameter that requires no
    gradient. Where frozen tensors stay, all sides have the same values of them already, and neither list decides about
    them.
    """

    shared: tuple[str, ...] = ("*",)
    private: tuple[str, ...] = ()  # takes precedence over `shared`
    frozen_stay: bool = False  # whether frozen tensors stay where they are

    def shares(self, name: str) -> bool:
        """Return whether a tensor is shared, by its name in the schema.

        The tensor is not one that stays as a frozen one.
        """
        return _matches(name, self.shared) and not _matches(name, self.private)

    def unmatched(self, names: Collection[str]) -> tuple[str, str] | None:
        """Return the first glob that matches no name, or None.

        Returns:
            The key that the glob is in, and the glob.
        """
        globs = [*(("shared", glob) for glob in self.shared), *(("private", glob) for glob in self.private)]
        return next(((key, glob) for key, glob in globs if not any(fnmatchcase(name, glob) for name in names)), None)


def _matches(name: str, globs: Collection[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)
