"""Write docs/configuration.md from the configuration models: python docs/reference.py."""

import json
import sys
from pathlib import Path

from pydantic import BaseModel

from fedring.client.config import ClientConfig
from fedring.rpc.tls import Tls
from fedring.server.config import ServerConfig
from fedring.train.job import Job, ServerOptimizer
from fedring.train.parallel import DataParallel
from fedring.train.pipelined import Pipeline

TARGET = Path(__file__).with_name("configuration.md")

INTRO = """# Configuration

This page is written by `python docs/reference.py` from the models that read the configuration.

Each daemon takes its keys from, in rising order of precedence: the defaults below; a file, TOML or JSON by its
ending; environment variables (`FEDRING_SERVER_LISTEN`, `FEDRING_CLIENT_DATA_ROOT`, nested keys with two underscores:
`FEDRING_SERVER_JOB__ROUNDS`); `key=value` on the command line (`job.rounds=20`; values are JSON, or else text); flags.
An unknown key is an error that names the nearest valid one. `--print-config` prints every key with its value and its
origin, `--check-config` says whether the daemon could start. Examples with comments are in `deploy/config/`.
"""

SECTIONS = (
    ("fl-server", ServerConfig, "Keys of `fl-server`. The table `[job]` holds the defaults of every job."),
    ("fl-client", ClientConfig, "Keys of `fl-client`."),
    ("TLS", Tls, "Keys of the table `[tls]` of both daemons; docs/security.md tells more."),
    (
        "Jobs",
        Job,
        "Keys of a job: of `flctl run JOB.toml`, of `flctl start-round key=value`, and of fl-server's `[job]`. What a "
        "job does not set is taken from the server's `[job]`, but for the arguments of another model or optimizer.",
    ),
    (
        "Data-parallel training",
        DataParallel,
        "Keys of the table `[data_parallel]` in a job of that mode; docs/data-parallel.md tells more.",
    ),
    (
        "Pipelines",
        Pipeline,
        "Keys of the table `[pipeline]` in a job of that mode; docs/pipeline.md tells more.",
    ),
    ("Server optimizer", ServerOptimizer, "Keys of the table `[server_optimizer]` in a job."),
)


def render() -> str:
    """The whole page."""
    parts = [INTRO]
    for title, model, text in SECTIONS:
        parts.append(f"## {title}\n\n{text}\n\n| key | default | meaning |\n|---|---|---|\n{_rows(model)}\n")
    return "\n".join(parts)


def _rows(model: type[BaseModel]) -> str:
    rows = []
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=name != "client_id")
        if name == "client_id":
            shown = "this host's name"  # not that of the host on which this page was written
        elif isinstance(default, BaseModel):
            shown = "see Jobs" if isinstance(default, Job) else "see below"
        elif default is None:
            shown = ""
        else:
            shown = f"`{json.dumps(default, default=str)}`"
        rows.append(f"| `{name}` | {shown} | {_meaning(field)} |")
    return "\n".join(rows)


def _meaning(field: object) -> str:
    text = getattr(field, "description", None) or ""
    choices = getattr(getattr(field, "annotation", None), "__args__", ())
    if choices and all(isinstance(choice, str) for choice in choices):
        text += ("; " if text else "") + "one of " + ", ".join(f"`{choice}`" for choice in choices)
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(TARGET.write_text(render(), encoding="utf-8") and 0)
