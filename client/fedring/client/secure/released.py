"""Remembers from which sums a client has helped to remove the masks.

If a server could ask for the sum of n clients, and then for that of n - 1 of them with the same model, the difference
would be about what the last one has sent. So a client that has released its shares for a set of survivors signs, for
the same base, the same set again, or one that differs from it by as many clients as the site wants in a sum, at least
3. What was signed without a release has revealed nothing, and does not count.

The file `released.json` has the SHA-256 of what follows in its first line, and then an object:

    clients     the names of clients
    sets        sets of survivors, each as the places of their names
    bases       the places of the sets that were released for each base. Its key is the first 16 hexadecimal digits of
                the SHA-256 of the model's digest.

Nothing in it is ever forgotten, because a server could wait for that. It has room for about half a million rounds of
the same clients, or 40,000 rounds of 100 clients that are others each time. When it is full, this client signs for no
further model: that ends the work for a server that floods it, too.
"""

import hashlib
import json
import logging
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from pydantic import BaseModel, model_validator

from fedring.daemon.config import ConfigError
from fedring.daemon.crash import crashpoint
from fedring.daemon.durable import make_folder, replace_with_digest, text_after_digest
from fedring.daemon.wording import counted
from fedring.secure import SecureError
from fedring.secure.limits import MIN_GROUP
from fedring.untrusted import parse_json

RELEASED = "released.json"
MOST_BYTES = 16 << 20
"""The length at which the file is full."""

_SHOWN = 10  # the most names in an error

log = logging.getLogger(__name__)


class _Known(BaseModel):
    """The object in the file."""

    clients: list[str]
    sets: list[list[int]]
    bases: dict[str, list[int]]

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Check that each place is inside its list."""
        if len({*self.clients}) < len(self.clients):
            raise ValueError("a client is named twice")
        for places, count in ((self.sets, len(self.clients)), (self.bases.values(), len(self.sets))):
            if any(not 0 <= place < count for each in places for place in each):
                raise ValueError("a place is outside its list")
        return self


class Released:
    """The file of one client. Any thread may use it.

    Args:
        folder: Where the file is.

    Raises:
        ConfigError: If it is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / RELEASED
        self._lock = threading.Lock()
        self._clients: dict[str, int] = {}  # the place of each name
        self._sets: list[list[int]] = []
        self._bases: dict[str, list[int]] = {}
        self._size = 0
        try:
            text = text_after_digest(self._path.read_bytes())
            known = _Known.model_validate(parse_json(text), strict=True)
            self._clients = {name: place for place, name in enumerate(known.clients)}
            self._sets, self._bases, self._size = known.sets, known.bases, len(text)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self._path} says for which models this client has helped to remove masks, and cannot be read "
                f"({error}): restore it, or remove it if no server may ask for one of these models again"
            ) from error

    def sums(self, base: str, least: int, *, strict: bool) -> "Sums":
        """Return the guard of the sums of updates to one model.

        Args:
            base: The digest of the model.
            least: The fewest clients in which two sets of survivors may differ; at least 3 in any case.
            strict: Whether to refuse; otherwise, a warning is logged.
        """
        return Sums(self, base, max(least, MIN_GROUP), strict=strict)

    def sets_of(self, base: str) -> list[frozenset[str]]:
        """Return the released sets of survivors of one base."""
        with self._lock:
            names, known = list(self._clients), self._bases.get(_key(base), [])
            return [frozenset(names[place] for place in self._sets[number]) for number in known]

    @property
    def full(self) -> str:
        """Why nothing can be added, as a sentence; empty if it can."""
        if self._size < MOST_BYTES:
            return ""
        return f"{self._path} is full: it can be removed if no server may ask for one of its models again"

    def add(self, base: str, survivors: Iterable[str]) -> None:
        """Add a set of survivors of one base durably.

        Raises:
            OSError: If that is impossible.
        """
        with self._lock:
            names, clients, sets, key = sorted(survivors), dict(self._clients), self._sets, _key(base)
            places = sorted(clients.setdefault(name, len(clients)) for name in names)
            if places not in sets:
                sets = [*sets, places]
            bases = self._bases | {key: [*self._bases.get(key, []), sets.index(places)]}
            known = {"clients": list(clients), "sets": sets, "bases": bases}
            text = json.dumps(known, separators=(",", ":")).encode()
            make_folder(self._path.parent)
            replace_with_digest(self._path, text)
            self._clients, self._sets, self._bases, self._size = clients, sets, bases, len(text)


class Sums:
    """Guards the sums of updates to one model: `Released.sums` makes it."""

    def __init__(self, released: Released, base: str, least: int, *, strict: bool) -> None:
        self._released, self._base, self._least, self._strict = released, base, least, strict

    def check(self, survivors: Iterable[str]) -> None:
        """Check that the masks of the survivors' sum may be removed.

        Raises:
            SecureError: "asked_twice", if too few clients are in only one of two sets; "released_full", if there is no
                room to remember these survivors.
        """
        names, known = frozenset(survivors), self._released.sets_of(self._base)
        if names in known:
            return
        differing = min((names ^ each for each in known), key=len, default=None)
        if differing is not None and len(differing) < self._least:
            self._refuse(SecureError("asked_twice", _sentence(differing, names, self._least)))
        elif full := self._released.full:
            self._refuse(SecureError("released_full", full))

    def note(self, survivors: Iterable[str]) -> None:
        """Note durably that shares are about to be released.

        Raises:
            SecureError: As check() does.
            OSError: If the file cannot be written.
        """
        names = frozenset(survivors)
        self.check(names)
        if names not in self._released.sets_of(self._base) and not self._released.full:
            self._released.add(self._base, names)
        crashpoint("client_secure_noted")

    def _refuse(self, error: SecureError) -> None:
        if self._strict:
            raise error
        log.warning("%s: %s. A site whose [privacy] demands anything would refuse.", error.reason, error)


def _key(base: str) -> str:
    """Return the key of a model.

    Two models with one key would only be taken for one.
    """
    return hashlib.sha256(base.encode()).hexdigest()[:16]


def _sentence(differing: frozenset[str], names: frozenset[str], least: int) -> str:
    missing, new = sorted(differing - names), sorted(differing & names)
    change = " and ".join(
        f"{word} {', '.join(some[:_SHOWN])}" for word, some in (("without", missing), ("with", new)) if some
    )
    return (
        "this client has helped to remove the masks from a sum of updates to the same model before. These survivors "
        f"differ from those by {counted(len(differing), 'client')} ({change}), and a difference of fewer than {least} "
        "would show too much of what they send: let the same clients survive, or start from another model"
    )
