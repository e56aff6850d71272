"""Write docs/configuration.md from the configuration models: python docs/reference.py."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from fedring.client.config import ClientConfig, CodeLimits
from fedring.client.consent.approval import Approval
from fedring.client.consent.audit import AuditTable
from fedring.client.policy.privacy import SitePolicy
from fedring.ring.options import RingOptions
from fedring.rpc.tls import Tls
from fedring.server.config import ServerConfig
from fedring.train.bounds import MAX_COUNT
from fedring.train.jobs.aggregation_table import Aggregation
from fedring.train.jobs.asynchronous_table import Asynchronous
from fedring.train.jobs.bounds_table import Bounds
from fedring.train.jobs.data_parallel_table import DataParallel
from fedring.train.jobs.job import Job
from fedring.train.jobs.job_keys import NamedTransform, ServerOptimizer
from fedring.train.jobs.override_table import Override
from fedring.train.jobs.personal_table import Personal
from fedring.train.jobs.pipeline_table import Pipeline
from fedring.train.jobs.privacy_table import ClientPrivacy
from fedring.train.jobs.round_settings import SettingSchedule
from fedring.train.jobs.sample_privacy_table import SamplePrivacy
from fedring.train.jobs.secure_table import SecureAggregation
from fedring.train.names.hooks import DGCParameters, Int8Parameters, PowerSGDParameters, TopKParameters

TARGET = Path(__file__).with_name("configuration.md")

INTRO = """# Configuration

`python docs/reference.py` writes this page from the models that read the configuration.

The page lists all keys of [fl-server](#fl-server) and [fl-client](#fl-client), of [jobs](#jobs), their tables and
[hooks](#hook-dgc), and of the [streams between workers](#streams-between-workers).
[deploy/config](../deploy/config/server.toml) holds examples with comments.

A daemon takes its keys from these sources. A later source overrides an earlier one:

1. the defaults below;
2. a file, in TOML or JSON according to its ending: `fl-server server.toml`;
3. environment variables: `FEDRING_SERVER_LISTEN`, `FEDRING_CLIENT_DATA_ROOT`. A key within a table has two
   underscores: `FEDRING_SERVER_JOB__ROUNDS`. A list or a table is JSON:
   `FEDRING_CLIENT_TRUSTED='["fedring", "my_project"]'`;
4. `KEY=VALUE` on the command line. A key within a table has a dot: `fl-server job.rounds=20`. A value is read as JSON
   if it is JSON, and as text otherwise;
5. flags: `fl-server --listen 127.0.0.1:9000`.

`--print-config` prints every key, its value, and where the value comes from. An unknown key is an error that names
the nearest valid key. Relative paths start at the folder in which the daemon was started.

`--check-config` says whether the daemon could start. It ends with 0, or with 78 and one sentence. Each start makes
the same checks, and so does `flctl doctor`. The check reports values that a key does not accept. It also reports
everything that would certainly make the daemon, or the job that `[job]` describes, fail on this machine:

* files of `[tls]`, a token or a state folder that cannot be used, and an address of fl-server that is already in use;
* a `data_root` that is not a readable folder (always for fl-client, and for fl-server if `[job]` has
  `evaluate_on_server`), or a missing `data_root` for a data set of `fedring.data` that needs one;
* a module or function in `trusted` that cannot be imported, and names that are not offered: for fl-client, `model`,
  `data`, `loss`, `optimizer`, `trainer` and `evaluator`; for fl-server, the `model` of `[job]`, and with
  `evaluate_on_server` also its `data` and `loss`. What only clients use is not checked there;
* a `server_optimizer` of `[job]` that cannot be created, and an `optimizer` that does not take its `optimizer_args`;
* an `init_path` that does not exist; or a file there that cannot be read, or does not fit the model that `[job]` names.
  If `start` of `[job]` keeps jobs from reading that file, a warning says so;
* a `device` that fl-client does not have.

The check lists what jobs may name. It loads no samples and makes no calls. `flctl doctor` says whether a data set is
complete and whether the server can be reached. If there is no `state_dir`, fl-server creates it, as it does at a start.
"""

SECTIONS = (
    ("fl-server", ServerConfig, "The table `[job]` holds the defaults of every job."),
    ("fl-client", ClientConfig, ""),
    (
        "Site policy",
        SitePolicy,
        "The table `[privacy]` of fl-client: what it demands of the jobs that it takes part in. See "
        "[privacy.md](privacy.md).",
    ),
    (
        "Approval of jobs",
        Approval,
        "The table `[approval]` of fl-client: which jobs a person approves first. See [consent.md](consent.md).",
    ),
    (
        "Audit",
        AuditTable,
        "The table `[audit]` of fl-client: a chained log of what it does. See [consent.md](consent.md).",
    ),
    (
        "The code of jobs",
        CodeLimits,
        "The table `[training]` of fl-client: where the code of jobs runs, and what it may use. See "
        "[clients.md](clients.md#a-process-for-the-code-of-jobs).",
    ),
    ("TLS", Tls, "The table `[tls]` of both daemons. See [security.md](security.md)."),
    (
        "Jobs",
        Job,
        "These keys are for the file of `flctl run JOB` and the keys that follow it, for `flctl start-round "
        "KEY=VALUE`, and for the table `[job]` of fl-server. A job takes from `[job]` whatever it does not set "
        "itself, except the arguments of a different model, optimizer or rule, and other `clients`. Integers of jobs "
        "and their tables are at most 2^32 - 1, unless the table says otherwise. Names have one line and no control "
        "characters. In tables whose content is free, lists and tables nest at most 16 deep, and numbers are finite; "
        "integers there are "
        "below 2^63. A whole job is at most 64 KiB of JSON.",
    ),
    (
        "Bounds",
        Bounds,
        "The table `[bounds]` of a job: what may change while it runs, at sites that check its operator's signature. "
        "See [consent.md](consent.md#what-may-change-while-the-job-runs).",
    ),
    (
        "Aggregation",
        Aggregation,
        "The table `[aggregation]` of a federated job. See [strategies.md](strategies.md).",
    ),
    (
        "Differential privacy",
        ClientPrivacy,
        "The table `[dp]` of a federated job. See [privacy.md](privacy.md).",
    ),
    (
        "Asynchronous rounds",
        Asynchronous,
        "The table `[asynchronous]` of a federated job. See [asynchronous.md](asynchronous.md).",
    ),
    (
        "Secure aggregation",
        SecureAggregation,
        "The table `[secure_aggregation]` of a federated job. See [privacy.md](privacy.md#secure-aggregation).",
    ),
    (
        "Differential privacy for single samples",
        SamplePrivacy,
        "The table `[sample_dp]` of a federated job. See "
        "[privacy.md](privacy.md#differential-privacy-for-single-samples).",
    ),
    (
        "Data-parallel training",
        DataParallel,
        "The table `[data_parallel]` of a data-parallel job. See [data-parallel.md](data-parallel.md).",
    ),
    (
        "Hook dgc",
        DGCParameters,
        'The parameters of the hooks follow the name of a hook in parentheses: `hook = "dgc(nesterov=true)"` in a '
        "job, and the same text in scripts, `flctl profile` and benchmarks. In a job, `ratio`, `warmup_epochs`, "
        "`clip` and `clip_norm` are also keys of its table, with defaults of their own. See [hooks.md](hooks.md).",
    ),
    (
        "Hook powersgd",
        PowerSGDParameters,
        "`batched_powersgd` takes the same parameters. In a job, the keys `rank`, `start_iteration` and `feedback` of "
        "its table stand for the first two of them and `use_error_feedback`.",
    ),
    ("Hook topk", TopKParameters, "In a job, `ratio` and `feedback` are also keys of its table."),
    ("Hook int8", Int8Parameters, "In a job, `feedback` is also a key of its table."),
    (
        "Pipelines",
        Pipeline,
        "The table `[pipeline]` of a pipeline job. See [pipeline-reference.md](pipeline-reference.md).",
    ),
    (
        "Schedule",
        SettingSchedule,
        "The table that `lr`, `epochs` or `subset_size` of a federated job holds instead of a number, such as `lr = "
        '{ schedule = "cosine", start = 0.1, end = 0.001 }`. See [federated.md](federated.md#schedules).',
    ),
    (
        "Own models",
        Personal,
        "The table `[personal]` of a federated job. See [federated.md](federated.md#a-model-for-each-client).",
    ),
    ("Server optimizer", ServerOptimizer, "The table `[server_optimizer]` of a job. See [federated.md](federated.md)."),
    (
        "Transforms",
        NamedTransform,
        "An entry of the list `[[transforms]]` of a job. See [algorithms.md](algorithms.md).",
    ),
    (
        "Overrides",
        Override,
        "An entry of the list `[[override]]` of a federated job. See "
        "[federated.md](federated.md#other-settings-for-some-clients).",
    ),
    (
        "Streams between workers",
        RingOptions,
        "Set these with environment variables `FEDRING_RING_<KEY>` of fl-clients and of scripts, such as "
        "`FEDRING_RING_FRAME_CHECKSUM=true`. A script can also pass them as arguments of `RingOptions`: "
        "[ring.md](ring.md). Instead of the addresses and files listed here, an fl-client uses `peer_listen`, "
        "`peer_address` and `[tls]`.",
    ),
)

KINDS = {"boolean": "true or false", "integer": "integer", "number": "number", "string": "text", "object": "table"}
UNITS = {"_seconds": "seconds", "_bytes": "bytes", "_mb": "MiB", "_epochs": "epochs"}
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
DEFAULTS = {
    (ClientConfig, "client_id"): "this host's name",  # the name of the host that writes this page would be wrong
    (RingOptions, "listen"): "the interface that reaches `MASTER_ADDR`",
}


def render() -> str:
    """Return the whole page."""
    parts = [INTRO]
    for title, model, text in SECTIONS:
        head = "| key | value | default | meaning |\n|---|---|---|---|\n"
        parts.append(f"## {title}\n\n{text}\n\n{head}{_rows(model)}\n".replace("\n\n\n\n", "\n\n"))
    return "\n".join(parts)


def _rows(model: type[BaseModel]) -> str:
    schema = model.model_json_schema()["properties"]
    rows = []
    for name, field in model.model_fields.items():
        default = "must be given" if field.is_required() else _default(field.get_default(call_default_factory=True))
        shown = DEFAULTS.get((model, name)) or default
        meaning = (field.description or "").replace("|", "\\|")
        rows.append(f"| `{name}` | {_takes(name, schema[name])} | {shown} | {meaning} |")
    return "\n".join(rows)


def _default(value: object) -> str:
    if value is None:
        return "unset"
    if isinstance(value, BaseModel):
        return "see the table"
    return f"`{json.dumps(value, default=str)}`"


def _takes(name: str, schema: Mapping[str, Any]) -> str:
    """Return what values a key takes: its kind or unit, and its range."""
    if "anyOf" in schema:
        kinds = [_takes(name, one) for one in schema["anyOf"] if one.get("type") != "null"]
        return ", or ".join(kinds)
    if "$ref" in schema:
        return f"[table]({_section(schema['$ref'])})"
    if choices := schema.get("enum", [schema["const"]] if "const" in schema else []):
        return ", ".join(f"`{choice}`" for choice in choices)
    if schema["type"] == "array":
        return f"list of {_takes(name, schema['items'])}"
    kind = "path" if schema.get("format") == "path" else KINDS[schema["type"]]
    if kind in ("integer", "number"):
        kind = next((unit for ending, unit in UNITS.items() if name.endswith(ending)), kind)
    return " ".join([kind, ", ".join(_bounds(schema))]).strip()


def _bounds(schema: Mapping[str, Any]) -> list[str]:
    if schema["type"] == "integer" and schema.get("exclusiveMinimum") == 0:
        schema = {"minimum": 1} | {key: value for key, value in schema.items() if key != "exclusiveMinimum"}
    return [f"{sign} {schema[key]:,}" for key, sign in BOUNDS.items() if schema.get(key, MAX_COUNT) != MAX_COUNT]


def _section(reference: str) -> str:
    """Return the link to the section that describes the referenced model."""
    title = next(title for title, model, _ in SECTIONS if model.__name__ == reference.rpartition("/")[2])
    return "#" + title.lower().replace(" ", "-")


if __name__ == "__main__":
    sys.exit(TARGET.write_text(render(), encoding="utf-8") and 0)
