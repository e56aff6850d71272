"""A client's state between updates, and the state of the spooled update.

    kept-….safetensors   what the newest accepted update of a line of models has left; the name is a digest of the line
    update.left          what the update in the spool leaves: it gets the first name when the server has accepted that

A file consists of sections, one for each part of the client that keeps something: the residual, a control variate,
private tensors. The file of an update holds all sections of its line, also those that the update has not changed, so
that one rename makes all of them count.

The metadata name the client and the update, and hold a digest of everything else. A file that is damaged, or another
client's, is dropped with a line in the log, and counted. The client goes on as if it had kept nothing.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedring.client.transfer.tensor_files import save_private
from fedring.codec.digest import Digest
from fedring.daemon.durable import sync
from fedring.untrusted import parse_json

log = logging.getLogger(__name__)

KEEP_LINES = 16
"""For how many lines of models a client keeps a file: for those of which it has written one last."""

_UNFINISHED = ".tmp??????"
_INSTEAD = {
    False: "and nothing is left of past updates",
    True: "so what an accepted update has left is lost, and what was kept before it stays",
}
"""What a client goes on with, if a file was dropped, and it belonged to the update in the spool or not."""


@dataclass(frozen=True, slots=True, eq=False)
class Section:
    """One component's state between two updates."""

    tensors: Mapping[str, Tensor]  # on the CPU, by name
    words: Mapping[str, str] = field(default_factory=dict)  # by which it knows them again


Sections = Mapping[str, Section]
"""Sections by name."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptState:
    """The state that an update leaves."""

    line: str  # of its model
    sections: Sections  # all of them


class KeptFiles:
    """The files in one state folder, which the caller has locked.

    Args:
        folder: The folder.
        client: The client that keeps them.
        on_dropped: Is called when a file was dropped.
    """

    def __init__(self, folder: Path, client: str, on_dropped: Callable[[], None] = lambda: None) -> None:
        self._folder, self._client, self._on_dropped = folder, client, on_dropped
        self._left_file, self._part = folder / "update.left", folder / "kept.part"
        # They were being written when the process was killed. safetensors has names of its own for half a file.
        for path in (self._part, *folder.glob(_UNFINISHED)):
            path.unlink(missing_ok=True)
        self._spooled: KeptState | None = None  # of the update in the spool, if this process has made it
        self._cached: tuple[str, Sections] | None = None  # of one line
        self._updates = {path: _update_in(path) for path in folder.glob("kept-*.safetensors")}

    def load(self, line: str) -> Sections:
        """Return the kept sections of a line of models; empty = none."""
        if self._cached is None or self._cached[0] != line:
            found = self._read(self._path(line))
            sections = found.sections if found and found.line == line else {}
            self._remember(line, sections)
            return sections
        return self._cached[1]

    def put(self, line: str, sections: Sections) -> None:
        """Keep these sections, and no others, of a line of models, durably.

        Raises:
            OSError: If that is impossible; nothing was changed.
        """
        # The other file may hold what belongs to an update that is still to be delivered.
        update = self._updates.get(self._path(line), "")
        self._write(self._part, KeptState(line, sections), update)
        sync(self._part)
        self._place(self._part, line, update)
        self._remember(line, sections)

    def has_others(self, line: str) -> bool:
        """Return whether there are files of other lines."""
        return bool(self._updates.keys() - {self._path(line)})

    def is_of_another(self, update: str, line: str) -> bool:
        """Return whether an update has left the file of another line."""
        mine = self._path(line)
        return bool(update) and any(name == update for path, name in self._updates.items() if path != mine)

    def forget(self, line: str, name: str) -> bool:
        """Drop a section of a line of models, durably.

        Returns:
            Whether there was one.

        Raises:
            OSError: If that is impossible.
        """
        kept = self.load(line)
        if name in kept:
            self.put(line, {other: section for other, section in kept.items() if other != name})
        return name in kept

    def spool(self, state: KeptState, update: str, *, durable: bool) -> bool:
        """Write the state of an update, before the update is spooled.

        Args:
            state: The state that it leaves.
            update: Its name.
            durable: Whether the file must survive a power loss from now on.

        Returns:
            Whether there is anything to write.
        """
        if not state.sections and not self._path(state.line).exists():
            return False
        self._write(self._left_file, state, update)
        if durable:
            sync(self._left_file)
            sync(self._folder)
        self._spooled = state
        return True

    def accept(self, update: str, *, made_here: bool) -> bool:
        """Make an accepted update's state the current one, durably.

        Args:
            update: The name of the update.
            made_here: Whether this process has spooled it. If not, the file is checked: after a power loss, it may be
                damaged, or belong to another update. Then what was kept before stays.

        Returns:
            Whether there was anything that did not count before.
        """
        state = self._spooled if made_here else self._read(self._left_file, update)
        if state is None:
            return False
        sync(self._left_file)
        self._place(self._left_file, state.line, update)
        self._remember(state.line, state.sections)
        return True

    def line_of_left(self, update: str) -> str:
        """Return the line of models of a spooled update's state.

        It is empty if the update leaves none.
        """
        state = self._spooled or self._read(self._left_file, update)
        return state.line if state else ""

    def drop(self) -> None:
        """Drop the state of the update in the spool."""
        self._left_file.unlink(missing_ok=True)
        self._spooled = None

    def _remember(self, line: str, sections: Sections) -> None:
        """Cache the next round's sections in memory, unless they are many."""
        self._cached = (line, sections) if len(sections) <= 1 else None

    def _path(self, line: str) -> Path:
        return self._folder / f"kept-{hashlib.sha256(line.encode()).hexdigest()[:16]}.safetensors"

    def _place(self, written: Path, line: str, update: str) -> None:
        """Rename a file to its final name, durably.

        The oldest files of other lines are deleted.
        """
        self._cached = None  # What was read before is older, also if the sync below fails.
        placed = written.rename(self._path(line))
        others = [path for path in self._folder.glob("kept-*.safetensors") if path != placed]
        for path in sorted(others, key=lambda path: path.stat().st_mtime_ns, reverse=True)[KEEP_LINES - 1 :]:
            path.unlink()
            self._updates.pop(path, None)
        self._updates[placed] = update
        sync(self._folder)

    def _write(self, path: Path, state: KeptState, update: str) -> None:
        tensors = {f"{name}/{key}": t for name, each in state.sections.items() for key, t in each.tensors.items()}
        words = {name: dict(each.words) for name, each in state.sections.items()}
        known = {"client": self._client, "line": state.line, "update": update, "words": json.dumps(words)}
        save_private(save_file, path, tensors, known | {"digest": digest_of(tensors, known)})

    def _read(self, path: Path, update: str = "") -> KeptState | None:
        """Return the content of a file.

        None if there is no such file, or it is dropped.

        Args:
            path: The file.
            update: The name of the update that it must belong to; empty = any.
        """
        try:
            with safe_open(path, framework="pt") as opened:
                known = dict(opened.metadata() or {})
                # Copies: the reader maps the file into memory, and what it says later would be used unchecked.
                tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118 (no mapping)
            if known.pop("digest", "") != digest_of(tensors, known):
                raise ValueError("its digest is another one")
            if known["client"] != self._client:
                raise ValueError(f"it belongs to the client {known['client']!r:.140}")
            if update and known["update"] != update:
                raise ValueError("it belongs to another update")
            sections = {name: Section({}, words) for name, words in parse_json(known["words"]).items()}
            for name, tensor in tensors.items():
                section, _, key = name.partition("/")
                sections[section] = Section({**sections[section].tensors, key: tensor}, sections[section].words)
            return KeptState(known["line"], sections)
        except FileNotFoundError:
            return None
        except (SafetensorError, ValueError, KeyError, AttributeError) as error:
            log.warning("dropped %s, %s: %s", path, _INSTEAD[path == self._left_file], error)
            path.unlink()
            self._updates.pop(path, None)
            self._on_dropped()
            return None


def digest_of(tensors: Mapping[str, Tensor], known: Mapping[str, str]) -> str:
    """Return the digest of everything that a file says."""
    digest, ordered = Digest(), sorted(tensors)
    shapes = [(name, str(tensors[name].dtype), list(tensors[name].shape)) for name in ordered]
    digest.update(json.dumps([sorted(known.items()), shapes]).encode())
    for name in ordered:
        digest.update(tensors[name].detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.name


def _update_in(path: Path) -> str:
    """Return the update that has left a file; empty = unknown."""
    try:
        with safe_open(path, framework="pt") as opened:
            return str((opened.metadata() or {}).get("update", ""))
    except (OSError, SafetensorError):  # the file is dropped when it is needed
        return ""
