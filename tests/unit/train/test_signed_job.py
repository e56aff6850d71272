"""The text of a signed job: one form of all keys, which PROTOCOL.md shows."""

import json
import re

from tests.conftest import ROOT

from fedring.control.job_file import check_job
from fedring.train.jobs.job import Job
from fedring.train.orders.signed_job import JobOrder, read_order
from fedring.v1 import job_pb2

NEW_YEAR = 1_767_225_600
EXAMPLE = JobOrder(
    at=NEW_YEAR,
    until=NEW_YEAR + 30 * 86_400,
    nonce="00112233445566778899aabbccddeeff",
    run_id="6f1ed002ab5595859014ebf0951522d9",
    job=Job.model_validate({"rounds": 5, "start": "fresh"}),
)


def test_the_protocol_shows_the_bytes_of_an_example() -> None:
    page = (ROOT / "protos" / "PROTOCOL.md").read_text(encoding="utf-8")
    shown = re.search(r"<!-- signed job -->\n```\n(.*?)```\n<!-- end of the signed job -->", page, re.DOTALL)
    assert shown is not None
    lines = [EXAMPLE.text.decode()[at : at + 120] for at in range(0, len(EXAMPLE.text), 120)]
    assert shown[1].splitlines() == lines, "what the page must show"


def test_the_text_has_all_keys_in_one_form() -> None:
    told = json.loads(EXAMPLE.text)
    assert set(told["job"]) == set(Job.model_fields)
    assert json.dumps(told, sort_keys=True, separators=(",", ":")).encode() == EXAMPLE.text
    assert read_order(job_pb2.SignedJob(text=EXAMPLE.text)) == EXAMPLE


def test_characters_of_all_kinds_are_escaped() -> None:
    order = EXAMPLE.model_copy(
        update={"job": Job.model_validate({"name": "Größe 𝛼", "model_args": {"b": 1.0, "a": 1}})}
    )
    assert order.text.isascii()
    assert read_order(job_pb2.SignedJob(text=order.text)).job == order.job


def test_a_file_may_have_bounds() -> None:
    check_job({"bounds": {"lr": [0.01, 0.1], "days": 2}}, where="a file")
