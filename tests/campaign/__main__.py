"""Run random jobs of all kinds, do all kinds of harm to them, and check the promises of docs/reliability.md.

    python -m tests.campaign                             twenty minutes, with a seed of its own
    python -m tests.campaign --seconds 3600 --seed 7     an hour; the same cases as in every run with this seed
    python -m tests.campaign --seed 7 --case 12          one case of that run again
    python -m tests.campaign --kinds sparse noisy        some kinds of jobs only
    python -m tests.campaign --summary                   what all runs have found so far

Each case is a job on a real server with real clients, each of which has a line of its own to the server. A seed says
what is done and when; how far the daemons have come by then differs from run to run. Results are appended to a
file, and the folders of failed cases stay in .campaign. Exits with 1 if a promise was broken.
"""

import argparse
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import count
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from tests.campaign import layer, results
from tests.campaign.case import Outcome, kind_of, run_case
from tests.campaign.kinds import KINDS
from tests.conftest import ROOT

RESULTS = ROOT / "campaign-results.jsonl"
FOLDER = ROOT / ".campaign"
_AT_ONCE = 2


def main() -> bool:
    """Run what the command line asks for; return whether a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1200, help="no case begins later than that (default: 1200)")
    parser.add_argument("--seed", type=int, help="from which all cases follow (default: drawn)")
    parser.add_argument("--case", type=int, help="the number of the only case to run")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="of jobs (default: all)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file that results are appended to")
    parser.add_argument("--until-failure", action="store_true", help="end with the first case that fails")
    parser.add_argument("--summary", action="store_true", help="print the tables of all results, and run nothing")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # an end at which forks are killed
    console = Console(width=None if sys.stdout.isatty() else 160)
    if args.summary:
        results.show(results.read(args.results), console)
        return False
    if not layer.is_loaded():
        layer.load(FOLDER, "tests.campaign", sys.argv[1:])
        console.print(
            "No C compiler for Linux: no clock jumps, no sync fails, and no disk of a client.", style="yellow"
        )
    seed = random.SystemRandom().randrange(1 << 31) if args.seed is None else args.seed
    console.print(f"seed {seed}")
    numbers = count() if args.case is None else iter([args.case])
    done, began = [], time.time()
    for outcome in run_cases(seed, numbers, args.kinds, args.seconds, FOLDER, console):
        result = {**outcome.as_json(), "began": began, "at": time.time()}
        results.append(args.results, result)
        done.append(result)
        for problem in outcome.problems:
            console.print(f"{outcome.command}\n  {problem}", style="bold red", markup=False, soft_wrap=True)
        if outcome.problems and args.until_failure:
            break
    results.show(done, console)
    return any(result["problems"] for result in done)


def run_cases(
    seed: int, numbers: Iterator[int], kinds: list[str], seconds: float, folder: Path, console: Console
) -> Iterator[Outcome]:
    """Run cases, two at once, until the numbers or the time are over; yield each one's outcome when it has ended."""
    ends, running = time.monotonic() + seconds, set[Future[Outcome]]()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with ThreadPoolExecutor(_AT_ONCE) as pool, Progress(*columns, console=console, transient=True) as progress:
        bar, kills = progress.add_task("Harming fleets", total=seconds), 0
        more = True
        while more or running:
            while more and len(running) < _AT_ONCE:
                number = next(numbers, None) if time.monotonic() < ends else None
                if more := number is not None:
                    assert number is not None
                    kind = kind_of(seed, number, kinds)
                    place = folder / f"{seed}-{number}-{kind}"
                    shutil.rmtree(place, ignore_errors=True)
                    running.add(pool.submit(run_case, seed, number, kind, place))
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                outcome = future.result()
                kills += outcome.kills
                shown = min(seconds, seconds - (ends - time.monotonic()))
                progress.update(bar, completed=shown, description=f"case {outcome.number}, {kills} kills")
                yield outcome


if __name__ == "__main__":
    sys.exit(main())
