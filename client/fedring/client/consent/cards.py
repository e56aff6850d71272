"""The cards in a client's state folder, and the decisions about them.

One file for each card holds, after a line with their SHA-256, the card and its approvals. fl-client writes a card once,
and `fl-client cards` adds decisions. Whoever decides, or drops cards, has the lock of the folder.
"""

import os
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedring.client.consent.card import MAX_CARD_BYTES, Card
from fedring.daemon.durable import create_durably, replace_with_digest, text_after_digest, with_digest
from fedring.daemon.lock import held_alone
from fedring.train.orders.signed_job import canonical
from fedring.untrusted import parse_json

FOLDER = "cards"
MAX_WAITING = 256
"""The most cards about which nothing was decided: the oldest ones go first."""

SHOWN = 12
"""How many digits of a card's name people need."""

_MAX_FILE_BYTES = MAX_CARD_BYTES + (1 << 20)
_MAX_NOTE = 1000
_SKEW_SECONDS = 3600.0  # a clock may have been set back so far since an approval was given
_LAST = 253_402_300_799.0  # the end of the year 9999, in seconds since 1970


class CardError(Exception):
    """A card cannot be read, found or decided about.

    The text is one sentence."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A person's decision about a card.

    Attributes:
        at: When, in seconds since 1970.
        until: When the approval ends; the same unit; 0 = never, or it is no approval.
        approved: Whether it is an approval; otherwise it takes an earlier one back.
        note: Why, in the words of that person.
        by: Who that was, as the system says.
    """

    at: float
    until: float
    approved: bool
    note: str = ""
    by: str = ""


@dataclass(frozen=True, slots=True)
class KeptCard:
    """A card in the state folder.

    Attributes:
        card: The card.
        seen: When it came first, in seconds since 1970.
        decisions: The decisions about it; the newest is last, and counts.
    """

    card: Card
    seen: float
    decisions: tuple[Decision, ...] = ()

    @property
    def short(self) -> str:
        """The beginning of its name."""
        return self.card.name[:SHOWN]

    def refusal(self, now: float) -> str:
        """Return why it is not approved now, or nothing if it is.

        Args:
            now: The time, in seconds since 1970.
        """
        if not self.decisions:
            return f"this site has not approved its card {self.short} yet"
        newest = self.decisions[-1]
        if not newest.approved:
            return f"this site has revoked its approval of the card {self.short}"
        if newest.until and now >= newest.until:
            return f"this site's approval of the card {self.short} has ended at {day_of(newest.until)}"
        if now < newest.at - _SKEW_SECONDS:
            return (
                f"the clock of this site stands before the approval of the card {self.short}, given {day_of(newest.at)}"
            )
        return ""


class Cards:
    """The cards of a state folder.

    Args:
        state_dir: The state folder of the client.
    """

    def __init__(self, state_dir: Path) -> None:
        self._folder = state_dir / FOLDER

    def find(self, card: Card) -> KeptCard:
        """Return a card with the decisions about it.

        It is kept if it is new.

        Raises:
            CardError: If its file is damaged.
            OSError: If it cannot be read or written.
        """
        path = self._folder / card.name
        try:
            return self._read(path)
        except FileNotFoundError:
            kept = KeptCard(card, time.time())
            create_durably(path, with_digest(_text_of(kept)))
            self._forget_oldest()
            return kept

    def named(self, prefix: str) -> KeptCard:
        """Return the card whose name begins so.

        Raises:
            CardError: If there is none, or more than one, or its file is damaged.
        """
        names = [name for name in self._names() if name.startswith(prefix)] if prefix else []
        if len(names) != 1:
            what = "no card" if not names else f"{len(names)} cards"
            raise CardError(f"{what} in {self._folder} begins with {prefix!r}: see fl-client cards")
        return self._read(self._folder / names[0])

    def all(self) -> tuple[list[KeptCard], list[str]]:
        """Return all cards, the oldest first, and sentences about damaged ones."""
        cards, damaged = [], []
        for name in self._names():
            try:
                cards.append(self._read(self._folder / name))
            except CardError as error:
                damaged.append(str(error))
            except FileNotFoundError:  # dropped meanwhile
                continue
        return sorted(cards, key=lambda kept: kept.seen), damaged

    def decide(self, kept: KeptCard, decision: Decision) -> KeptCard:
        """Add a decision about a card, durably.

        Decisions of others that came meanwhile stay.

        Raises:
            CardError: If its note is too long, its file is damaged, or the folder belongs to another user.
            OSError: If it cannot be written.
        """
        if len(decision.note) > _MAX_NOTE:
            raise CardError(f"the note has {len(decision.note)} characters, above {_MAX_NOTE}")
        if (owner := self._folder.stat().st_uid) != os.geteuid():  # fl-client could not read what another user writes
            raise CardError(f"{self._folder} belongs to the user {owner}: decide about cards as that user")
        path = self._folder / kept.card.name
        with self._alone():
            with suppress(FileNotFoundError):  # fl-client has just dropped it
                kept = self._read(path)
            decided = replace(kept, decisions=(*kept.decisions, decision))
            replace_with_digest(path, _text_of(decided))
        return decided

    def _alone(self) -> AbstractContextManager[None]:
        """Let nobody else decide about cards, or drop some, meanwhile."""
        return held_alone(os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))

    def _names(self) -> list[str]:
        try:
            return sorted(path.name for path in self._folder.iterdir() if len(path.name) == 64)
        except FileNotFoundError:
            return []

    def _read(self, path: Path) -> KeptCard:
        try:
            with path.open("rb") as file:
                data = file.read(_MAX_FILE_BYTES + 1)
            kept = read_kept(data)
            if kept.card.name != path.name:
                raise ValueError("it holds another card")
        except FileNotFoundError:
            raise
        except (OSError, ValueError) as error:
            raise CardError(
                f"{path} is damaged ({error}): remove it, and approve its card again when the job comes back"
            ) from error
        return kept

    def _forget_oldest(self) -> None:
        """Delete the oldest undecided cards if there are too many.

        A server can send any number."""
        if len(self._names()) <= MAX_WAITING:
            return
        with self._alone():
            waiting = [kept for kept in self.all()[0] if not kept.decisions]
            for kept in waiting[: max(0, len(waiting) - MAX_WAITING)]:
                (self._folder / kept.card.name).unlink(missing_ok=True)


def read_kept(data: bytes) -> KeptCard:
    """Return the card and the decisions in the bytes of a file.

    Raises:
        ValueError: If they are not what was written.
    """
    if len(data) > _MAX_FILE_BYTES:
        raise ValueError("it is too long")
    found = parse_json(text_after_digest(data))
    try:
        card = Card(_table(found["card"]), _table(found["free"]))
        decisions = tuple(
            Decision(
                at=_moment(each["at"]),
                until=_moment(each["until"]),
                approved=each["approved"] is True,
                note=str(each["note"]),
                by=str(each["by"]),
            )
            for each in found["decisions"]
        )
        return KeptCard(card, _moment(found["seen"]), decisions)
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"it has another form: {error}") from error


def end_of(day: str) -> float:
    """Return the end of a day in seconds since 1970 (UTC).

    A day is a text such as 2027-03-01.

    Raises:
        CardError: If it is no such day.
    """
    try:
        begin = datetime.strptime(day, "%Y-%m-%d").replace(tzinfo=UTC)
        day_of(begin.timestamp() + 86_400)
    except (ValueError, OverflowError):
        raise CardError(f"--until {day!r} is no day such as 2027-03-01") from None
    return begin.timestamp() + 86_400


def day_of(seconds: float) -> str:
    """Return a time for people, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _text_of(kept: KeptCard) -> bytes:
    decisions = [
        {"at": each.at, "until": each.until, "approved": each.approved, "note": each.note, "by": each.by}
        for each in kept.decisions
    ]
    return canonical({"card": kept.card.facts, "free": kept.card.free, "seen": kept.seen, "decisions": decisions})


def _moment(value: Any) -> float:
    if not 0 <= (seconds := float(value)) <= _LAST:
        raise ValueError(f"{seconds} is no time")
    return seconds


def _table(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("a part of it is no table")
    return value
