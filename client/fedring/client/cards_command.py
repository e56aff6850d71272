"""fl-client cards: show the cards of jobs, and decide about them."""

import getpass
import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from fedring.client.config import ClientConfig
from fedring.client.consent.card import differences
from fedring.client.consent.cards import CardError, Cards, Decision, KeptCard, day_of, end_of
from fedring.daemon.config import ConfigError, load_config
from fedring.daemon.exits import Exit

_HELP = """Show the cards of jobs, and approve or revoke them.

With approval.mode = "cards", fl-client trains and evaluates only for jobs whose card was approved. A card has all
settings of a job that the server has sent, and digests of the code that would run here. fl-client may run meanwhile:
the server learns of an approval with one of the next heartbeats.

\b
  fl-client cards list --config /etc/fedring/client.toml
  fl-client cards show 1a2b3c
  fl-client cards approve 1a2b3c --until 2027-03-01 --note "ethics 2026/114"
  fl-client cards revoke 1a2b3c
"""

app = typer.Typer(
    help=_HELP,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_Config = Annotated[Path | None, typer.Option(help="the configuration of fl-client, which has state_dir and approval")]
_StateDir = Annotated[Path | None, typer.Option(help="the state folder of fl-client, instead of the configuration's")]
_Json = Annotated[bool, typer.Option("--json", help="print JSON for programs")]
_Id = Annotated[str, typer.Argument(metavar="ID", help="the beginning of the card's name")]


@app.command("list")
def list_(config: _Config = None, state_dir: _StateDir = None, as_json: _Json = False) -> None:
    """List all cards with the decisions about them, the oldest first."""
    with _one_sentence():
        cards, damaged = _cards(config, state_dir).all()
        if as_json:
            print(json.dumps({"cards": [_facts(kept) for kept in cards], "damaged": damaged}))
        elif not (cards or damaged):
            print("no cards yet: one is made when the server asks for a round of a job")
        else:
            for kept in cards:
                name = json.dumps(_name_of_job(kept))
                print(f"{kept.short}  {name}  model {json.dumps(_job(kept).get('model', ''))}  {_standing(kept)}")
        for sentence in damaged if not as_json else ():
            print(sentence, file=sys.stderr)


@app.command()
def show(card: _Id, config: _Config = None, state_dir: _StateDir = None, as_json: _Json = False) -> None:
    """Show a card, and its differences to the last approved one."""
    with _one_sentence():
        cards = _cards(config, state_dir)
        kept = cards.named(card)
        last = _last_approved(cards, kept)
        changes = differences(last.card.facts, kept.card.facts) if last else []
        if as_json:
            facts = _facts(kept) | {"card": kept.card.facts, "free": kept.card.free}
            compared = {"with": last.card.name, "keys": changes} if last else None
            print(json.dumps(facts | {"differences": compared}))
            return
        print(f"card {kept.card.name}, first seen {day_of(kept.seen)}: {_standing(kept)}")
        for each in kept.decisions:
            what = "approved" if each.approved else "revoked"
            until = f" until {day_of(each.until)}" if each.until else ""
            print(f"  {day_of(each.at)}: {what}{until} by {json.dumps(each.by)}, note {json.dumps(each.note)}")
        if last is None:
            print("no other card was approved here, so there is nothing to compare with")
        else:
            print(f"what differs from {last.short}, approved {day_of(_approved_at(last))}:")
            for key, old, new in changes:
                print(f"  {key}: {json.dumps(old)} -> {json.dumps(new)}")
        print(json.dumps(kept.card.facts, indent=2, sort_keys=True))
        if kept.card.free:
            print(f"free here, and not part of the card: {json.dumps(kept.card.free, sort_keys=True)}")


@app.command()
def approve(
    card: _Id,
    until: Annotated[
        str, typer.Option(help="the last day of the approval (UTC), such as 2027-03-01; without, no end")
    ] = "",
    note: Annotated[str, typer.Option(help="why, such as the number of an ethics vote; at most 1000 characters")] = "",
    config: _Config = None,
    state_dir: _StateDir = None,
) -> None:
    """Approve a card."""
    with _one_sentence():
        cards, now = _cards(config, state_dir), time.time()
        end = end_of(until) if until else 0.0
        if until and end <= now:
            raise CardError(f"--until {until} is over")
        kept = cards.decide(cards.named(card), Decision(now, end, approved=True, note=note, by=_user()))
        print(f"approved {kept.short} of {json.dumps(_name_of_job(kept))}: {_standing(kept)}")


@app.command()
def revoke(
    card: _Id,
    note: Annotated[str, typer.Option(help="why; at most 1000 characters")] = "",
    config: _Config = None,
    state_dir: _StateDir = None,
) -> None:
    """Revoke the approval of a card, so that no update leaves."""
    with _one_sentence():
        cards = _cards(config, state_dir)
        kept = cards.decide(cards.named(card), Decision(time.time(), 0.0, approved=False, note=note, by=_user()))
        print(f"revoked {kept.short} of {json.dumps(_name_of_job(kept))}")


@contextmanager
def _one_sentence() -> Iterator[None]:
    """End the program with one sentence about a fault."""
    try:
        yield
    except (CardError, ConfigError, OSError) as error:
        print(f"fl-client cards: {error}", file=sys.stderr)
        raise typer.Exit(Exit.CONFIG if isinstance(error, ConfigError) else Exit.FAILED) from None


def _cards(config: Path | None, state_dir: Path | None) -> Cards:
    if state_dir is None:
        state_dir = load_config(ClientConfig, config).config.state_dir
    if not state_dir.is_dir():
        raise ConfigError(f"there is no state folder {state_dir}: name it by --state-dir, or its --config")
    return Cards(state_dir)


def _last_approved(cards: Cards, kept: KeptCard) -> KeptCard | None:
    """Return the card that was approved last, other than this one.

    One of a job with the same name is preferred.
    """
    approved = [each for each in cards.all()[0] if each.card.name != kept.card.name and _approved_at(each)]
    alike = [each for each in approved if _name_of_job(each) == _name_of_job(kept)]
    return max(alike or approved, key=_approved_at, default=None)


def _approved_at(kept: KeptCard) -> float:
    return max((each.at for each in kept.decisions if each.approved), default=0.0)


def _job(kept: KeptCard) -> Mapping[str, Any]:
    job = kept.card.facts.get("job")
    return job if isinstance(job, dict) else {}


def _name_of_job(kept: KeptCard) -> str:
    return str(_job(kept).get("name", kept.card.free.get("name", "")))


def _facts(kept: KeptCard) -> dict[str, Any]:
    return {
        "id": kept.card.name,
        "job": _name_of_job(kept),
        "seen": kept.seen,
        "approved": not kept.refusal(time.time()),
        "why": kept.refusal(time.time()),
        "until": kept.decisions[-1].until if kept.decisions else 0.0,
        "note": kept.decisions[-1].note if kept.decisions else "",
    }


def _standing(kept: KeptCard) -> str:
    if why := kept.refusal(time.time()):
        return "waits for a decision" if not kept.decisions else why
    until = kept.decisions[-1].until
    return f"approved until {day_of(until)}" if until else "approved"


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""
