"""Sentences for operators on rounds that wait or were abandoned."""

from collections.abc import Iterable
from math import inf

from fedring.daemon.wording import counted, listed
from fedring.rpc.address import ANY_HOST
from fedring.server.round import machine as rd
from fedring.server.round.events import Phase, RoundRules, RoundState
from fedring.server.round.open_round import OpenRound
from fedring.train.jobs.labels import shown

_SECONDS = 0.5  # least time between two sentences on one round


class RoundProgress:
    """Describes the things that a round waits for.

    One sentence for each change, at most two in a second.
    """

    def __init__(self) -> None:
        self._told = ""
        self._round, self._at = 0, 0.0

    def news(self, state: RoundState, title: str, now: float) -> tuple[str, float]:
        """Return the news of a round, and when to ask again.

        Args:
            state: The machine's state.
            title: What the round is called.
            now: The time, monotonic seconds.

        Returns:
            A sentence, or "", and the seconds after which to ask again.
        """
        text = _progress(state, title)
        if not text or state.round is None or text == self._told:
            return "", inf
        if state.round.number == self._round and (left := self._at + _SECONDS - now) > 0:
            return "", left
        self._told, self._round, self._at = text, state.round.number, now
        return text, inf


def why_abandoned(open_: OpenRound, state: RoundState, away: Iterable[str], listen: str) -> str:
    """Return why the round was abandoned, for people.

    Args:
        open_: the round.
        state: the machine's state.
        away: clients that are not in session, and that the barrier could have waited for.
        listen: the address for clients, as it is configured.
    """
    round_ = state.round
    if round_ is None:
        return ""
    if open_.failures and round_.reason != "stopped":
        more = f" (and {len(open_.failures) - 1} more)" if len(open_.failures) > 1 else ""
        return f"{round_.reason}: {open_.failures[0]}{more}"
    if round_.reason == "barrier_timeout":
        rules = round_.rules
        # Nobody knows the labels of clients that are away.
        known = {*rd.suitable(state, rules), *(() if rules.labels else away)} - rules.left_out
        missing = sorted(known - set(rd.ready(state, rules)))
        unknown = rd.needed(rules) - len(known)
        return f"barrier_timeout: {_readiness(state, rules)}{_without(missing)}{_to_start(unknown, rules, listen)}"
    if round_.reason == "too_few_clients":
        have, expected = len(round_.delivered), len(round_.selected)
        return f"too_few_clients: {have} of {expected} delivered{_without(open_.missing)}"
    return round_.reason


def _progress(state: RoundState, title: str) -> str:
    round_ = state.round
    if round_ is None or round_.phase not in (Phase.WAITING, Phase.TRAINING):
        return ""
    if round_.phase is Phase.WAITING:
        return f"{title} waits for clients: {_readiness(state, round_.rules)}"
    have, expected = len(round_.delivered), len(round_.selected)
    return f"{title}: ready={have}/{expected} (min={round_.rules.min_to_aggregate})"


def _readiness(state: RoundState, rules: RoundRules) -> str:
    suitable = len(rd.suitable(state, rules))
    have, expected = len(rd.ready(state, rules)), max(suitable, rd.needed(rules))
    labels = ""
    if rules.labels:
        here = f"{suitable} of {counted(len(state.members), 'client')} here with" if suitable else "no client here has"
        labels = f"; {here} {shown(rules.labels)}"
    late = rd.late(state, rules)
    busy = f"; still at work for rounds that have ended: {listed(late)}" if late else ""
    if undecided := rd.unapproved(state, rules):
        approved = suitable - len(undecided)
        busy += f"; {approved} of {counted(suitable, 'site')} have approved the job, not yet: {listed(undecided)}"
    left_out = f"; left out for wrong shares: {listed(sorted(rules.left_out))}" if rules.left_out else ""
    return f"ready={have}/{expected} (min={rd.needed(rules)}, barrier {rules.barrier}){labels}{busy}{left_out}"


def _to_start(count: int, rules: RoundRules, listen: str) -> str:
    """Return how to start the clients that the round still lacks.

    These are clients that the server has never seen; empty if there are enough.
    """
    host, _, port = listen.rpartition(":")
    address = f"HOST:{port}" if host in ANY_HOST else listen
    server = "ADDRESS" if port == "0" else address
    who = "one more client is" if count == 1 else f"{count} more clients are"
    values = {name: value if isinstance(value, str) else value[0] for name, value in rules.labels.items()}
    labels = "".join(f" labels.{name}={value}" for name, value in sorted(values.items()))
    return f"; {who} needed: `fl-client server={server} client_id=NAME{labels}` starts one" if count > 0 else ""


def _without(missing: list[str]) -> str:
    return f", without {listed(missing)}" if missing else ""
