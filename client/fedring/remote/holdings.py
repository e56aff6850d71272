"""What an owner holds for others: served modules, and values that calls have left here."""

import inspect
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fedring.remote.errors import Refused
from fedring.train.seam import resolve


class Holdings:
    """Named modules, which every rank may use, and references, each of which only the rank that made it may use.

    Args:
        modules: The served modules, by name.
        trusted: The modules of Python whose functions, classes and methods may be called.
    """

    def __init__(self, modules: Mapping[str, nn.Module], trusted: Sequence[str]) -> None:
        self._modules = dict(modules)
        self._trusted = list(trusted)
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._references: dict[tuple[int, int], Any] = {}  # by the rank that made it, and its number

    def __len__(self) -> int:
        return len(self._references)

    def keep(self, rank: int, value: Any) -> int:
        """Keep a value for a rank, and return its number."""
        with self._lock:
            number = next(self._numbers)
            self._references[rank, number] = value
        return number

    def get(self, rank: int, key: int | str) -> Any:
        """Return what a rank names: a served module by its name, or one of the rank's references by its number.

        Raises:
            Refused: There is no such module or reference.
        """
        if isinstance(key, str):
            if key not in self._modules:
                known = ", ".join(self._modules) or "none"
                raise Refused(f"no module {key[:80]!r} is served here; there is {known}", reason="unknown_module")
            return self._modules[key]
        with self._lock:
            if (rank, key) not in self._references:
                raise Refused(f"rank {rank} has no reference {key} here", reason="unknown_reference")
            return self._references[rank, key]

    def release(self, rank: int, numbers: Sequence[int]) -> None:
        """Drop references of a rank; those that are not there are ignored."""
        with self._lock:
            for number in numbers:
                self._references.pop((rank, number), None)

    def release_all(self, of: Callable[[int], bool] = lambda rank: True) -> None:
        """Drop the references of the ranks for which `of` holds."""
        with self._lock:
            for rank, number in [key for key in self._references if of(key[0])]:
                del self._references[rank, number]

    def function(self, name: str) -> Any:
        """Return a function or class, "module:attribute", of a trusted module.

        Raises:
            SeamError: As `fedring.train.seam.resolve` does.
            Refused: It is another callable, of which nobody can tell where it comes from.
        """
        found = resolve(name, self._trusted)
        if not ((inspect.isroutine(found) or inspect.isclass(found)) and getattr(found, "__module__", None)):
            raise Refused(
                f"{name[:200]} is a {type(found).__name__} that does not say which module defines it: define a "
                "function that calls it",
                reason="not_trusted",
            )
        return found

    def method(self, value: Any, name: str) -> Any:
        """Return a method of a value: the call of a module, or a public method that a trusted module defines.

        Raises:
            Refused: There is no such method, or it may not be called.
        """
        kind = type(value)
        if name == "__call__" and isinstance(value, nn.Module):
            return value
        found = inspect.getattr_static(kind, name, None) if not name.startswith("_") else None
        if found is None or not inspect.isroutine(getattr(kind, name)):
            raise Refused(f"a {kind.__name__} has no public method {name[:80]!r}", reason="no_attribute")
        module = getattr(getattr(kind, name), "__module__", None) or ""
        if not any(module == root or module.startswith(root + ".") for root in self._trusted):
            known = ", ".join(self._trusted) or "no module"
            raise Refused(
                f"{kind.__name__}.{name} lies in {module or 'no module'}, but only {known} is trusted here: add it to "
                "the trusted modules",
                reason="not_trusted",
            )
        return getattr(value, name)

    def parameters(self, rank: int, key: int | str) -> dict[str, Tensor]:
        """Return the parameters of what a rank names, by name; those of a tensor that is a leaf by the name "".

        Raises:
            Refused: It has no parameters.
        """
        value = self.get(rank, key)
        if isinstance(value, nn.Module):
            return dict(value.named_parameters())
        if isinstance(value, Tensor) and value.is_leaf and value.requires_grad:
            return {"": value}
        raise Refused(
            f"a {type(value).__name__} has no parameters: name a module, or a leaf tensor that requires gradients",
            reason="no_parameters",
        )
