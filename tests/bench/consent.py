"""What consent costs: cards, signatures and chained logs, in processor time of a round.

    python -m tests.bench.consent [--turns 5] [--rounds 60]

A real fl-server and one real fl-client train the same small job over mutual TLS, in turns: with nothing of this, and
with approval.mode = "cards", allowed_operators, and chained logs on both sides. Each turn has daemons of its own. The
first rounds are left out, in which each process loads the job.
"""

import argparse
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

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
    parser.add_argument("--turns", type=int, default=5, help="pairs of jobs")
    parser.add_argument("--rounds", type=int, default=60, help="rounds that are measured in each")
    given = parser.parse_args()
    ways = {kind: partial(in_folder, given.rounds, on=kind == "on") for kind in ("off", "on")}
    found = alternate(ways, given.turns)
    names = ("client", "server")
    more = {name: [on[name] - off[name] for on, off in zip(found["on"], found["off"], strict=True)] for name in names}
    shown = {f"{name} {kind}": round(median(row[name] for row in found[kind]), 2) for kind in found for name in names}
    print_line(shown | {f"{name} more": [round(value, 2) for value in sorted(more[name])] for name in names})


def in_folder(rounds: int, *, on: bool) -> dict[str, float]:
    """Call milliseconds() with a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        return milliseconds(Path(folder), rounds, on=on)


def milliseconds(folder: Path, rounds: int, *, on: bool) -> dict[str, float]:
    """Return the processor time of a round at the client and at the server, in milliseconds."""
    pki = Pki(folder / "pki")
    pki.issue("client-0")
    server = {"tls": pki.table("server"), "audit_chain": on}
    client = {"tls": pki.table("client-0"), "server": "localhost:0", **(ON if on else {})}
    with ExitStack() as stack:
        fleet = stack.enter_context(Programs(folder, server, [client]))
        channel = stack.enter_context(open_sync_channel(fleet.control, pki.tls("operator")))
        control = stack.enter_context(Control(fleet.control, channel=channel))
        control.tls = pki.tls("operator")
        until_watching(control, 1)
        job = JOB | {"rounds": rounds + WARM}
        events = control.events()
        job_id = (control.start_signed(sign_job(control, job)) if on else control.start_job(job)).job_id
        if on:
            approve(folder / "state" / "client-0")
        processes = {"client": fleet.clients[0], "server": fleet.server}
        before, began = {}, 0.0
        for event in control.follow_job(job_id, events):
            if event.kind == "round_published" and event.state.job_round == WARM:
                before, began = {name: cpu_seconds([each.pid]) for name, each in processes.items()}, time.perf_counter()
        after = {name: cpu_seconds([each.pid]) for name, each in processes.items()}
        state = control.job(job_id).state
    if state != "completed" or not began:
        raise SystemExit(f"the job has {state}")
    return {name: 1000 * (after[name] - before[name]) / rounds for name in processes}


def approve(state_dir: Path) -> None:
    """Approve the card that waits."""
    cards = Cards(state_dir)
    until(lambda: cards.all()[0])
    cards.decide(cards.all()[0][0], Decision(time.time(), 0, approved=True))


if __name__ == "__main__":
    main()
