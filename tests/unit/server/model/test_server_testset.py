"""The server's own evaluation: it survives whatever the user's code does."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedring.server.config import ServerConfig
from fedring.server.model.models import Models
from fedring.server.model.testset import EvaluationFailed
from fedring.server.model.testset import TestSet as Subject  # pytest would collect it
from fedring.server.state.blobs import FileBlobs
from fedring.server.state.facts import Facts
from fedring.server.state.sql.store import Store
from fedring.train.errors import SeamError
from fedring.train.jobs.job import Job

CODE = """
from fedring.offers import offers

@offers("data")
def data(root, download):
    assert not download
    raise ValueError("the disk is not mounted")

@offers("data")
def not_a_split(root, download):
    return 3

@offers("loss")
def wrong(outputs, labels):
    raise RuntimeError("no such loss")
"""


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Subject, Models]]:
    (tmp_path / "user_testset.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    config = ServerConfig.model_validate({"state_dir": tmp_path, "trusted": ["fedring", "user_testset"]})
    facts = Facts(Store("sqlite://"), FileBlobs(tmp_path), threads=1)
    models = Models(facts.blobs, facts.pool, config, "run-1")
    yield Subject(facts.blobs, config.data_root, models.maker.offered), models
    facts.close()


def spec(**keys: Any) -> Job:
    return Job.model_validate({"evaluate_on_server": True, **keys})


def test_the_whole_test_set_is_counted(parts: tuple[Subject, Models]) -> None:
    subject, models = parts
    counts = subject.evaluate(models.maker.first(spec(), 1), spec())
    assert counts.total == 360
    assert counts.correct in range(1, 120)  # the model is not trained


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"data": "user_testset:data"}, "The data cannot be loaded: ValueError: the disk is not mounted."),
        ({"data": "user_testset:not_a_split"}, "The data callable returned a int: let it return a Split."),
        ({"data": "fedring.data:mnist"}, "data_root"),
    ],
)
def test_test_data_that_cannot_be_loaded_is_an_error_that_says_why(
    parts: tuple[Subject, Models], keys: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(SeamError, match=sentence):
        parts[0].load(spec(**keys))


def test_a_loss_that_does_not_exist_is_an_error_at_once(parts: tuple[Subject, Models]) -> None:
    with pytest.raises(SeamError, match="user_testset"):
        parts[0].load(spec(loss="user_testset:wrnog"))


def test_an_evaluation_that_fails_has_no_result_and_is_logged(
    parts: tuple[Subject, Models], caplog: pytest.LogCaptureFixture
) -> None:
    subject, models = parts
    with pytest.raises(EvaluationFailed, match=r"^RuntimeError: no such loss$"):
        subject.evaluate(models.maker.first(spec(), 1), spec(loss="user_testset:wrong"))
    assert "no such loss" in caplog.text


def test_the_samples_are_loaded_once_for_rounds_with_different_settings(parts: tuple[Subject, Models]) -> None:
    subject, _ = parts
    loaded = subject.load(spec())
    assert subject.load(spec(lr=0.5, epochs=3)) is loaded
    assert subject.load(spec(seed=3)) is not loaded
