"""Faults that the campaign must find: some of tests.mutants, and the kinds of jobs that reach them soonest.

    python -m tests.campaign.faults                 all of them, ten minutes each at most
    python -m tests.campaign.faults feedback commit
    python -m tests.campaign.faults --seconds 60 --seed 3

Each fault is put into a copy of the checkout, in which the campaign then runs until a promise is broken. Exits with 1
if a fault is not found.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.conftest import ROOT
from tests.mutants import MUTANTS, copy_of, put_into

KINDS_FOR = {
    "commit": ["dense"],
    "proof before sealing": ["damaged"],
    "grace": ["trained"],
    "time that is left": ["deadlines"],
    "held model": ["trained"],
    "residual of before": ["reverted_clients"],
    "feedback": ["sparse"],
    "accepted unheard": ["sparse"],
    "charge by name": ["noisy"],
    "resume secret": ["taken_over"],
    "kept secret": ["taken_over"],
    "newest of the pruned": ["forgotten"],
    "dither": ["masked"],
}
"""Names of mutants in acceptance, resume, residual, charge and publish, and the kinds of jobs to try on each."""

_GRACE = 400  # seconds for the cases that run when the time is over


def main() -> bool:
    """Try the faults that the command line names; return whether one of them was not found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"some of: {', '.join(KINDS_FOR)}")
    parser.add_argument("--seconds", type=float, default=600, help="for each fault (default: 600)")
    parser.add_argument("--seed", type=int, default=1, help="of the campaigns (default: 1)")
    args = parser.parse_args()
    if unknown := sorted({*args.names} - {*KINDS_FOR}):
        parser.error(f"there is no fault {unknown[0]!r}; there are {', '.join(KINDS_FOR)}")
    table, missed = Table("fault", "kinds", "seconds", "kills", "found by"), []
    for name in args.names or KINDS_FOR:
        seconds, kills, problem = find(name, seed=args.seed, seconds=args.seconds)
        if not problem:
            missed.append(name)
        shown = escape(problem[:120]) or "[bold]nothing"
        table.add_row(name, ", ".join(KINDS_FOR[name]), f"{seconds:.0f}", str(kills), shown)
        print(f"{name}: {seconds:.0f} s, {kills} kills: {problem[:300] or 'NOT FOUND'}", file=sys.stderr, flush=True)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    print(f"{len(missed)} not found: {', '.join(missed)}" if missed else "all were found")
    return bool(missed)


def find(name: str, *, seed: int, seconds: float) -> tuple[float, int, str]:
    """Run the campaign on a copy with the fault.

    Args:
        name: of the mutant.
        seed: of the campaign.
        seconds: in which no more case begins.

    Returns:
        The seconds and the kills until a promise was broken, and the first sentence about it; empty if none was.
    """
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        tree, results = copy_of(ROOT, Path(folder) / "tree"), Path(folder) / "results.jsonl"
        put_into(tree, MUTANTS[name])
        path = os.pathsep.join(str(tree / part) for part in ("server", "client", "common", "protos"))
        words = ["--until-failure", "--seed", str(seed), "--seconds", str(seconds), "--results", str(results)]
        command = [sys.executable, "-m", "tests.campaign", *words, "--kinds", *KINDS_FOR[name]]
        began = time.monotonic()
        subprocess.run(
            command, cwd=tree, env={**os.environ, "PYTHONPATH": path}, timeout=seconds + _GRACE, check=False,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        done = [json.loads(line) for line in results.read_text("utf-8").splitlines()] if results.exists() else []
        first = next((result for result in done if result["problems"]), None)
        until = first["at"] - first["began"] if first else time.monotonic() - began
        kills = sum(result["kills"] for result in done)
        return until, kills, first["problems"][0] if first else ""


if __name__ == "__main__":
    sys.exit(main())
