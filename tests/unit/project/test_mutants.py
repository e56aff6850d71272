"""Each mutant of `python -m tests.mutants` still fits the source, and names tests that are there."""

import pytest
from tests.conftest import ROOT
from tests.mutants import MUTANTS, Mutant


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=list(MUTANTS))
def test_a_mutant_fits_the_source(mutant: Mutant) -> None:
    assert (ROOT / mutant.path).read_text("utf-8").count(mutant.old) == 1
    assert (ROOT / mutant.tests).is_file()
