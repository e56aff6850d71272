"""The pages of the documentation as data: their links, their quotes, and the commands that they show."""

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
        """The path from the root of the repository."""
        return str(self.path.relative_to(ROOT))

    @cached_property
    def text(self) -> str:
        """The whole text."""
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def blocks(self) -> list[tuple[str, str]]:
        """The fenced blocks: language and content of each."""
        return [(found[1], found[2]) for found in _FENCE.finditer(self.text)]

    @cached_property
    def prose(self) -> str:
        """The text outside of fenced blocks."""
        return _FENCE.sub("", self.text)

    @cached_property
    def quoted(self) -> list[str]:
        """The quotes in single backticks, each on one line."""
        return [re.sub(r"\s+", " ", found).replace(r"\|", "|") for found in re.findall(r"`([^`]+)`", self.prose)]

    @cached_property
    def links(self) -> list[str]:
        """The targets of links and pictures."""
        return re.findall(r"\]\(([^)\s]+)\)", self.prose)

    @cached_property
    def anchors(self) -> set[str]:
        """The names that a link may have behind #, one for each heading."""
        titles = re.findall(r"^#+ (.*)$", self.prose, re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}

    def shell(self) -> str:
        """Return the contents of all shell blocks."""
        return "\n".join(text for language, text in self.blocks if language == "sh")

    def toml(self) -> list[str]:
        """Return the TOML in blocks, and in files that shell commands write."""
        return [*(text for language, text in self.blocks if language == "toml"), *written(self.shell()).values()]


PAGES = [Page(path) for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("protos/*.md")])]


def written(shell: str) -> dict[str, str]:
    """Return the contents of the files that a script writes, by name."""
    return {found[1]: found[3] for found in _HEREDOC.finditer(shell)}


def exported(shell: str) -> dict[str, str]:
    """Return the variables that a script exports."""
    lines = re.findall(r"^export (.*)$", shell, re.MULTILINE)
    return dict(word.split("=", 1) for line in lines for word in shlex.split(line))


def commands(shell: str) -> Iterator[list[str]]:
    """Yield the words of each call of one of PROGRAMS in a script."""
    shell = re.sub(r"--entrypoint (\S+) \S+", r"\1", _HEREDOC.sub("", shell).replace("\\\n", " "))
    for line in shell.splitlines():
        for words in _commands(_words(line)):
            at = next((at for at, word in enumerate(words) if word.rpartition("/")[2] in PROGRAMS), None)
            if at is not None and _is_command(words[:at]):
                yield [words[at].rpartition("/")[2], *words[at + 1 :]]


def _words(line: str) -> list[str]:
    """Split a line as the shell does; return nothing for a line that continues on the next one."""
    reader = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
    reader.whitespace_split = True
    try:
        return list(reader)
    except ValueError:
        return []


def _commands(words: list[str]) -> Iterator[list[str]]:
    """Yield the words between separators, without redirections."""
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
    """Return whether the word after these is a program, and not an argument of another one."""
    rest = [word for word in before if not re.fullmatch(r"\w+=.*|env|sudo|nohup", word)]
    return not rest or (rest[0] == "docker" and "run" in rest)
