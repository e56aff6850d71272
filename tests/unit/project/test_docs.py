"""What the documentation names exists: keys, variables, metrics, files, links, modules."""

import ast
import importlib.util
import re
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError
from tests.conftest import ROOT
from tests.pages import PAGES, Page

from fedring.client.config import ClientConfig, CodeLimits
from fedring.client.consent.approval import Approval
from fedring.client.consent.audit import AuditTable
from fedring.client.metrics import ClientMetrics
from fedring.client.policy.privacy import SitePolicy
from fedring.ctl.main import flctl
from fedring.ddp import hooks
from fedring.ring.options import RingOptions
from fedring.rpc.tls import Tls
from fedring.server.config import ServerConfig
from fedring.server.guard.auth import REASONS
from fedring.server.operator.summaries import event_summary, job_summary, round_summary
from fedring.server.parts import server_metrics
from fedring.server.state.rows import JobRow
from fedring.server.update.metrics import REJECTIONS
from fedring.simulation.timing import Timing
from fedring.train.jobs.aggregation_table import RULES, Aggregation
from fedring.train.jobs.asynchronous_table import Asynchronous
from fedring.train.jobs.bounds_table import Bounds
from fedring.train.jobs.data_parallel_table import HOOKS, DataParallel
from fedring.train.jobs.job import Job
from fedring.train.jobs.job_keys import ServerOptimizer
from fedring.train.jobs.personal_table import Personal
from fedring.train.jobs.pipeline_table import Pipeline
from fedring.train.jobs.privacy_table import ClientPrivacy
from fedring.train.jobs.round_settings import SettingSchedule
from fedring.train.jobs.sample_privacy_table import SamplePrivacy
from fedring.train.jobs.secure_table import SecureAggregation
from fedring.v1 import control_pb2
from fedring.workers.pipeline_profile import PipelineProfile
from fedring.workers.usage import Usage

TABLES: dict[type[BaseModel], str] = {
    ServerConfig: "",
    ClientConfig: "",
    RingOptions: "",
    Tls: "tls",
    Job: "job",
    Aggregation: "aggregation",
    ClientPrivacy: "dp",
    SecureAggregation: "secure_aggregation",
    SamplePrivacy: "sample_dp",
    Asynchronous: "asynchronous",
    SitePolicy: "privacy",
    CodeLimits: "training",
    Approval: "approval",
    AuditTable: "audit",
    DataParallel: "data_parallel",
    Pipeline: "pipeline",
    ServerOptimizer: "server_optimizer",
    Personal: "personal",
    SettingSchedule: "lr",
    Bounds: "bounds",
}
SHIPPED = [
    path for path in sorted((ROOT / "deploy").rglob("*")) if path.is_file() and path.suffix not in (".json", ".pyc")
]
of_each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@of_each_page
def test_every_link_has_a_target(page: Page) -> None:
    for link in page.links:
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.path.parent / name).resolve() if name else page.path
        assert target.exists(), link
        assert not anchor or anchor in Page(target).anchors, link


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached: set[str] = set()
    waiting = ["README.md"]
    while waiting:
        name = waiting.pop()
        if name in reached or not name.endswith(".md"):
            continue
        reached.add(name)
        page = Page(ROOT / name)
        targets = [(page.path.parent / link.partition("#")[0]).resolve() for link in page.links if ":" not in link]
        waiting += [str(target.relative_to(ROOT)) for target in targets]
    assert {page.name for page in PAGES} - reached == set()


def test_every_figure_is_shown_on_a_page() -> None:
    shown = {(page.path.parent / link).resolve() for page in PAGES for link in page.links if link.endswith(".png")}
    assert {path.name for path in (ROOT / "docs" / "figures").iterdir() if path not in shown} == set()


@of_each_page
def test_every_file_that_is_named_exists(page: Page) -> None:
    named = re.compile(r"(?:client|common|deploy|docs|protos|server|tests)/[\w./-]+")
    words = [word for quoted in page.quoted for word in quoted.split()]
    words += [word for language, text in page.blocks if language == "sh" for word in text.split()]
    assert {word for word in words if named.fullmatch(word) and not (ROOT / word).exists()} == set()


@of_each_page
def test_every_target_of_make_that_is_named_exists(page: Page) -> None:
    makefiles = (ROOT / "Makefile").read_text() + (ROOT / "deploy" / "systemd" / "install.mk").read_text()
    text = "\n".join([*page.quoted, page.shell()])
    for target in re.findall(r"(?:^|sudo )make ([\w-]+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefiles, re.MULTILINE), target


@of_each_page
def test_every_module_that_is_run_exists(page: Page) -> None:
    for module in re.findall(r"python -m ([\w.]+)", page.text):
        assert importlib.util.find_spec(module), module
    for script in re.findall(r"python ([\w/]+\.py)", page.text):
        assert (ROOT / script).is_file(), script


@of_each_page
def test_everything_that_python_examples_import_exists(page: Page) -> None:
    for text in [text for language, text in page.blocks if language == "python"]:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(str(node.module))
                for alias in node.names:
                    found = hasattr(module, alias.name) or importlib.util.find_spec(f"{node.module}.{alias.name}")
                    assert found, f"{node.module}.{alias.name}"
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    importlib.import_module(alias.name)


@of_each_page
def test_every_toml_example_is_a_configuration_a_job_or_a_timing(page: Page) -> None:
    models: list[type[BaseModel]] = [ServerConfig, ClientConfig, Job, Timing]
    for text in page.toml():
        table = tomllib.loads(text)
        complaints = [complaint for model in models if (complaint := refused(model, table))]
        assert len(complaints) < len(models), f"{text}\n{complaints}"


def refused(model: type[BaseModel], table: Any) -> str:
    """Return why the model refuses the table; "" if it accepts it."""
    try:
        model.model_validate(table)
    except ValidationError as error:
        return str(error)
    return ""


def fields(key: str) -> Iterator[TypeAdapter[Any]]:
    """Yield the type of a key in each table that has it. The key is given with or without its table."""
    table, _, name = key.rpartition(".")
    for model, prefix in TABLES.items():
        if name in model.model_fields and table in ("", prefix, f"job.{prefix}"):
            field = model.model_fields[name]
            kind: Any = Annotated[field.annotation, field]
            yield TypeAdapter(kind)


def fits(adapter: TypeAdapter[Any], value: object) -> bool:
    try:
        adapter.validate_python(value)
    except ValidationError:
        return False
    return True


@of_each_page
def test_every_key_that_is_shown_with_a_value_exists_and_accepts_the_value(page: Page) -> None:
    for quoted in page.quoted:
        if (found := re.fullmatch(r"\[?([a-z][a-z_.]*)\]? ?= ?([\w\"'\[{.-].*)", quoted)) and "(" not in quoted:
            try:
                value = tomllib.loads(f"value = {found[2]}")["value"]
            except tomllib.TOMLDecodeError:  # text, as in key=value on a command line
                value = found[2]
            assert any(fits(adapter, value) for adapter in fields(found[1])), quoted


@of_each_page
def test_every_table_that_is_named_exists(page: Page) -> None:
    named = {found[1] for quoted in page.quoted if (found := re.fullmatch(r"\[([a-z_]+)\]", quoted))}
    assert named - set(TABLES.values()) == set()


@cache
def variables() -> frozenset[str]:
    """Return every environment variable that fedring's programs and tests read."""
    names = {f"FEDRING_SERVER_{key}" for key in ServerConfig.model_fields}
    names |= {f"FEDRING_SERVER_JOB__{key}" for key in Job.model_fields}
    names |= {f"FEDRING_CLIENT_{key}" for key in ClientConfig.model_fields}
    names |= {f"FEDRING_{daemon}_TLS__{key}" for daemon in ("SERVER", "CLIENT") for key in Tls.model_fields}
    names |= {f"FEDRING_RING_{key}" for key in RingOptions.model_fields}
    queue: list[Any] = [flctl]
    while queue:
        command = queue.pop()
        queue += [inner.loaded for inner in getattr(command, "commands", {}).values()]
        names |= {option.envvar for option in command.params if option.envvar}
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    names |= set(re.findall(r'environ\.get\("(FEDRING_\w+)"', tests))
    return frozenset(name.upper() for name in names)


@pytest.mark.parametrize("text", [page.path for page in PAGES] + SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_environment_variable_that_is_named_is_read(text: Any) -> None:
    named = set(re.findall(r"\b(?:FEDRING|FLCTL)_[A-Z0-9_]+[A-Z0-9]\b", text.read_text()))
    assert {name for name in named if name not in variables() and f"{name}_" not in PREFIXES} == set()


PREFIXES = {"FEDRING_SERVER_", "FEDRING_CLIENT_", "FEDRING_RING_"}


@of_each_page
def test_every_metric_that_is_named_is_declared(page: Page) -> None:
    kinds: list[Callable[[], Any]] = [server_metrics, ClientMetrics]
    declared = {sample for kind in kinds for metric in kind().registry.collect() for sample in samples(metric)}
    named = {re.sub(r"\{.*", "", quoted) for quoted in page.quoted if re.match(r"(fl|grpc)_[a-z_]+(\{|$)", quoted)}
    labels = {"grpc_method", "grpc_code"}
    assert named - declared == (named & labels)


def samples(metric: Any) -> set[str]:
    """Return the names under which Prometheus knows a metric."""
    endings = {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"], "summary": ["_count", "_sum"]}
    return {metric.name, *(metric.name + ending for ending in endings.get(metric.type, ["_info"]))}


def test_the_page_that_documents_all_keys_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    assert reference.TARGET.read_text(encoding="utf-8") == reference.render()


def first_cells(page: str, section: str) -> set[str]:
    """Return what is quoted in the first column of the tables below a title."""
    text = re.split(r"^#+ ", (ROOT / "docs" / page).read_text().partition(f"# {section}\n")[2], flags=re.MULTILINE)[0]
    rows = re.findall(r"^\|([^|]*)\|", re.sub(r".*\n\|-.*\n", "", text), re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_every_refusal_of_a_caller_is_documented() -> None:
    page = (ROOT / "docs" / "security.md").read_text().partition("## Refusals")[2]
    assert [reason for reason in REASONS if f"| `{reason}`" not in page] == []


def test_every_documented_refusal_of_an_update_exists() -> None:
    assert first_cells("federated.md", "What is refused") - set(REJECTIONS) == set()


def test_the_documented_hooks_are_those_that_exist() -> None:
    assert first_cells("hooks.md", "Communication hooks") == {name for name in hooks.__all__ if name.endswith("_hook")}
    assert first_cells("data-parallel.md", "How gradients are sent") == set(HOOKS)


def test_the_documented_rules_are_those_that_exist() -> None:
    assert first_cells("strategies.md", "Rules") == set(RULES)


def test_every_library_that_works_with_the_ring_has_a_test() -> None:
    section = (ROOT / "docs" / "ring.md").read_text().partition("## What works with it\n")[2].partition("\n#")[0]
    rows = [row.strip("|").split("|") for row in section.splitlines() if row.startswith("| ")][1:]
    assert len(rows) > 20
    for library, works, _, tests in rows:
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", tests)
        assert named or works.strip() == "no", library
        for file, test in named:
            assert re.search(rf"^def {test}\(", (ROOT / "tests" / "system" / file).read_text(), re.MULTILINE), library


def test_every_figure_that_workers_report_is_documented() -> None:
    reported = {*Usage().metrics, "workers", "job_steps", "loss", "accuracy", "checkpoint_bytes", "checkpoint_seconds"}
    assert first_cells("data-parallel.md", "What it took") == reported
    assert first_cells("pipeline-reference.md", "What it took") == {*PipelineProfile().metrics, "bytes_sent"}


def test_every_key_of_the_pages_summaries_is_documented() -> None:
    page = Page(ROOT / "docs" / "web.md").text
    job = JobRow(1, "job", Job.model_validate({}).model_dump(), 1, 0.0)
    keys = {*round_summary(control_pb2.Round()), *job_summary(job), *event_summary(control_pb2.Event())}
    assert {key for key in keys if f"`{key}`" not in page} == set()
