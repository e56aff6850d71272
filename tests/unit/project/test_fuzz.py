"""Each decoder survives its examples and some damage to them: the short form of `python -m tests.fuzz`."""

from random import Random

import pytest
from tests import forks
from tests.conftest import ROOT, SEED
from tests.fuzz.targets import decoders

TARGETS = decoders()
RUNS = 200


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.filterwarnings("ignore")  # torch warns of files that it does not know
def test_a_decoder_raises_nothing_but_its_errors(name: str) -> None:
    target, random = TARGETS[name], Random(f"{SEED} {name}")
    for example in target.examples:
        target.survives(example)
    for _ in range(RUNS):
        target.survives(target.mutate(random.choice(target.examples), random))


@pytest.mark.parametrize("name", [name for name in TARGETS if name not in ("roster", "manifest")])
def test_an_example_is_accepted(name: str) -> None:
    TARGETS[name].run(TARGETS[name].examples[0])


@pytest.mark.programs
def test_no_call_ends_by_a_fault_of_the_server() -> None:
    # In a process of its own: grpc.aio has one event loop in a process, and the server's goes on until it ends.
    done = forks.run("tests.fuzz.calls", str(SEED), str(RUNS), cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
