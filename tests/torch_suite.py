"""Run torch's own test suite for distributed backends on fedring, and on Gloo for comparison.

    python -m tests.torch_suite [--backends fedring,gloo] [--ranks 2] [--only PART] [--out FILE]

torch contains the suite (torch.testing._internal.distributed.distributed_test), which needs the package expecttest.
Prints how many tests pass, fail and are skipped on each backend, and which fail on the first but not on the last one.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
_SECONDS = 300  # the longest time of one test

Outcomes = dict[str, tuple[str, str]]  # by test: "passed", "failed" or "skipped", and the reason


def main() -> int:
    """Run the suite on each backend; return 1 if a test fails on the first and not on the last one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default="fedring,gloo")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", default="", help="run tests whose names pytest selects by this expression")
    parser.add_argument("--out", type=Path, default=None, help="a JSON file of all outcomes")
    args = parser.parse_args()
    results = {backend: run(backend, args.ranks, args.only) for backend in args.backends.split(",")}
    if args.out:
        args.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    for backend, outcomes in results.items():
        counts = Counter(outcome for outcome, _ in outcomes.values())
        print(f"{backend}: {len(outcomes)} tests, " + ", ".join(f"{n} {how}" for how, n in sorted(counts.items())))
    first, last = next(iter(results.values())), list(results.values())[-1]
    worse = [name for name, (how, _) in first.items() if how == "failed" and last.get(name, ("", ""))[0] != "failed"]
    for name in worse or [name for name, (how, _) in first.items() if how == "failed"]:
        print(f"failed: {name}: {first[name][1]}")
    return bool(worse and len(results) > 1)


def run(backend: str, ranks: int, only: str) -> Outcomes:
    """Return the outcome of every test on the backend."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "tests/torch_suite_cases.py", "-q", f"--junitxml={report}"]
        command += ["-o", "filterwarnings=default", "-o", "python_files=torch_suite_cases.py", "--no-header"]
        command += [
            "-o",
            "junit_logging=no",
            f"--timeout={_SECONDS}",
            "--import-mode=prepend",
            "-p",
            "no:cacheprovider",
        ]
        environment = {**os.environ, "BACKEND": "gloo", "SUITE_BACKEND": backend, "WORLD_SIZE": str(ranks)}
        subprocess.run([*command, "-k", only] if only else command, cwd=ROOT, env=environment, check=False)
        return dict(_outcome(case) for case in ElementTree.parse(report).iter("testcase"))


def _outcome(case: ElementTree.Element) -> tuple[str, tuple[str, str]]:
    for kind, how in (("skipped", "skipped"), ("failure", "failed"), ("error", "failed")):
        if (found := case.find(kind)) is not None:
            lines = (found.get("message") or found.text or "").strip().splitlines()
            return case.get("name", ""), (how, lines[0][:300] if lines else "")
    return case.get("name", ""), ("passed", "")


if __name__ == "__main__":
    sys.exit(main())
