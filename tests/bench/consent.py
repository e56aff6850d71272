"""What consent costs: cards, signatures and chained logs, in processor time of a round.

    python -m tests.bench.consent [--turns 15] [--rounds 30]

A real fl-server and one real fl-client train the same small job over mutual TLS, in turns: with nothing of this, and
with approval.mode = "cards", allowed_operators, and chained logs on both sides. The first rounds of each job are left
out, in which the client loads it.
"""

import argparse
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from types import TracebackType
from typing import Any, Self

from fedring.client.consent.cards import Cards, Decision
from fedring.control.signing import sign_job
from fedring.rpc.channel import open_sync_channel
from tests.bench.lab.daemons import cpu_seconds, print_line
from tests.bench.lab.turns import alternate
from tests.fleets import Control, Programs, until_watching
from tests.pki import Pki
from tests.waiting import until

WARM = 10  # rounds that are left out
JOB: dict[str, Any] = {
    "model": "fedring.train.models:digits_mlp",
    "data": "fedring.data:digits",
    "start": "fresh",
    "min_clients": 1,
    "subset_size": 64,
    "evaluate": False,
}
ON: Mapping[str, Any] = {
    "approval": {"mode": "cards", "allowed_operators": ["operator"]},
    "audit": {"chain": True},
}


def main() -> None:
    """Measure, and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15, help="pairs of jobs")
    parser.add_argument("--rounds", type=int, default=30, help="rounds that are measured in each")
    given = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pki = Pki(folder / "pki")
        pki.issue("client-0")
        sides = {kind: stack.enter_context(Side(folder / kind, pki, on=kind == "on")) for kind in ("off", "on")}
        ways = {kind: partial(side.milliseconds, given.rounds) for kind, side in sides.items()}
        found = alternate(ways, given.turns, warm_up=1)
    names = ("client", "server")
    more = {name: [on[name] - off[name] for on, off in zip(found["on"], found["off"], strict=True)] for name in names}
    shown = {f"{name} {kind}": round(median(row[name] for row in found[kind]), 2) for kind in found for name in names}
    shown |= {f"{name} more": round(median(more[name]), 2) for name in names}
    print_line({**shown, **{f"{name} quartiles": _quartiles(more[name]) for name in names}})


class Side:
    """A server and a client, with or without consent."""

    def __init__(self, folder: Path, pki: Pki, *, on: bool) -> None:
        self._folder, self._pki, self._on = folder, pki, on
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        folder, pki, on = self._folder, self._pki, self._on
        # One thread: several that wait for each other burn time, as much as the machine is busy otherwise.
        client = {"tls": pki.table("client-0"), "threads": 1, **(ON if on else {})}
        server = {"tls": pki.table("server"), "audit_chain": on}
        self._fleet = self._stack.enter_context(Programs(folder, server, [client]))
        channel = self._stack.enter_context(open_sync_channel(self._fleet.control, pki.tls("operator")))
        self._control = self._stack.enter_context(Control(self._fleet.control, channel=channel))
        self._control.tls = pki.tls("operator")
        until_watching(self._control, 1)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    def milliseconds(self, rounds: int) -> dict[str, float]:
        """Return the processor time of a round at the client and at the server, in milliseconds."""
        control, job = self._control, JOB | {"rounds": rounds + WARM}
        events = control.events()
        job_id = (control.start_signed(sign_job(control, job)) if self._on else control.start_job(job)).job_id
        if self._on:
            approve(self._folder / "state" / "client-0")
        processes = {"client": self._fleet.clients[0], "server": self._fleet.server}
        before: dict[str, float] = {}
        for event in control.follow_job(job_id, events):
            if event.kind == "round_published" and event.state.job_round == WARM:
                before = {name: cpu_seconds([each.pid]) for name, each in processes.items()}
        after = {name: cpu_seconds([each.pid]) for name, each in processes.items()}
        if control.job(job_id).state != "completed":
            raise SystemExit(f"the job has {control.job(job_id).state}")
        return {name: 1000 * (after[name] - before[name]) / rounds for name in processes}


def _quartiles(values: list[float]) -> list[float]:
    return [round(value, 2) for value in quantiles(values, n=4)]


def approve(state_dir: Path) -> None:
    """Approve the card of the job, once."""
    cards = Cards(state_dir)
    until(lambda: cards.all()[0])
    (card,) = cards.all()[0]
    if not card.decisions:
        cards.decide(card, Decision(time.time(), 0, approved=True))


if __name__ == "__main__":
    main()
