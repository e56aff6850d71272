"""Feed every decoder of bytes from a peer or a disk, and every call of fl-server, with inputs that coverage guides.

    python -m tests.fuzz                      an hour, divided over all
    python -m tests.fuzz --seconds 60 schema  a minute for one
    python -m tests.fuzz --list               their names

What was tried is kept in .fuzz/corpus, and the next run goes on from it. What a decoder does not survive is kept in
.fuzz/found: copy it to an example of its target (tests/fuzz/wires.py, disks.py or calls.py), so that the suite tries it
from then on. Exits with 1 if anything was found.
"""

import argparse
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.conftest import ROOT
from tests.fuzz.targets import CALLS, decoders

FOLDER = ROOT / ".fuzz"
_AT_ONCE = 2
_GRACE = 600  # seconds for the imports of a process, and the end of an input


class Fed(NamedTuple):
    """The result of feeding one decoder."""

    name: str
    inputs: int
    corpus: int  # inputs that reached something new
    found: str  # the last lines of what was not survived; empty = nothing


def main() -> bool:
    """Feed the decoders that the command line names; return whether anything was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="the targets; default: all")
    parser.add_argument("--seconds", type=int, default=3600, help="in all (default: 3600)")
    parser.add_argument("--list", action="store_true", help="print the names of all targets, and exit")
    args = parser.parse_args()
    known = [*decoders(), CALLS]
    if args.list:
        print(*known, sep="\n")
        return False
    if unknown := sorted(set(args.names) - set(known)):
        parser.error(f"there is no target {unknown[0]!r}; there are {', '.join(known)}")
    names = args.names or known
    each = max(1, args.seconds * _AT_ONCE // len(names))
    table = Table("target", "inputs", "corpus", "found")
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        running = [pool.submit(feed, name, each) for name in names]
        done = [one.result() for one in track(running, "Feeding decoders", console=Console(stderr=True))]
    for fed in done:
        table.add_row(fed.name, f"{fed.inputs:,}", f"{fed.corpus:,}", fed.found or "nothing")
    Console().print(table)
    return any(fed.found for fed in done)


def feed(name: str, seconds: int) -> Fed:
    """Feed one decoder in a process of its own."""
    command = [sys.executable, "-m", "tests.fuzz.one", name, str(FOLDER), str(seconds)]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, errors="replace", timeout=seconds + _GRACE, check=False
        )
        code, said = done.returncode, done.stderr + done.stdout
    except subprocess.TimeoutExpired as error:
        code, said = -1, f"hangs: {error}"
    inputs = re.findall(r"^stat::number_of_executed_units: +(\d+)|^#(\d+)\s", said, re.MULTILINE)
    found = "" if code == 0 else "\n".join(line for line in said.splitlines() if line.strip())[-1500:]
    corpus = sum(1 for _ in (FOLDER / "corpus" / name).glob("*"))
    return Fed(name, max((int(a or b) for a, b in inputs), default=0), corpus, found)


if __name__ == "__main__":
    sys.exit(main())
