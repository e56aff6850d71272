"""Write docs/configuration.md from the configuration models: python docs/reference.py."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from fedring.client.config import ClientConfig
from fedring.ring.options import RingOptions
from fedring.rpc.tls import Tls
from fedring.server.config import ServerConfig
from fedring.train.bounds import MAX_COUNT
from fedring.train.data_parallel_table import DataParallel
from fedring.train.job import Job, ServerOptimizer
from fedring.train.pipeline_table import Pipeline

TARGET = Path(__file__).with_name("configuration.md")

INTRO = """# Configuration

This page is written by `python docs/reference.py` from the models that read the configuration.

All keys: of [fl-server](#fl-server) and [fl-client](#fl-client), of [jobs](#jobs) and their tables, and of the
[streams between workers](#streams-between-workers). Examples with comments are in [deploy/config](../deploy/config).

A daemon takes its keys from these places; a later one wins:

1. the defaults below;
2. a file, TOML or JSON by its ending: `fl-server server.toml`;
3. environment variables: `FEDRING_SERVER_LISTEN`, `FEDRING_CLIENT_DATA_ROOT`; within a table with two underscores:
   `FEDRING_SERVER_JOB__ROUNDS`; a list or a table is JSON: `FEDRING_CLIENT_TRUSTED='["fedring", "my_project"]'`;
4. `KEY=VALUE` on the command line, within a table with a dot: `fl-server job.rounds=20`. Values are JSON, or else text;
5. flags: `fl-server --listen 127.0.0.1:9000`.

`--print-config` prints every key, its value and where that came from. An unknown key is an error that names the nearest
valid one. Relative paths count from where the daemon started.

`--check-config` says whether the daemon could start: it ends with 0, or with 78 and one sentence. Each start makes the
same checks, and so does `flctl doctor`. Beyond values that a key does not take, an error is what would surely make the
daemon, or the job that `[job]` describes, fail on this machine:

* files of `[tls]`, a token or a state folder that cannot be used, and an address of fl-server that is taken;
* a `data_root` that is no folder that can be read: of fl-client always, of fl-server if `[job]` has
  `evaluate_on_server`; and none, for a data set of `fedring.data` that needs one;
* names that cannot be imported, that `trusted` does not allow, or that are neither function nor class: all five of
  fl-client; of fl-server the `model` of `[job]`, and with `evaluate_on_server` its `data` and `loss`. What only clients
  import is not looked at there;
* a `server_optimizer` of `[job]` that cannot be made;
* an `init_path` that cannot be read, or does not fit the model that `[job]` names, while `state_dir` holds no model:
  later it is not read;
* a `device` that fl-client does not have.

No sample is loaded, and nobody is called: that a data set is complete and that the server can be reached is for
`flctl doctor` to say. fl-server makes its `state_dir` if there is none, as a start would.
"""

SECTIONS = (
    ("fl-server", ServerConfig, "The table `[job]` holds the defaults of every job."),
    ("fl-client", ClientConfig, ""),
    ("TLS", Tls, "The table `[tls]` of both daemons: [security.md](security.md)."),
    (
        "Jobs",
        Job,
        "Keys of the file of `flctl run JOB`, and of what follows it; of `flctl start-round KEY=VALUE`; and of the "
        "table `[job]` of fl-server, from which a job takes what it does not set, but for the arguments of another "
        "model or optimizer. Integers of jobs and their tables end at 2^32 - 1 where nothing else is said. Names are "
        "of one line, without control characters. Tables of free content hold at most 16 lists and tables in each "
        "other, and finite numbers, whole ones below 2^63. A whole job is at most 64 KiB of JSON.",
    ),
    (
        "Data-parallel training",
        DataParallel,
        "The table `[data_parallel]` of a job of that mode: [data-parallel.md](data-parallel.md).",
    ),
    (
        "Pipelines",
        Pipeline,
        "The table `[pipeline]` of a job of that mode: [pipeline.md](pipeline.md).",
    ),
    ("Server optimizer", ServerOptimizer, "The table `[server_optimizer]` of a job: [federated.md](federated.md)."),
    (
        "Streams between workers",
        RingOptions,
        "Environment variables `FEDRING_RING_<KEY>` of fl-clients and of scripts, such as "
        "`FEDRING_RING_FRAME_CHECKSUM=true`; in a script also arguments of `RingOptions`: [ring.md](ring.md). An "
        "fl-client has `peer_listen`, `peer_address` and `[tls]` in the place of the addresses and files here.",
    ),
)

KINDS = {"boolean": "true or false", "integer": "integer", "number": "number", "string": "text", "object": "table"}
UNITS = {"_seconds": "seconds", "_bytes": "bytes", "_mb": "MiB", "_epochs": "epochs"}
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
DEFAULTS = {
    (ClientConfig, "client_id"): "this host's name",  # not that of the host on which this page was written
    (RingOptions, "listen"): "the interface that reaches `MASTER_ADDR`",
}


def render() -> str:
    """The whole page."""
    parts = [INTRO]
    for title, model, text in SECTIONS:
        head = "| key | takes | default | meaning |\n|---|---|---|---|\n"
        parts.append(f"## {title}\n\n{text}\n\n{head}{_rows(model)}\n".replace("\n\n\n\n", "\n\n"))
    return "\n".join(parts)


def _rows(model: type[BaseModel]) -> str:
    schema = model.model_json_schema()["properties"]
    rows = []
    for name, field in model.model_fields.items():
        shown = DEFAULTS.get((model, name)) or _default(field.get_default(call_default_factory=True))
        meaning = (field.description or "").replace("|", "\\|")
        rows.append(f"| `{name}` | {_takes(name, schema[name])} | {shown} | {meaning} |")
    return "\n".join(rows)


def _default(value: object) -> str:
    if value is None:
        return "unset"
    if isinstance(value, BaseModel):
        return "as there"
    return f"`{json.dumps(value, default=str)}`"


def _takes(name: str, schema: Mapping[str, Any]) -> str:
    """What values a key takes: kind or unit, and range."""
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
    """The link to the section of the model."""
    title = next(title for title, model, _ in SECTIONS if model.__name__ == reference.rpartition("/")[2])
    return "#" + title.lower().replace(" ", "-")


if __name__ == "__main__":
    sys.exit(TARGET.write_text(render(), encoding="utf-8") and 0)
