"""Errors in words: fedring's own, and those of a job's code."""

import sys

import pytest

from fedring.client.errors import RoundOver, UpdateRefused
from fedring.codec import CodecError
from fedring.data import DataError
from fedring.job_code import CodeEnded
from fedring.server.state.failures import StorageError
from fedring.train.errors import SeamError, TrainError, failure_detail


@pytest.mark.parametrize("own", [SeamError, TrainError, DataError, CodecError, StorageError, RoundOver, UpdateRefused])
def test_the_text_of_fedrings_own_errors_says_all(own: type[Exception]) -> None:
    error = own("a_word", "The file is not there.")
    assert failure_detail(error) == str(error)
    assert type(error).__name__ not in failure_detail(error)


class Coded(ValueError):
    """An error of somebody's code, which looks like one of fedring's own."""

    reason = "bad_model"


@pytest.mark.parametrize("error", [Coded("no"), ValueError("no"), KeyError("no"), CodeEnded("no")])
def test_other_errors_are_told_with_their_type(error: Exception) -> None:
    error.add_note("in batch 3")
    assert failure_detail(error) == f"{type(error).__name__}: {error}; in batch 3"


class Silent(Exception):
    """An error that cannot say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Leaving(Exception):
    """An error that ends the program when it is asked what it is."""

    def __str__(self) -> str:
        sys.exit(3)


def test_an_error_that_fails_to_say_its_text_is_told_by_its_type() -> None:
    assert failure_detail(Silent()) == "Silent, whose text cannot be told (RuntimeError)"
    assert failure_detail(Leaving()) == "Leaving, whose text cannot be told (CodeEnded)"
