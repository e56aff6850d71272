"""Let the power of a server and of its clients fail, and check that all that they have told is there.

    python -m tests.power                     500 losses of one machine, 10 of all machines at once
    python -m tests.power --losses 5000 --seed 7

A fleet is recorded once, while it trains jobs of all kinds. Each loss rebuilds a disk as it may look if the power had
failed at some moment. Exits with 1 if anything is wrong, and with 2 where a layer under programs is impossible.
"""

import argparse
import random
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.progress import track

from tests.power.losses import Recording, record_in
from tests.power.recording import JOBS
from tests.power.records import build_layer


def main() -> int:
    """Do what the command line says; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", type=int, default=500, help="of one machine (default: 500)")
    parser.add_argument("--blackouts", type=int, default=10, help="losses of all machines (default: 10)")
    parser.add_argument("--seed", type=int, default=1, help="decides when, and what is lost (default: 1)")
    args = parser.parse_args()
    errors = Console(stderr=True)
    with TemporaryDirectory() as name:
        folder = Path(name)
        if (library := build_layer(folder)) is None:
            print("this machine has no C compiler for Linux: nothing was tried", file=sys.stderr)
            return 2
        with errors.status(f"Recording {len(JOBS)} jobs"):
            record_in(folder / "fleet", library, list(JOBS))
            recording = Recording(folder / "fleet")
        faults = [f"the layer has not seen {path}" for path in recording.differences()]
        losses, lost = recording.losses(args.losses, args.seed, folder / "lost"), Counter[str]()
        for each in track(losses, "Power losses", total=args.losses, console=errors):
            lost["the server" if each.machine == "server" else "a client"] += 1
            faults += [f"{each.machine}, behind {each.at} records, {each.loss}: {fault}" for fault in each.faults]
        rng = random.Random(args.seed)
        for number in track(range(args.blackouts), "Blackouts", console=errors):
            at = rng.randrange(len(recording.records))
            found = recording.go_on(at, args.seed + number, folder / f"blackout-{number}")
            faults += [f"all machines, behind {at} records: {fault}" for fault in found]
        print(f"{len(recording.records):,} records of {len(JOBS)} jobs, {len(recording.told):,} things told")
        print(*(f"{count} power losses of {who}" for who, count in lost.items()), sep=", ", end=", ")
        print(f"{args.blackouts} of all machines: {len(faults)} faults")
        print(*faults, sep="\n", end="\n" if faults else "")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
