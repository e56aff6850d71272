"""Run torch's own test suite for distributed backends on fedring, and on Gloo for comparison.

    python -m tests.torch_suite [--backends fedring,gloo] [--ranks 2] [--only PART] [--out FILE]

torch contains the suite (torch.testing._internal.distributed.distributed_test), which needs the package expecttest.
Both backends run under their own names, side by side. Some tests are skipped for each backend whose name they do not
list, although it can do what they test. Those run in a second round, without their condition on the name.

Prints how many tests pass, fail and are skipped on each backend, the reasons for skips, and which tests pass on the
last backend but not on the first. Returns 1 if a test fails on the first backend only.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
_SECONDS = 100  # the longest time of one test

_REASONS = {
    "the name of the backend": r"to be one of \{'gloo'\}|Only gloo backend supports timeouts|get_future is only"
    r"|GLOO Batch Send Recv|Only Gloo backend supports sparse|Only MPI supports",
    "GPUs": r"CUDA|[Nn]ccl|NCCL|DistributedDataParallel",
    "more ranks": r"world size",
    "a store in a file": r"file://",
    "switched off in torch": r"github\.com|flakiness",
    "another package": r"torchvision",
}
"""Why tests are skipped: what is missing, and an expression for the suite's reasons. The first one that fits counts."""


class Outcome(NamedTuple):
    """How a test ended: "passed", "failed" or "skipped", and the reason."""

    how: str
    reason: str = ""


Outcomes = dict[str, Outcome]  # by test


class Result(NamedTuple):
    """The outcomes of a backend."""

    suite: Outcomes  # of every test, as the suite has it
    any_name: Outcomes  # of those that are skipped for the name of the backend, without that condition


def main() -> int:
    """Run the suite on each backend; return 1 if a test fails on the first and not on the last one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default="fedring,gloo")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", default="", help="run tests whose names pytest selects by this expression")
    parser.add_argument("--out", type=Path, default=None, help="a JSON file of all outcomes")
    args = parser.parse_args()
    backends = args.backends.split(",")
    with ThreadPoolExecutor() as pool:
        results = dict(zip(backends, pool.map(lambda name: run(name, args.ranks, args.only), backends), strict=True))
    if args.out:
        text = {backend: result._asdict() for backend, result in results.items()}
        args.out.write_text(json.dumps({"ranks": args.ranks, **text}, indent=2) + "\n", encoding="utf-8")
    print("\n".join(report(results)))
    return bool(worse(results))


def run(backend: str, ranks: int, only: str) -> Result:
    """Run every test on the backend, and those that are skipped for its name a second time."""
    suite = _run(backend, ranks, only=only)
    named = [name for name, outcome in suite.items() if missing(outcome) == "the name of the backend"]
    named = [name for name in named if name != "test_barrier_timeout_global"]  # Gloo skips it for want of a file
    return Result(suite, _run(backend, ranks, any_name=named) if named else {})


def missing(outcome: Outcome) -> str:
    """Return what a test that was skipped lacks, as one of _REASONS, or "" if it ran."""
    if outcome.how != "skipped":
        return ""
    return next((what for what, expression in _REASONS.items() if re.search(expression, outcome.reason)), "other")


def report(results: Mapping[str, Result]) -> Iterable[str]:
    """Yield the lines of the report."""
    for backend, (suite, any_name) in results.items():
        yield f"{backend}: {_counts(suite)}; of those skipped for the name, without that condition: {_counts(any_name)}"
    yield f"\n{'skipped for want of':<23}" + "".join(f"{backend:>12}" for backend in results)
    for what in (*_REASONS, "other"):
        counts = [sum(missing(outcome) == what for outcome in result.suite.values()) for result in results.values()]
        if any(counts):
            yield f"{what:<23}" + "".join(f"{count:>12}" for count in counts)
    first, last = next(iter(results.values())), list(results.values())[-1]
    groups: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for name in last.suite:
        if last.suite[name].how == "passed" != first.suite[name].how:
            groups[first.suite[name].reason, first.any_name.get(name, Outcome("not run")).how].append(name)
    if groups:
        yield "\npasses in the suite on the last backend, and not on the first:"
    for (reason, how), names in sorted(groups.items()):
        yield f"  {len(names)} x {reason}; without the condition on the name: {how}"
        yield from (f"      {name}" for name in names)
    for name in worse(results):
        yield f"\nFAILED on the first backend only: {name}: {_failure(first, name)}"


def worse(results: Mapping[str, Result]) -> list[str]:
    """Return the tests that fail on the first backend, in one way or the other, and not on the last one."""
    first, last = next(iter(results.values())), list(results.values())[-1]
    failed = [name for name in first.suite if _failure(first, name)]
    return [name for name in failed if not _failure(last, name)] if last is not first else failed


def _run(backend: str, ranks: int, *, only: str = "", any_name: Iterable[str] = ()) -> Outcomes:
    """Return the outcomes of all tests, of those that `only` selects, or of those that `any_name` lists."""
    with tempfile.TemporaryDirectory() as folder:
        outcomes = Path(folder) / "outcomes.xml"
        cases = [f"tests/torch_suite_cases.py::TorchSuite::{name}" for name in any_name] or [
            "tests/torch_suite_cases.py"
        ]
        command = [sys.executable, "-m", "pytest", *cases, "-q", f"--junitxml={outcomes}", "--no-header"]
        command += ["-o", "filterwarnings=default", "-o", "python_files=torch_suite_cases.py", "-o", "junit_logging=no"]
        command += [f"--timeout={_SECONDS}", "--import-mode=prepend", "-p", "no:cacheprovider", "--tb=short"]
        environment = {
            **os.environ,
            "BACKEND": backend,
            "WORLD_SIZE": str(ranks),
            "SUITE_ANY_NAME": ",".join(any_name),
        }
        subprocess.run([*command, "-k", only] if only else command, cwd=ROOT, env=environment, check=False)
        return dict(_outcome(case) for case in ElementTree.parse(outcomes).iter("testcase"))


def _outcome(case: ElementTree.Element) -> tuple[str, Outcome]:
    for kind, how in (("skipped", "skipped"), ("failure", "failed"), ("error", "failed")):
        if (found := case.find(kind)) is not None:
            lines = (found.get("message") or found.text or "").strip().splitlines()
            return case.get("name", ""), Outcome(how, lines[0][:300] if lines else "")
    return case.get("name", ""), Outcome("passed")


def _counts(outcomes: Outcomes) -> str:
    counts = Counter(outcome.how for outcome in outcomes.values())
    return f"{len(outcomes)} tests" + "".join(f", {number} {how}" for how, number in sorted(counts.items()))


def _failure(result: Result, name: str) -> str:
    """Return the reason for which the test fails, or "" if it does not."""
    outcomes = [result.suite.get(name, Outcome("")), result.any_name.get(name, Outcome(""))]
    return next((outcome.reason or "no reason" for outcome in outcomes if outcome.how == "failed"), "")


if __name__ == "__main__":
    sys.exit(main())
