"""Every command that a page, an example or a help text shows can be parsed by its program."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.conftest import ROOT
from tests.pages import PAGES, PROGRAMS, Page, commands
from typer.main import get_command

from fedring.client.cards_command import app as cards_app
from fedring.client.config import ClientConfig
from fedring.client.main import app as client_app
from fedring.client.main import parse_partition
from fedring.control.failure import Failure
from fedring.ctl.local.trying import sort_words
from fedring.ctl.main import flctl
from fedring.ctl.operate.job_control import job_of
from fedring.daemon.config import ConfigError, load_config, split_arguments
from fedring.server.config import ServerConfig
from fedring.server.main import app as server_app

APPS: dict[str, Any] = dict(zip(PROGRAMS, (flctl, *map(get_command, (server_app, client_app))), strict=True))
COMMENTED = [path for path in sorted((ROOT / "deploy").rglob("*")) if path.suffix in (".toml", ".yml", ".service")]
UsageError: type[Exception] = typer.BadParameter.__bases__[0]  # click's; typer may bring its own copy of click
REMOVED = ("flctl bench", "flctl demo")
"""Commands that only the pages about older versions still name."""
OLD = ("CHANGELOG.md", "docs/upgrade.md")
_EXPLAINS = {"--help", "--version", "--install-completion"}
_LEFT_OPEN = re.compile(r"\[[^]]*\](\.\.\.)?|KEY=VALUE")
of_each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def leaves(command: Any, *path: str) -> Iterator[tuple[str, Any]]:
    """Yield each verb of a program with the words that call it; a group may be a verb, too."""
    if _is_verb(command):
        yield " ".join(path), command
    for name, inner in getattr(command, "commands", {}).items():
        yield from leaves(getattr(inner, "loaded", inner), *path, name)


def parse(words: list[str]) -> dict[str, Any]:
    """Return the parameters that the program reads from its command line, without running it.

    The result is {} for a command that only prints help or the version.
    """
    program, *rest = words
    command: Any = APPS[program]
    if (program, *rest[:1]) == ("fl-client", "cards"):
        command, *rest = get_command(cards_app), *rest[1:]
    while rest and rest[0] in getattr(command, "commands", {}):
        inner = command.commands[rest[0]]
        command, *rest = getattr(inner, "loaded", inner), *rest[1:]
    if _EXPLAINS & {*rest} or (hasattr(command, "commands") and not rest):
        return {}
    assert _is_verb(command), f"{rest[0]!r} is no verb"
    context = command.make_context(program, rest)
    if words := getattr(context, "_protected_args", []):  # a verb of the group that stands behind options
        raise AssertionError(f"{words[0]!r} is no verb that may follow options")
    params: dict[str, Any] = context.params
    return params


def _is_verb(command: Any) -> bool:
    return not hasattr(command, "commands") or bool(command.invoke_without_command)


def check(words: list[str]) -> None:
    """Raise an error if the program would refuse the command, or a key that it sets."""
    program, params = words[0], parse(words)
    if program == "fl-server" and params:
        flags = {key: params[key] for key in ("listen", "control_listen", "state_dir")}
        _, overrides = split_arguments(params["arguments"] or [])
        load_config(ServerConfig, overrides=overrides, flags=flags)
    elif program == "fl-client" and "server" in params:
        flags = {key: params[key] for key in ("server", "client_id", "state_dir", "data_root")}
        _, overrides = split_arguments(params["arguments"] or [])
        load_config(ClientConfig, overrides=overrides, flags=flags | parse_partition(params["partition"]))
    elif "words" in params:
        name, keys, _ = sort_words(params["words"] or [], params["sites"] or [])
        job_of(path if (path := ROOT / name).is_file() else None, keys)
    elif "overrides" in params:
        path = ROOT / str(params.get("job_file"))
        job_of(path if path.is_file() else None, params["overrides"] or [])


@of_each_page
def test_a_command_that_a_page_shows_is_valid(page: Page) -> None:
    for words in commands(page.shell()):
        try:
            check(words)
        except Exception as error:
            raise AssertionError(f"{shlex.join(words)}: {error}") from error


@of_each_page
def test_a_command_in_a_sentence_exists(page: Page) -> None:
    for quoted in page.quoted:
        if quoted.partition(" ")[0] not in PROGRAMS or (page.name in OLD and quoted.startswith(REMOVED)):
            continue
        named = _LEFT_OPEN.sub("", re.sub(r"\b(ADDRESS|HOST:PORT)\b", "127.0.0.1:1", quoted))
        words = [re.sub(r"^[A-Z]+$", "1", word) for word in shlex.split(named)]
        try:
            check(words)
        except UsageError as error:
            if type(error).__name__ not in (
                "MissingParameter",
                "BadOptionUsage",
            ):  # a sentence need not name all parameters
                raise AssertionError(f"{quoted}: {error}") from error


@of_each_page
def test_an_option_in_a_sentence_exists(page: Page) -> None:
    apps = [*APPS.values(), get_command(cards_app)]
    options = [option for app in apps for _, verb in leaves(app) for option in verb.params]
    known = _EXPLAINS | {name for option in options for name in (*option.opts, *option.secondary_opts)}
    scripts = [*(ROOT / "tests" / "bench").rglob("*.py"), ROOT / "protos" / "generate.py"]
    written = "".join(path.read_text() for path in scripts)
    old = REMOVED if page.name in OLD else ()
    others = ("docker", "kubectl", "ray", "systemd-analyze")
    ours = [quoted for quoted in page.quoted if quoted.split()[0] not in others and not quoted.startswith(old)]
    found = {option for quoted in ours for option in re.findall(r"(?<!\S)--[a-z][\w-]*", quoted)}
    assert {option for option in found - known if f'"{option}"' not in written} == set()


@pytest.mark.parametrize("path", COMMENTED, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_command_in_a_comment_of_an_example_is_valid(path: Path) -> None:
    for command in re.findall(r"(?:Try|Run) it: (.*)", path.read_text()):
        check(shlex.split(command))


VERBS = dict(leaves(APPS["flctl"]))


@pytest.mark.parametrize("verb", VERBS)
def test_the_examples_of_a_verb_are_valid_calls_of_it(verb: str) -> None:
    examples = [line for line in str(VERBS[verb].epilog).replace("\\[", "[").split("\n\n") if line != "Examples:"]
    assert examples
    for line in examples:
        ((words),) = commands(line)
        assert " ".join(words).startswith(f"flctl {verb}")
        check(words)


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_has_no_line_breaks_of_the_source(verb: str) -> None:
    assert not re.search(r"[^\n]\n[^\n]", VERBS[verb].help or "")


@pytest.mark.parametrize("program", ["fl-server", "fl-client"])
def test_the_examples_in_the_help_of_a_daemon_are_valid(program: str) -> None:
    examples = [re.split(r" {3,}", line.strip())[0] for line in str(APPS[program].help).splitlines()]
    found = [words for line in examples if re.match(r"(FEDRING_\S+ )?fl-", line) for words in commands(line)]
    assert found
    for words in found:
        check(words)


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_option_is_explained(program: str) -> None:
    options = [(path, option) for path, verb in leaves(APPS[program]) for option in verb.params]
    silent = [f"{path} {option.opts[0]}" for path, option in options if option.opts[0][0] == "-" and not option.help]
    assert silent == []


def test_the_manual_names_every_verb() -> None:
    manual = (ROOT / "docs" / "flctl.md").read_text()
    assert [verb for verb in VERBS if not re.search(rf"`(flctl )?{verb}\b", manual)] == []


def test_a_wrong_command_is_detected() -> None:
    wrong = ("flctl dance", "flctl run job.toml lr=x", "fl-server listne=x", "flctl certs issue pki a --role boss")
    for command in wrong:
        ((words),) = commands(f"true && {command} | cat  # a comment")
        with pytest.raises((AssertionError, ConfigError, Failure, UsageError)):
            check(words)
