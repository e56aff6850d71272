"""Write docs/public.json, the list of everything public: python docs/public.py.

It refuses to take anything away: from 1.0.0 on, only a major version does (CONTRIBUTING.md, "What may change"), with
`--major`. `--check` only compares. Calls and messages have a list of their own, protos/protocol.json.
"""

import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import metrics
import reference
from typer.main import get_command

from fedring.client.main import app as fl_client
from fedring.ctl.main import flctl
from fedring.daemon.exits import Exit
from fedring.daemon.metrics import Registry
from fedring.server.main import app as fl_server

TARGET = Path(__file__).with_name("public.json")
API = Path(__file__).parent / "site" / "api.md"
_ENTRY = re.compile(r"^\.\. auto(\w+):: (\S+)\n((?:   :.*\n)*)", re.MULTILINE)

PROGRAMS = {"fl-client": get_command(fl_client), "fl-server": get_command(fl_server), "flctl": flctl}

Public = dict[str, list[str]]


def public() -> Public:
    """Return all public names, sorted, by their kind."""
    found: dict[str, Iterator[str]] = {
        "exit codes": (f"{each.value} {each.name}" for each in Exit),
        "keys": (f"{title}: {name}" for title, model, _ in reference.SECTIONS for name in model.model_fields),
        "metrics": _metrics(),
        "options": (each for name, program in PROGRAMS.items() for each in _options(name, program)),
        "python": _python(),
    }
    return {kind: sorted(set(names)) for kind, names in found.items()}


def _metrics() -> Iterator[str]:
    kept = [("both", list(Registry().collect()))]
    kept += [(title, list(kind().registry.collect())) for title, kind in metrics.SECTIONS]
    for title, each in kept:
        for metric in each:
            if metric.name.startswith("fl_"):  # the others are those of prometheus_client
                yield f"{title}: {metric.name} {metric.type} ({', '.join(sorted(metrics.labels(metric)))})"


def _options(path: str, command: Any) -> Iterator[str]:
    """Yield the options and arguments of a command, and of those below it."""
    yield path
    for parameter in command.params:
        names = parameter.opts if parameter.param_type_name == "option" else [f"<{parameter.name}>"]
        yield from (f"{path} {name}" for name in names)
    for name, below in getattr(command, "commands", {}).items():
        yield from _options(f"{path} {name}", getattr(below, "loaded", below))


def _python() -> Iterator[str]:
    for kind, path, options in _ENTRY.findall(API.read_text(encoding="utf-8")):
        left_out = re.findall(r"[\w.]+", (re.search(r":exclude-members: (.*)", options) or ["", ""])[1])
        if kind == "module":
            module = importlib.import_module(path)
            names = getattr(module, "__all__", None) or [
                name for name, value in vars(module).items() if getattr(value, "__module__", "") == path
            ]
            members = ":members:" in options
            for name in names if members else []:
                if not name.startswith("_") and name not in left_out:
                    yield from _described(f"{path}.{name}", getattr(module, name), members=True)
        else:
            module, _, name = path.rpartition(".")
            yield from _described(path, getattr(importlib.import_module(module), name), members=":members:" in options)


def _described(path: str, value: Any, *, members: bool) -> Iterator[str]:
    """Yield a name, its parameters, and those of its members."""
    yield path
    with_signature = inspect.isroutine(value) or (inspect.isclass(value) and not issubclass(value, Exception))
    if with_signature and (signature := _signature(value)):
        own = (name for name in signature.parameters if name not in ("self", "cls", "args", "kwargs"))
        yield from (f"{path}({name})" for name in own if not name.startswith("_"))
    if inspect.isclass(value) and members:
        for name, member in vars(value).items():
            if not name.startswith("_"):
                yield from _described(f"{path}.{name}", member, members=False)


def _signature(value: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(value)
    except (TypeError, ValueError):  # of C
        return None


def gone(before: Public, now: Public) -> list[str]:
    """Return the names that were public, and are no more."""
    return [f"{kind}: {name}" for kind, names in before.items() for name in names if name not in now.get(kind, [])]


def main(words: list[str]) -> int:
    """Write the list, and return the exit code."""
    before: Public = json.loads(TARGET.read_text(encoding="utf-8")) if TARGET.exists() else {}
    now = public()
    if "--check" in words and (new := gone(now, before)):
        print("these are public, and not in the list: run python docs/public.py", *new, sep="\n", file=sys.stderr)
        return 1
    if (lost := gone(before, now)) and "--major" not in words:
        print("these were public, and only a major version may take them away:", *lost, sep="\n", file=sys.stderr)
        return 1
    if "--check" in words:
        return 0
    TARGET.write_text(json.dumps(now, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
