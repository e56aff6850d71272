"""The modules and values that an owner holds for other ranks.

Modules are served; values have been left here by calls.
"""

import inspect
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fedring.offers import marks_of
from fedring.remote.errors import CallRefused
from fedring.train.names.offered import Offered

_NUMBER_BITS = 62  # as many as an integer of a message has, without its sign


class Holdings:
    """Named modules, and references to values.

    Every rank may use the modules, and only the rank that has a reference may use it. A rank that is told the number of
    another one's reference gets a reference of its own for it. Numbers are drawn at random, so that nobody can guess
    those that it was not told.

    Args:
        modules: The served modules, by name.
        offered: The functions and classes that may be called.
    """

    def __init__(self, modules: Mapping[str, nn.Module], offered: Offered) -> None:
        self._modules = dict(modules)
        self._offered = offered
        self._lock = threading.Lock()
        self._references: dict[int, tuple[int, Any]] = {}  # by its number: the rank that has it, and the value

    def __len__(self) -> int:
        return len(self._references)

    def keep(self, rank: int, value: Any) -> int:
        """Keep a value for a rank, and return its number."""
        with self._lock:
            return self._keep(rank, value)

    def claim(self, rank: int, number: int) -> int:
        """Give a rank its own reference to another rank's value.

        Returns its number.

        Raises:
            Refused: There is no reference with this number, or no more.
        """
        with self._lock:
            if number not in self._references:
                raise CallRefused(f"no rank has a reference {number} here", reason="unknown_reference")
            return self._keep(rank, self._references[number][1])

    def get(self, rank: int, key: int | str) -> Any:
        """Return a served module or a rank's reference.

        Args:
            rank: The rank that asks.
            key: The module's name, or the reference's number.

        Raises:
            Refused: There is no such module or reference.
        """
        if isinstance(key, str):
            if key not in self._modules:
                known = ", ".join(self._modules) or "none"
                raise CallRefused(f"no module {key[:80]!r} is served here; there is {known}", reason="unknown_module")
            return self._modules[key]
        with self._lock:
            holder, value = self._references.get(key, (-1, None))
        if holder != rank:
            raise CallRefused(f"rank {rank} has no reference {key} here", reason="unknown_reference")
        return value

    def release(self, rank: int, numbers: Sequence[int]) -> None:
        """Drop references of a rank; those that are not there are ignored."""
        with self._lock:
            for number in numbers:
                if self._references.get(number, (-1, None))[0] == rank:
                    del self._references[number]

    def release_all(self, of: Callable[[int], bool] = lambda rank: True) -> None:
        """Drop the references of the ranks for which `of` holds."""
        with self._lock:
            self._references = {key: held for key, held in self._references.items() if not of(held[0])}

    def _keep(self, rank: int, value: Any) -> int:
        """Keep a value under a new number; the caller holds the lock."""
        while (number := secrets.randbits(_NUMBER_BITS)) in self._references:
            pass
        self._references[number] = rank, value
        return number

    def function(self, name: str) -> Any:
        """Return a function or class, "module:attribute", that is offered to other ranks.

        Raises:
            SeamError: As `Offered.get` does.
        """
        return self._offered.get("remote", name)

    def method(self, value: Any, name: str) -> Any:
        """Return a method that other ranks may call.

        It is the call of a module, or a method that is marked as offered to other ranks.

        Raises:
            Refused: There is no such method, or it may not be called.
        """
        kind = type(value)
        if name == "__call__" and isinstance(value, nn.Module):
            return value
        found = inspect.getattr_static(kind, name, None)  # calls no property
        if "remote" not in marks_of(found):
            known = ", ".join(key for key in dir(kind) if "remote" in marks_of(inspect.getattr_static(kind, key, None)))
            raise CallRefused(
                f"a {kind.__name__} offers no method {name[:80]!a}, but {known or 'none'}: mark it with "
                '@offers("remote")',
                reason="not_offered",
            )
        return found.__get__(value, kind)

    def parameters(self, rank: int, key: int | str) -> dict[str, Tensor]:
        """Return the parameters of a held value, by name.

        A tensor that is a leaf has the name "".

        Raises:
            Refused: It has no parameters.
        """
        value = self.get(rank, key)
        if isinstance(value, nn.Module):
            return dict(value.named_parameters())
        if isinstance(value, Tensor) and value.is_leaf and value.requires_grad:
            return {"": value}
        raise CallRefused(
            f"a {type(value).__name__} has no parameters: name a module, or a leaf tensor that requires gradients",
            reason="no_parameters",
        )
