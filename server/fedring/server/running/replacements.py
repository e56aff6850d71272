"""Replacements for lost workers of rounds' groups."""

import asyncio
from dataclasses import replace
from itertools import islice

from fedring.server.group import machine as gr
from fedring.server.round import machine as rd
from fedring.server.round.dispatch import Dispatch
from fedring.server.round.events import Enlisted, Phase
from fedring.server.round.open_round import OpenRound
from fedring.server.running.rounds import Rounds, abandon
from fedring.server.sessions.sessions import Sessions
from fedring.server.state.facts import Facts


async def look_after_groups(rounds: Rounds, sessions: Sessions, facts: Facts) -> None:
    """Replace lost workers and end hopeless rounds, until cancelled."""
    while True:
        rounds.groups.moved.clear()
        for open_ in rounds:
            if open_.group is not None and open_.group.failure:
                await abandon(rounds, open_, open_.group.failure)
            for client in replacements(open_, rounds, sessions):
                await facts.keep(enlist, rounds, Dispatch(sessions), facts, open_, client)
        waits = (open_.group.wait_seconds for open_ in rounds if open_.group is not None)
        try:
            async with asyncio.timeout(min((each for each in waits if each is not None), default=None)):
                await rounds.groups.moved.wait()
        except TimeoutError:
            for open_ in rounds:
                rounds.groups.handle(open_, gr.Tick())


def replacements(open_: OpenRound, rounds: Rounds, sessions: Sessions) -> list[str]:
    """Return clients to take the places of lost workers.

    They watch, suit the job, were not selected, their sites have approved it, and no other round has them.
    """
    state, round_ = open_.group.state if open_.group is not None else None, open_.state.round
    if state is None or round_ is None or state.phase is not gr.GroupPhase.GATHERING or not state.has_run:
        return []
    here = set(sessions.here(open_.job.clients))
    short = state.rules.target - len(here & state.expected)
    others = here.difference(open_.row.selected, rd.unapproved(open_.state, round_.rules))
    free = (client for client in sorted(others) if rounds.turns.has_room(open_, client))
    return list(islice(free, max(0, short)))


async def enlist(rounds: Rounds, dispatch: Dispatch, facts: Facts, open_: OpenRound, client: str) -> None:
    """Let one more client take part in a round."""
    async with open_.settling:
        if open_.phase is not Phase.TRAINING or not rounds.turns.has_room(open_, client):
            return
        rounds.turns.draw(open_, open_.drawn | {client})
        row = replace(open_.row, selected=tuple(sorted({*open_.row.selected, client})))
        await facts.db(facts.store.rounds.replace, row)
        open_.row = row
        rounds.handle(open_, Enlisted(client))
    dispatch.train(open_, client)
