"""Replacements for the lost workers of a round's group, and the end of a round whose group has ended."""

import asyncio

from fedring.server.group import machine as gr
from fedring.server.round.rounds import Rounds
from fedring.server.sessions.sessions import Sessions
from fedring.server.state.facts import Facts


async def look_after_groups(rounds: Rounds, sessions: Sessions, facts: Facts) -> None:
    """Do what the state of a round's group makes necessary, until cancelled."""
    rendezvous = rounds.rendezvous
    while True:
        moved, state = rendezvous.moved, rendezvous.state
        round_ = rounds.state.round
        if state is not None and round_ is not None and round_.number == rendezvous.round:
            if state.phase is gr.Phase.ENDED and state.reason:
                await rounds.abandon(state.reason)
            for client in replacements(rounds, sessions, state):
                await facts.keep(rounds.enlist, client)
        try:
            async with asyncio.timeout(rendezvous.wait_seconds):
                await moved.wait()
        except TimeoutError:
            rounds.group(gr.Tick())


def replacements(rounds: Rounds, sessions: Sessions, state: gr.State) -> list[str]:
    """Return the clients that are to take the places of lost workers: they watch, suit the job, were not selected."""
    open_ = rounds.open
    if open_ is None or state.phase is not gr.Phase.GATHERING or not state.has_run:
        return []
    here = set(sessions.here(open_.job.clients))
    short = state.rules.target - len(here & state.expected)
    return sorted(here.difference(open_.row.selected))[: max(0, short)]
