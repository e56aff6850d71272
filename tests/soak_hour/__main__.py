"""Train round after round with a real fl-server and real clients, and see whether anything grows.

    python -m tests.soak_hour                                an hour with 20 clients
    python -m tests.soak_hour --seconds 900 --keep-rounds 500

Memory, descriptors, threads, files and the time of a round are measured every few seconds. Prints how much each grows
in 1,000 rounds, after a warm-up; --out names a file for all samples, as JSON. Exits with 1 if something grows too fast
(tests/soak_hour/slopes.py), or if a round or a daemon fails.

The server keeps what it keeps by default. Its events fill the database in some 3,000 rounds, and the facts of its
rounds only in 10,000; until then it may grow by as much as they need. With --keep-rounds, it is full earlier.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from fedring.server.config import ServerConfig
from fedring.server.state.rows import KEEP_EVENTS
from tests.conftest import ROOT, path_to
from tests.damage import ask
from tests.fleets import Control, Fleet, until_watching
from tests.soak_hour.slopes import DATABASE, EVENTS, WARM_UP, Kept, Sample, Slope, slopes, unit_of
from tests.system.wire import vector_job

_TRUSTED = {"trusted": ["fedring", "user_trainers"]}
_JOB_ROUNDS = 50  # the models of the last ten jobs are kept: their number soon stays as it is


def main() -> int:
    """Do what the command line says; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600, help="how long (default: 3600)")
    parser.add_argument("--clients", type=int, default=20, help="how many (default: 20)")
    parser.add_argument("--every", type=float, default=10, help="seconds between two samples (default: 10)")
    parser.add_argument("--keep-rounds", type=int, help="the server's key keep_rounds (default: the server's default)")
    parser.add_argument("--out", type=Path, help="file for all samples, as JSON")
    args = parser.parse_args()
    settings = {"keep_rounds": args.keep_rounds} if args.keep_rounds else {}
    kept = args.keep_rounds or ServerConfig.model_fields["keep_rounds"].default
    samples: list[Sample] = []
    with TemporaryDirectory() as folder, Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("Rounds", total=args.seconds)
        fleet = Fleet(Path(folder), _TRUSTED | settings, [_TRUSTED] * args.clients, env=path_to(ROOT / "tests/fault"))
        for number, client in enumerate(fleet.clients):
            client.env["FL_TEST_CLIENT"] = str(number)
        with fleet:
            for sample in run(fleet, args.seconds, args.every):
                samples.append(sample)
                text = f"{sample.rounds:,} rounds"
                progress.update(task, completed=min(args.seconds, sample.seconds), description=text)
            failure = fleet.failure()
    found = slopes(samples, Kept(args.clients, kept, KEEP_EVENTS, _JOB_ROUNDS))
    if args.out:
        words = {"clients": args.clients, "keep_rounds": kept, "samples": [asdict(each) for each in samples]}
        args.out.write_text(json.dumps(words | {"slopes": [asdict(each) for each in found]}, indent=1) + "\n")
    show(samples, found)
    if failure:
        print(failure, file=sys.stderr)
    return bool(failure) or any(each.too_steep for each in found)


def run(fleet: Fleet, seconds: float, every: float) -> Iterator[Sample]:
    """Train jobs one after another, and yield a sample of the fleet every so often.

    Raises:
        RuntimeError: If a job fails.
    """
    keys = {"encoding": "packed", "trainer": "user_trainers:lesson", "start": "newest", "deadline_seconds": 240}
    job = vector_job(rounds=_JOB_ROUNDS, min_clients=len(fleet.clients), **keys)
    with Control(fleet.control) as control:
        until_watching(control, len(fleet.clients))
        began, done, current, rounds_before = time.monotonic(), 0, control.start_job(job).job_id, 0
        before = 0.0
        while before < seconds and fleet.failure() is None:
            Event().wait(every)
            state = control.job(current)
            rounds = done + state.rounds_done
            if state.state == "completed":
                done, current = rounds, control.start_job(job).job_id
            elif state.state not in ("queued", "running"):
                raise RuntimeError(f"job {current}: {state.state}: {state.reason}")
            now = time.monotonic() - began
            figures = measure(fleet)
            if rounds > rounds_before:
                figures["round"] = 1000 * (now - before) / (rounds - rounds_before)
            yield Sample(now, rounds, figures)
            before, rounds_before = now, rounds


def measure(fleet: Fleet) -> dict[str, float]:
    """Return all figures of a fleet but the time of a round; those of its clients are means."""
    found: dict[str, Any] = {}
    clients = [_process(client.pid) for client in fleet.clients]
    for name, value in _process(fleet.server.pid).items():
        found[f"server {name}"] = value
        found[f"client {name}"] = sum(each[name] for each in clients) / len(clients)
    folder = Path(fleet.server.settings["state_dir"])
    server = _sizes(folder)
    database = {name: size for name, size in server.items() if name.startswith("facts.sqlite")}
    log = database.pop("facts.sqlite-wal", 0)
    found["server files"] = len(server)
    found["server disk without the database"] = (sum(server.values()) - sum(database.values()) - log) / 1e6
    found[DATABASE], found["server log of the database"] = sum(database.values()) / 1e6, log / 1e6
    ((found[EVENTS],),) = ask(folder, "SELECT count(*) FROM events")
    sizes = [sum(_sizes(Path(client.settings["state_dir"])).values()) for client in fleet.clients]
    found["client disk"] = sum(sizes) / len(sizes) / 1e6
    return found


def show(samples: list[Sample], found: list[Slope]) -> None:
    """Print a table of the slopes."""
    table = Table("figure", "mean", "in 1,000 rounds", "standard error", "limit", "")
    for each in found:
        unit, verdict = unit_of(each.figure), "too steep" if each.too_steep else ""
        values = (f"{value:+.3f} {unit}" for value in (each.per_thousand, each.error, each.limit))
        table.add_row(each.figure, f"{each.mean:,.2f} {unit}", *values, verdict)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    last = samples[-1]
    print(f"{last.rounds:,} rounds in {last.seconds:,.0f} s; the first {100 * WARM_UP:.0f} % of the time do not count")


def _process(pid: int) -> dict[str, float]:
    """Return the memory of a process in MB, and how many descriptors and threads it has."""
    words = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text("utf-8").splitlines())
    memory, threads = int(words["VmRSS"].split()[0]) * 1024 / 1e6, int(words["Threads"])
    return {"memory": memory, "descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir())), "threads": threads}


def _sizes(folder: Path) -> dict[str, int]:
    """Return the sizes of all files below a folder, in bytes."""
    found: dict[str, Any] = {}
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # the daemon has just removed it
            if path.is_file():
                found[str(path.relative_to(folder))] = path.stat().st_size
    return found


if __name__ == "__main__":
    sys.exit(main())
