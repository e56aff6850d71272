"""protos/PROTOCOL.md lists every reason for which a client can be refused, with its status, and the true limits."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode
from tests.conftest import ROOT

from fedring.client.secure.client import POLICY as SECURE
from fedring.client.session.retry import FIRST_SECONDS, MOST_SECONDS, MOST_TRIES, RetryPolicy, Verdict
from fedring.client.transfer.fetch import POLICY as FETCH
from fedring.client.transfer.upload import DAMAGE_REASONS
from fedring.client.transfer.upload import POLICY as UPLOAD
from fedring.codec.schema import MAX_ENTRIES, MAX_TENSORS
from fedring.rpc import errors
from fedring.rpc.boundary import MOST_LETTERS
from fedring.rpc.chunks import CHUNK_BYTES
from fedring.rpc.contract import MAX_FIGURE, MAX_HEADER_BYTES, PROTOCOL, SMALL_BYTES
from fedring.server.config import ServerConfig
from fedring.server.guard.auth import REASONS
from fedring.server.sessions.sessions import MOST_CALLS, OUTBOX
from fedring.server.update.admission import MAX_BUFFER, MAX_METRICS, MAX_NORM, MAX_PACKETS
from fedring.server.update.metrics import REJECTIONS
from fedring.train.bounds import MAX_SAMPLES, MAX_SECONDS
from fedring.train.tensors.download import MAX_PACKETS as MOST_MODEL_PACKETS
from fedring.v1 import federation_pb2, job_pb2, payload_pb2, secure_pb2

PAGE = (ROOT / "protos" / "PROTOCOL.md").read_text(encoding="utf-8")
SOURCES = [
    path
    for folder in ("server/fedring/server", "common/fedring/rpc", "common/fedring/codec")
    for path in sorted((ROOT / folder).rglob("*.py"))
]

STORAGE = {"StorageError", "StorageFailed", "StoreError", "DamagedBlob"}
"""Errors of the disk. An upload that meets one is refused with RESOURCE_EXHAUSTED and the reason of the error."""

ELSEWHERE = {
    *("bad_delta", "no_accountant"),  # flctl privacy
    *("bad_role", "bad_name", "bad_duration", "unknown_token", "not_operator"),  # only flctl receives these
    *(
        "unknown_job",
        "several_jobs",
        "other_job",
        "bad_job",
        "bad_event_id",
        "no_round",
        "unknown_client",
        "client_is_here",
    ),
    *("no_residual", "bad_schema", "bad_model", "bad_encoding"),  # when a model is created, loaded or exported
    *(
        "wrong_state",
        "older_state",
        "newer_state",
        "lost_commits",
        "no_backup",
        "missing_model",
        "unreadable",
    ),  # at the start, or only in the log
    *("bad_update", "not_allowed"),  # the default reasons of their classes, which no error has
}
"""Reasons in the code that clients never receive."""


def names_of(node: ast.expr | None) -> list[str]:
    """Return the strings that an expression can be, as far as it shows them."""
    match node:
        case ast.Constant(value=str(word)):
            return [word]
        case ast.IfExp(body=body, orelse=other):
            return names_of(body) + names_of(other)
    return []


def raised(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the class and the reason of each error that a module creates."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        name, error = node.func.id, getattr(errors, node.func.id, None)
        if name == "CodecError" or name in STORAGE:
            for word in names_of(node.args[0]) if node.args else ():
                yield name, word
        elif isinstance(error, type) and issubclass(error, errors.FedringError):
            given = next((keyword.value for keyword in node.keywords if keyword.arg == "reason"), None)
            for word in names_of(given) if given is not None else [error.reason]:
                yield name, word


def status_of(name: str) -> StatusCode:
    """Return the status of a call that is refused because of this error."""
    if name == "CodecError":
        return StatusCode.INVALID_ARGUMENT
    if name in STORAGE:
        return StatusCode.RESOURCE_EXHAUSTED
    status: StatusCode = getattr(errors, name).status
    return status


def sent() -> dict[str, set[str]]:
    """Return the statuses of each reason in the code."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path in SOURCES:
        for name, reason in raised(path):
            found[reason].add(status_of(name).name)
    return dict(found)


def section(title: str) -> str:
    """Return the text below a heading."""
    return re.split(r"^#+ ", PAGE.partition(f"# {title}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def rows(text: str) -> list[list[str]]:
    """Return the cells of all tables in a text, row by row, without the headings."""
    lines = re.findall(r"^\| (.*) \|$", text, re.MULTILINE)
    return [line.split(" | ") for line in lines if not line.startswith(("reason |", "what |", "do |", "status |"))]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def documented() -> dict[str, set[str]]:
    """Return the statuses of each reason on the page."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for cells in rows(section("When a call fails")):
        if len(cells) == 4:
            for reason in quoted(cells[0]):
                found[reason] |= set(quoted(cells[1]))
    return dict(found)


def test_every_reason_that_a_client_can_receive_is_on_the_page() -> None:
    missing = sent().keys() - documented().keys() - ELSEWHERE
    assert missing == set(), "add it to PROTOCOL.md, or to ELSEWHERE if no client receives it"


def test_every_reason_on_the_page_is_in_the_code() -> None:
    others = {"internal", "bad_metrics", "damaged_blob"}  # `raised` does not find where these are set
    assert documented().keys() - sent().keys() - others == set()


def test_a_reason_has_the_status_that_the_page_says() -> None:
    code = sent()
    for reason, statuses in documented().items():
        if reason == "damaged_blob":  # the same reason in two cases
            assert statuses == {"UNAVAILABLE", "DATA_LOSS"}
        elif reason == "internal":
            assert statuses == {"INTERNAL"}
        else:
            assert statuses & code[reason], reason
            assert statuses <= code[reason] | {"RESOURCE_EXHAUSTED"}, reason


def test_every_reason_by_which_metrics_count_is_on_the_page() -> None:
    not_sent = {"bad_digest", "bad_encoding", "bad_update", "newer_state", "not_allowed", "other"}
    assert set(REJECTIONS) - not_sent - documented().keys() == set()
    assert set(REASONS) - {"not_operator"} - documented().keys() == set()


def test_clients_send_again_for_the_reasons_that_the_page_says() -> None:
    again = {
        reason
        for cells in rows(section("When a call fails"))
        if len(cells) == 4 and "*again*" in cells[3]
        for reason in quoted(cells[0])
    }
    assert again == DAMAGE_REASONS - {"unimplemented"}  # which has no reason
    meaning = next(cells[1] for cells in rows(section("When a call fails")) if cells[0] == "*again*")
    assert {3: "three times"}[MOST_TRIES] in meaning


FORM = RetryPolicy()
OWN_TABLES = {"`FetchModel`": FETCH, "`PushUpdate`": UPLOAD, "`Form`": FORM, "`SendKeys`": SECURE}
MORE_TRIES = {StatusCode.NOT_FOUND, StatusCode.INVALID_ARGUMENT}  # for which FETCH and SECURE try what is to be dropped


def advice() -> Iterator[tuple[RetryPolicy, StatusCode, str, str]]:
    """Yield the policy, the status, the reason and the advice of each row on the page that concerns its calls."""
    for title, table in re.findall(r"^(.*):\n\n((?:\|.*\n)+)", section("When a call fails"), re.MULTILINE):
        own = next((policy for name, policy in OWN_TABLES.items() if title.startswith(name)), None)
        policies = [FETCH, UPLOAD, FORM, SECURE] if title.startswith("Every call") else [own] if own else []
        for cells in rows(table):
            for policy in policies:
                yield from ((policy, StatusCode[cells[1].strip("`")], reason, cells[3]) for reason in quoted(cells[0]))
    for cells in rows(section("What gRPC itself ends")):
        for name in quoted(cells[0]):
            yield from ((policy, StatusCode[name], name.lower(), cells[2]) for policy in (UPLOAD, FORM, SECURE))


def test_clients_do_about_a_failed_call_what_the_page_says() -> None:
    words = {"*stop*": Verdict.DROP, "begin at 0": Verdict.AGAIN} | {f"*{it.value}*": it for it in Verdict}
    seen = set()
    for policy, status, reason, text in advice():
        said = text.partition(", else ")[2] or text
        wanted = {verdict for word, verdict in words.items() if word in said}
        verdict = policy.after(status, reason).verdict
        if wanted == {Verdict.DROP} and status in MORE_TRIES and policy in (FETCH, SECURE):
            wanted = {Verdict.AGAIN}
        assert {verdict} == wanted, (reason, status, text)
        seen.add(verdict)
    assert seen == set(Verdict)


def test_clients_wait_before_a_retry_as_long_as_the_page_says() -> None:
    meaning = next(cells[1] for cells in rows(section("When a call fails")) if cells[0] == "*later*")
    assert f"0 to {FIRST_SECONDS} s" in meaning
    assert f"at most {MOST_SECONDS:g} s" in meaning


DEFAULT = ServerConfig.model_fields
LIMITS: dict[str, list[float]] = {
    "a message, also when decompressed": [4 << 20],
    "sentence of a refusal": [MOST_LETTERS],
    "calls of a client at once; five will do": [MOST_CALLS],
    "clients in session": [DEFAULT["max_clients"].default],
    "uploads at once, and downloads at once, of all clients": [DEFAULT["max_transfers"].default],
    "events that wait for a client on `Watch`": [OUTBOX],
    "data of a chunk": [1, CHUNK_BYTES],
    "payload of a small update": [SMALL_BYTES],
    "model within a command, with its header": [SMALL_BYTES],
    "header of an update": [MAX_HEADER_BYTES],
    "packets of an update": [1, MAX_PACKETS],
    "`num_samples`": [1, MAX_SAMPLES],
    "metrics of an update": [MAX_METRICS, MAX_FIGURE],
    "`train_seconds`": [0, MAX_SECONDS],
    "L2 norm of an update's parameters": [MAX_NORM],
    "magnitude of an update's buffers": [MAX_BUFFER],
    "silence of a client in a round, or that is not paced": [DEFAULT["lost_after_seconds"].default],
    "silence of other clients": [DEFAULT["lost_after_seconds"].default + DEFAULT["idle_heartbeat_seconds"].default],
    "pause within an upload or a download": [DEFAULT["no_progress_seconds"].default],
    "heartbeats of a client in a round, or that is not paced": [DEFAULT["heartbeat_seconds"].default],
    "heartbeats of other clients": [DEFAULT["idle_heartbeat_seconds"].default],
}


@pytest.mark.parametrize("what", LIMITS)
def test_a_limit_is_as_the_page_says(what: str) -> None:
    (limit,) = [cells[1] for cells in rows(section("Limits")) if cells[0] == what]
    numbers = re.findall(r"(?<![\w^])\d[\d,]*(?:\.\d+)?(?:e\+\d+)?", limit)
    assert [float(number.replace(",", "")) for number in numbers] == LIMITS[what] or limit.startswith("one every")


def test_the_other_numbers_are_as_the_page_says() -> None:
    assert PAGE.startswith(f"# Protocol {PROTOCOL}\n")
    assert f"`protocol` = {PROTOCOL}" in PAGE
    assert f"at most {MOST_MODEL_PACKETS} packets" in PAGE
    assert (MAX_TENSORS, MAX_ENTRIES) == (100_000, 1 << 40)
    assert "| 100,000; 2^40 |" in PAGE


def test_every_field_that_the_documents_name_exists() -> None:
    messages: dict[str, Any] = {
        **federation_pb2.DESCRIPTOR.message_types_by_name,
        **payload_pb2.DESCRIPTOR.message_types_by_name,
        **job_pb2.DESCRIPTOR.message_types_by_name,
        **secure_pb2.DESCRIPTOR.message_types_by_name,
    }
    for document in ("PROTOCOL.md", "FORMATS.md"):
        text = (ROOT / "protos" / document).read_text(encoding="utf-8")
        for message, field in re.findall(r"`([A-Z]\w+)\.([a-z_]+)`", text):
            if message in messages:
                assert field in messages[message].fields_by_name, f"{document}: {message}.{field}"


def secure_pages() -> str:
    """Return the whole chapter on secure aggregation, with its sections."""
    return PAGE.partition("\n## Jobs with secure_aggregation\n")[2].partition("\n## ")[0]


def secure_reasons() -> set[str]:
    """Return the reasons of secure aggregation for which fedring's client fails a round."""
    sources = [
        *(ROOT / "common/fedring/secure").rglob("*.py"),
        *(ROOT / "client/fedring/client/secure").rglob("*.py"),
    ]
    return {
        word
        for path in sources
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "SecureError"
        for word in names_of(node.args[0])
    }


def test_every_reason_for_which_a_client_fails_secure_aggregation_is_on_the_page() -> None:
    assert secure_reasons() - set(quoted(secure_pages())) == set()


def test_every_check_on_the_page_is_one_that_fedring_s_client_makes() -> None:
    checks = {reason for cells in rows(secure_pages()) if len(cells) == 2 for reason in quoted(cells[1])}
    assert len(checks) >= 10
    assert checks - secure_reasons() - {f"other_{kind}" for kind in ("roster", "survivors")} == set()


def test_every_call_and_step_of_secure_aggregation_is_on_the_page() -> None:
    service = secure_pb2.DESCRIPTOR.services_by_name["SecureAggregationService"]
    steps = secure_pb2.SecureStep.DESCRIPTOR.oneofs_by_name["step"].fields
    names = {method.name for method in service.methods}
    names |= {field.message_type.name for field in steps if field.message_type}
    assert names - set(quoted(secure_pages())) == set()
    assert names


def test_the_page_names_all_files_that_a_client_needs() -> None:
    files, found = [federation_pb2.DESCRIPTOR], set[str]()
    while files:
        found.add(files[-1].name.rpartition("/")[2])
        files += files.pop().dependencies
    sentence = PAGE.partition("Generate the code of a client from ")[2].partition(" in `protos/fedring/v1`")[0]
    assert set(quoted(sentence)) == found
