"""The table of flctl's verbs, whose modules are imported when a verb runs."""

import inspect
import subprocess
import sys
from pkgutil import resolve_name

import pytest

from fedring.ctl.verbs import VERBS, Verb

ALL = [verb for each in VERBS for verb in (each, *each.verbs)]
SLOW = {"grpc", "numpy", "torch", "cryptography", "matplotlib", "plotly", "sqlalchemy"}


@pytest.mark.parametrize("verb", [verb for verb in ALL if verb.target], ids=lambda verb: verb.target)
def test_the_table_says_the_same_as_the_verb(verb: Verb) -> None:
    function = resolve_name(f"fedring.ctl.{verb.target}")
    assert " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split()) == verb.help


def imported(*arguments: str) -> set[str]:
    """Return the packages that flctl imports to run with these arguments."""
    script = (
        "import sys; from fedring.ctl.main import main; code = main(sys.argv[1:]);"
        "print(code, *{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True)
    code, *names = done.stdout.splitlines()[-1].split()
    assert code == "0"
    return set(names)


@pytest.mark.programs
@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["token", "--help"], ["help", "exit-codes"]])
def test_help_imports_nothing_that_is_slow(arguments: list[str]) -> None:
    slow = SLOW - ({"grpc"} if "exit-codes" in arguments else set())
    assert imported(*arguments) & slow == set()


@pytest.mark.programs
def test_asking_a_server_imports_no_schema_of_jobs_and_no_numbers() -> None:
    script = (
        "import fedring.ctl.operate.lists, sys; print({'numpy', 'torch', 'fedring.train.jobs.job'} & {*sys.modules})"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "set()\n"
