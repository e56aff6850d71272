"""The bounds of a job's keys: no value passes that the wire, the database or JSON could not carry."""

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from fedring.daemon.config import ConfigError, explain, parse_overrides, read_document
from fedring.train.bounds import MAX_COUNT, MAX_DEPTH, MAX_JOB_BYTES, MAX_SAMPLES, MAX_SEED, MAX_WHOLE
from fedring.train.jobs.data_parallel_table import DataParallel
from fedring.train.jobs.job import Job
from fedring.train.jobs.pipeline_table import MAX_CELLS, Pipeline
from fedring.train.orders.commands import job_spec, train_cmd

TABLES: dict[str, type[BaseModel]] = {"": Job, "data_parallel": DataParallel, "pipeline": Pipeline}


def keys_of(kind: str) -> Iterator[tuple[str, str]]:
    """Yield the table and the name of every key of a job that takes a value of this JSON type."""
    for table, model in TABLES.items():
        for name, schema in model.model_json_schema()["properties"].items():
            if kind in {each.get("type") for each in (schema, *schema.get("anyOf", ()))} and "enum" not in schema:
                yield table, name


def refusal(table: str, **keys: Any) -> str:
    """Return why a job with these keys is refused, as its sender reads it."""
    with pytest.raises(ValidationError) as refused:
        Job.model_validate({table: keys} if table else keys)
    sentence = explain(refused.value, {}, Job)
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize(("table", "name"), list(keys_of("integer")))
def test_every_integer_has_bounds(table: str, name: str) -> None:
    for value in (10**20, 2**63, -(10**20), 10**1000):
        assert refusal(table, **{name: value}).startswith(f"{table}.{name}: " if table else f"{name}: ")


@pytest.mark.parametrize(("table", "name"), list(keys_of("number")))
def test_every_number_is_finite(table: str, name: str) -> None:
    for value in (math.nan, math.inf, -math.inf):
        assert refusal(table, **{name: value}).startswith(f"{table}.{name}: " if table else f"{name}: ")


@pytest.mark.parametrize(("table", "name"), list(keys_of("string")))
@pytest.mark.parametrize("text", ["a\0b", "a\nb", "a\x1b[2J", "a\x7f", "a\u2028b", "\ud800"])
def test_every_text_is_one_line_without_control_characters(table: str, name: str, text: str) -> None:
    assert refusal(table, **{name: text}).startswith(f"{table}.{name}: " if table else f"{name}: ")


@pytest.mark.parametrize("keys", [{"cut": [10**20, 1]}, {"cut": ["a\0b"]}, {"warmups": [10**20, 1]}])
def test_the_items_of_lists_have_bounds_too(keys: dict[str, Any]) -> None:
    assert refusal("pipeline", **keys).startswith(f"pipeline.{next(iter(keys))}")


def test_names_in_any_language_are_kept_as_they_are() -> None:
    name = "Zürich \N{EM DASH} 東京 \N{GRINNING FACE}"
    assert Job.model_validate({"name": name}).name == name


def test_the_largest_values_fit_the_wire() -> None:
    counts = ("epochs", "batch_size", "min_clients", "sample_clients", "min_clients_to_aggregate", "max_abandoned")
    keys = {"rounds": 1_000_000, "seed": MAX_SEED, "subset_size": MAX_SAMPLES, **dict.fromkeys(counts, MAX_COUNT)}
    job = Job.model_validate(keys)
    command = train_cmd(job, job_spec(job, 2**63 - 1), number=2**63 - 1, job_round=job.rounds)
    assert (command.epochs, command.batch_size, command.subset_size) == (MAX_COUNT, MAX_COUNT, MAX_SAMPLES)
    assert command.seed == MAX_SEED * 1_000_003 + job.rounds < 2**63
    assert command.job.seed == MAX_SEED


def nested(depth: int, *, of: Any = 1) -> Any:
    """Return a value nested in so many tables and lists."""
    for level in range(depth):
        of = {"a": of} if level % 2 else [of]
    return of


TABLES_OF_ANYTHING = [("", "model_args"), ("server_optimizer", "args")]


@pytest.mark.parametrize(("table", "name"), TABLES_OF_ANYTHING)
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (nested(MAX_DEPTH), "MAX_DEPTH = 16 levels of lists and tables"),
        (nested(100_000), "MAX_DEPTH = 16 levels of lists and tables"),
        (2**63, "x in it must be a number from -(2^63 - 1) to 2^63 - 1"),
        (-(10**1000), "x in it must be a number from"),
        ([1.0, {"y": math.inf}], "x.1.y in it must be a finite number, and is inf"),
        (math.nan, "x in it must be a finite number, and is nan"),
        ("a\0", "x in it must be text without NUL"),
        (["\ud800"], "x.0 in it must be text without NUL"),
        ({"a\nb": 1}, "a key in it must not hold the character U+000A"),
        (b"bytes", "x in it must be text, a number, true, false, a list or a table"),
    ],
)
def test_a_table_of_free_content_refuses_what_json_cannot_hold(table: str, name: str, value: Any, words: str) -> None:
    sentence = refusal(table, **{name: {"x": value}})
    assert sentence.startswith(f"{table}.{name}: " if table else f"{name}: ")
    assert words in sentence


def test_a_table_of_free_content_takes_what_json_can_hold() -> None:
    value = {
        "x": nested(MAX_DEPTH - 1),
        "whole": -MAX_WHOLE,
        "text": "two\nlines",
        "none": None,
        "on": True,
        "f": 1e308,
    }
    job = Job.model_validate({"model_args": value})
    assert json.loads(job_spec(job, 1).model_args) == value


def test_the_error_about_a_long_job_names_the_longest_key() -> None:
    sentence = refusal("", model_args={"text": "x" * MAX_JOB_BYTES})
    assert f"above MAX_JOB_BYTES = {MAX_JOB_BYTES}, most of them in model_args" in sentence
    assert len(sentence) < 300


def test_a_schedule_that_is_too_large_to_simulate_is_refused_at_once() -> None:
    sentence = refusal("pipeline", stages=2, micro_batches=MAX_COUNT)
    assert f"2 stages times {MAX_COUNT} micro_batches are above MAX_CELLS = {MAX_CELLS}" in sentence


@pytest.mark.parametrize("name", ["deep.json", "deep.toml"])
def test_a_file_that_is_nested_too_deep_is_refused(tmp_path: Any, name: str) -> None:
    path = tmp_path / name
    path.write_text(("" if name.endswith("json") else "x = ") + "[" * 100_000)
    with pytest.raises(ConfigError, match="too many lists and tables in each other"):
        read_document(path)


def test_an_override_that_is_nested_too_deep_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the value of 'job\.model_args' holds too many lists and tables"):
        parse_overrides(["job.model_args=" + "[" * 100_000])
