"""What operators read about a round that waits, and about one that was abandoned."""

from dataclasses import replace
from functools import reduce
from math import inf
from typing import Any

import pytest
from tests.opened_rounds import opened

from fedring.server.round.events import Abandoned, Event, Joined, Matched, RoundOpened, RoundRules, RoundState, Started
from fedring.server.round.machine import apply
from fedring.server.round.progress import RoundProgress, why_abandoned

OPENED = RoundOpened(7, RoundRules(min_clients=2))
LISTEN = "10.0.0.5:8443"

TITLE = "round 2 of job 4"


def after(*events: Event, state: RoundState | None = None) -> RoundState:
    return reduce(lambda before, event: apply(before, event, 0.0), events, state or RoundState())


class TestProgress:
    def test_each_change_is_reported_once_and_at_most_twice_per_second(self) -> None:
        progress, alone = RoundProgress(), after(Matched("a"), OPENED)
        text = f"{TITLE} waits for clients: ready=1/2 (min=2, barrier matched)"
        assert progress.news(alone, TITLE, 10.0) == (text, inf)
        assert progress.news(alone, TITLE, 20.0) == ("", inf)
        joined = after(Joined("b"), Joined("c"), state=alone)
        assert progress.news(joined, TITLE, 10.25) == ("", 0.25)
        assert progress.news(joined, TITLE, 10.5)[0] == text.replace("1/2", "1/3")

    @pytest.mark.parametrize("rules", [{"barrier": "none"}, {"carried": frozenset("b")}])
    def test_the_number_that_decides_is_shown(self, rules: dict[str, Any]) -> None:
        waiting = after(replace(OPENED, rules=replace(OPENED.rules, min_clients=3, **rules)))
        text = RoundProgress().news(waiting, TITLE, 10.0)[0]
        assert text.startswith(f"{TITLE} waits for clients: ready=0/1 (min=1, barrier ")
        why = why_abandoned(opened(), after(Abandoned("barrier_timeout"), state=waiting), (), LISTEN)
        assert "ready=0/1 (min=1, " in why
        assert "; one more client is needed: " in why

    def test_a_new_round_is_reported_at_once(self) -> None:
        progress = RoundProgress()
        progress.news(after(OPENED), TITLE, 10.0)
        assert progress.news(after(replace(OPENED, number=8)), "round 3 of job 4", 10.1)[0].startswith(
            "round 3 of job 4 waits"
        )

    def test_while_a_round_trains_its_deliveries_are_counted(self) -> None:
        state = after(Matched("a"), Matched("b"), OPENED, Started(frozenset("ab")))
        assert RoundProgress().news(state, TITLE, 10.0)[0] == f"{TITLE}: ready=0/2 (min=1)"

    def test_nothing_is_reported_without_a_round(self) -> None:
        assert RoundProgress().news(RoundState(), "", 10.0) == ("", inf)


class TestWhyARoundWasAbandoned:
    def test_after_a_timeout_of_the_barrier_all_clients_that_were_not_ready_are_named(self) -> None:
        state = after(Matched("a"), Joined("b"), OPENED, Abandoned("barrier_timeout"))
        expected = "barrier_timeout: ready=1/2 (min=2, barrier matched), without b, zoe"
        assert why_abandoned(opened(), state, ("a", "zoe"), LISTEN) == expected

    @pytest.mark.parametrize(
        ("min_clients", "listen", "hint"),
        [
            (2, LISTEN, "one more client is needed: `fl-client server=10.0.0.5:8443 client_id=NAME` starts one"),
            (4, "0.0.0.0:8443", "3 more clients are needed: `fl-client server=HOST:8443 client_id=NAME` starts one"),
            (2, "127.0.0.1:0", "one more client is needed: `fl-client server=ADDRESS client_id=NAME` starts one"),
        ],
    )
    def test_if_too_few_clients_are_known_the_command_that_starts_one_is_named(
        self, min_clients: int, listen: str, hint: str
    ) -> None:
        opened_round = replace(OPENED, rules=replace(OPENED.rules, min_clients=min_clients))
        state = after(Matched("a"), opened_round, Abandoned("barrier_timeout"))
        assert why_abandoned(opened(), state, (), listen).endswith(f"; {hint}")

    def test_if_many_clients_are_missing_some_of_them_are_named(self) -> None:
        names = [f"client-{number:02}" for number in range(13)]
        state = after(OPENED, Started(frozenset(names)), Abandoned("too_few_clients"))
        text = why_abandoned(opened(*names), state, (), LISTEN)
        assert text == f"too_few_clients: 0 of 13 delivered, without {', '.join(names[:10])} and 3 more"

    def test_the_failure_of_a_client_is_given_as_the_cause(self) -> None:
        state = after(Matched("a"), OPENED, Started(frozenset("a")), Abandoned("too_few_clients"))
        open_ = opened("a", failures=("a could not train: no_data: Set data_root.", "b could not, either"))
        expected = "too_few_clients: a could not train: no_data: Set data_root. (and 1 more)"
        assert why_abandoned(open_, state, (), LISTEN) == expected
        assert why_abandoned(open_, after(OPENED, Abandoned("stopped")), (), LISTEN) == "stopped"
