"""flctl audit: check the chained logs of clients and of the server."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fedring.control.failure import Failure
from fedring.ctl.options import OutputOption
from fedring.ctl.output import Output, print_json, say
from fedring.daemon.chain import DamagedChain, Line, files_of, read_chain
from fedring.daemon.wording import counted


def verify(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="state_dir/audit of a client, state_dir/receipts of the server, or one file."
        ),
    ],
    against: Annotated[
        Path | None, typer.Option(metavar="PATH", help="The log of the other side, which has noted heads of this one.")
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Check a chained log, alone or against the other side's.

    Alone, a log shows that no line in its middle was changed, removed or added. Against the other side's, it also shows
    that it was not written anew, and that its end was not cut off.
    """
    lines = _read(file)
    found: dict[str, Any] = {"lines": len(lines), "first": lines[0].number, "head": lines[-1].head}
    sentences = [f"{file}: {counted(len(lines), 'line')}, in order; the head is {lines[-1].head}"]
    problems: list[str] = []
    if against is not None:
        other = _read(against)
        client, server = (lines, other) if _side(lines) == "client" else (other, lines)
        if (_side(client), _side(server)) != ("client", "server"):
            raise Failure("one of the two logs must be a client's, and the other the server's")
        problems = list(contradictions(client, server))
        checked = sum(bool(_text(line, "server_head")) for line in client)
        sentences.append(f"{counted(checked, 'acceptance')} of the client compared with the server's log")
        found |= {"acceptances": checked, "problems": problems}
    if output is Output.JSON:
        print_json(found)
    else:
        say(*sentences, *problems)
    if problems:
        raise Failure(f"the two logs contradict each other: {problems[0]}")


def contradictions(client: Sequence[Line], server: Sequence[Line]) -> Iterator[str]:
    """Yield a sentence for each noted head that is missing.

    Heads of lines that a side has deleted by their age cannot be checked: lines before its first one.

    Args:
        client: The lines of a client's log.
        server: Those of the server's.
    """
    name = next((_text(line, "client") for line in client if "client" in line.facts), "")
    mine, theirs = {line.head for line in client}, {line.head for line in server}
    sent = {_text(line, "update"): line for line in client if _text(line, "what") == "sends"}
    receipts = {
        _text(line, "update"): line for line in server if "client" in line.facts and _text(line, "client") == name
    }
    for line in client:
        head, update = _text(line, "server_head"), _text(line, "update")
        if head and head not in theirs and (server[0].number == 1 or update in receipts):
            yield f"line {line.number} of the client names a head that the server does not have: {head}"
        elif head and server[0].number == 1 and update not in receipts:
            yield f"the server has no line of the update in line {line.number} of the client: {update}"
    for line in receipts.values():
        head, update = _text(line, "client_head"), _text(line, "update")
        if head and head not in mine and (client[0].number == 1 or update in sent):
            yield f"line {line.number} of the server names a head that the client does not have: {head}"


def _read(path: Path) -> list[Line]:
    try:
        lines = read_chain(path)
    except DamagedChain as error:
        raise Failure(str(error)) from error
    except OSError as error:
        raise Failure(f"{path} cannot be read: {error.strerror}") from error
    if not lines:
        raise Failure(f"{path} holds no chained log" if not files_of(path) else f"{path} is empty")
    return lines


def _side(lines: Sequence[Line]) -> str:
    """Return whose log it is.

    The months with the lines of a start may have been deleted."""
    what = {_text(line, "what") for line in lines}
    sides = {_text(line, "side") for line in lines if "side" in line.facts}
    if not sides and what & {"update", "sends"}:
        sides = {"server" if "update" in what else "client"}
    return sides.pop() if len(sides) == 1 else ""


def _text(line: Line, key: str) -> str:
    """Return a fact as text, whatever was written.

    Empty if it is not there.
    """
    value = line.facts.get(key)
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)
