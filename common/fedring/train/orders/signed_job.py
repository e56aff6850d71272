"""The canonical JSON of signed jobs.

    {"at":1764230400,"context":"fedring signed job 1","job":{...},"nonce":"...","run_id":"...","until":1766822400}

Keys are sorted in every table; there are no spaces, and only ASCII. The signature covers PREFIX and these bytes.
"""

import json
import secrets
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedring.train.jobs.job import Job
from fedring.v1 import job_pb2

PREFIX = b"fedring signed job 1\n"
"""Signed before the text: the same key proves its owner's identity in TLS, and must not sign for another use."""

MAX_TEXT_BYTES = 1 << 20

_DAY = 86_400


class BadOrder(Exception):
    """A site must not follow a signed job, or a command.

    Attributes:
        reason: A stable word.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class JobOrder(BaseModel):
    """A job with all of its keys, as an operator signs it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    context: Literal["fedring signed job 1"] = "fedring signed job 1"
    at: int = Field(ge=0, lt=1 << 40, description="when it was signed, in seconds since 1970")
    until: int = Field(ge=0, lt=1 << 40, description="when that ends")
    nonce: str = Field(pattern=r"^[0-9a-f]{32}$", description="names this order: a site follows it as one job only")
    run_id: str = Field(min_length=1, max_length=128, description="the server's state, as JoinReply.run_id names it")
    job: Job

    @property
    def text(self) -> bytes:
        """The canonical bytes."""
        return canonical(self.model_dump(mode="json"))


def order_of(job: Job, run_id: str, now: float) -> JobOrder:
    """Return a job as it is to be signed.

    Args:
        job: The job; all keys that it does not set have their defaults from then on.
        run_id: Of the server that is to run it.
        now: The time, in seconds since 1970.
    """
    until = int(now + job.bounds.days * _DAY)
    return JobOrder(at=int(now), until=until, nonce=secrets.token_hex(16), run_id=run_id, job=job)


def read_order(signed: job_pb2.SignedJob) -> JobOrder:
    """Return the job in a signed text.

    Its signature is not checked here.

    Raises:
        BadOrder: "bad_order", if this program cannot read it.
    """
    if len(signed.text) > MAX_TEXT_BYTES:
        raise BadOrder("bad_order", f"the signed job has {len(signed.text)} bytes, above {MAX_TEXT_BYTES}")
    try:
        return JobOrder.model_validate_json(signed.text)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the text"
        text = f"the signed job cannot be read here, at {where}: {first['msg']}"
        raise BadOrder("bad_order", f"{text}; this program may be too old for it") from None


def canonical(facts: Mapping[str, Any]) -> bytes:
    """Return the canonical bytes of JSON: sorted keys, no spaces, only ASCII.

    Raises:
        ValueError: If a number is not finite, or there are too many tables in each other.
    """
    try:
        return json.dumps(facts, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    except RecursionError:
        raise ValueError("too many lists and tables in each other") from None
