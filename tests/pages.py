"""The project's texts as data: what they link to, what they quote, and which commands they tell to type."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.conftest import ROOT

PROGRAMS: tuple[str, ...] = ("flctl", "fl-server", "fl-client")
_FENCE = re.compile(r"^```([\w-]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_HEREDOC = re.compile(r"^cat > (\S+) <<'(\w+)'\n(.*?)^\2$", re.MULTILINE | re.DOTALL)
_SEPARATORS = frozenset("|&;()")


@dataclass(frozen=True)
class Page:
    """A page of documentation."""

    path: Path

    @property
    def name(self) -> str:
        """Where it is, seen from the root."""
        return str(self.path.relative_to(ROOT))

    @cached_property
    def text(self) -> str:
        """All of it."""
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def blocks(self) -> list[tuple[str, str]]:
        """Its fenced blocks: language and content."""
        return [(found[1], found[2]) for found in _FENCE.finditer(self.text)]

    @cached_property
    def prose(self) -> str:
        """What is in no block."""
        return _FENCE.sub("", self.text)

    @cached_property
    def quoted(self) -> list[str]:
        """What stands in single backticks, on one line."""
        return [re.sub(r"\s+", " ", found).replace(r"\|", "|") for found in re.findall(r"`([^`]+)`", self.prose)]

    @cached_property
    def links(self) -> list[str]:
        """The targets of its links and pictures."""
        return re.findall(r"\]\(([^)\s]+)\)", self.prose)

    @cached_property
    def anchors(self) -> set[str]:
        """What a link may name behind #."""
        titles = re.findall(r"^#+ (.*)$", self.prose, re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}

    def shell(self) -> str:
        """What its blocks tell to type."""
        return "\n".join(text for language, text in self.blocks if language == "sh")

    def toml(self) -> list[str]:
        """The TOML that it shows, also as what a command writes into a file."""
        return [*(text for language, text in self.blocks if language == "toml"), *written(self.shell()).values()]


PAGES = [Page(path) for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("protos/*.md")])]


def written(shell: str) -> dict[str, str]:
    """The files that a script writes, and what into them."""
    return {found[1]: found[3] for found in _HEREDOC.finditer(shell)}


def exported(shell: str) -> dict[str, str]:
    """The variables that a script exports."""
    lines = re.findall(r"^export (.*)$", shell, re.MULTILINE)
    return dict(word.split("=", 1) for line in lines for word in shlex.split(line))


def commands(shell: str) -> Iterator[list[str]]:
    """The words of each command of ours in a script."""
    shell = re.sub(r"--entrypoint (\S+) \S+", r"\1", _HEREDOC.sub("", shell).replace("\\\n", " "))
    for line in shell.splitlines():
        for words in _commands(_words(line)):
            at = next((at for at, word in enumerate(words) if word.rpartition("/")[2] in PROGRAMS), None)
            if at is not None and _is_command(words[:at]):
                yield [words[at].rpartition("/")[2], *words[at + 1 :]]


def _words(line: str) -> list[str]:
    """As the shell has them; none of a line that goes on in the next one."""
    reader = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
    reader.whitespace_split = True
    try:
        return list(reader)
    except ValueError:
        return []


def _commands(words: list[str]) -> Iterator[list[str]]:
    """The words between separators, without what is read or written elsewhere."""
    command: list[str] = []
    skip = False
    for word in words:
        if set(word) <= _SEPARATORS:
            yield command
            command = []
        elif set(word) <= set("<>&"):
            skip = True
            continue
        elif not skip:
            command.append(word)
        skip = False
    yield command


def _is_command(before: list[str]) -> bool:
    """Whether what follows these words is a program, and not an argument of another one."""
    rest = [word for word in before if not re.fullmatch(r"\w+=.*|env|sudo|nohup", word)]
    return not rest or (rest[0] == "docker" and "run" in rest)
