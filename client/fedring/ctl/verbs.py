"""flctl's verbs: their names, help and modules.

A module is imported when its verb runs. So `flctl --help`, and completion of verbs, import no verb at all.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pkgutil import resolve_name
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

HELP_NAMES = {"help_option_names": ["-h", "--help"]}

JOBS, SHOW, TRY, ACCESS, BACKUP = "Run jobs", "Show", "Try and check", "Give access", "Back up"


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb, or a group of verbs."""

    name: str
    target: str  # "module:function" in fedring.ctl; empty = a group that does nothing by itself
    help: str  # the first line of the function's docstring
    panel: str | None = None  # in which flctl's help lists it
    examples: tuple[str, ...] = ()
    verbs: tuple["Verb", ...] = ()  # of a group


VERBS = (
    Verb(
        "start-round",
        "operate.job_control:start_round",
        "Start one round of the default job, with the given keys.",
        panel=JOBS,
        examples=(
            "flctl start-round --wait",
            "flctl start-round lr=0.1 encoding=int8",
        ),
    ),
    Verb(
        "run",
        "operate.job_control:run",
        "Queue a job, and show its progress.",
        panel=JOBS,
        examples=(
            "flctl run job.toml",
            "flctl run job.toml rounds=20 'model_args={\"hidden\": 128}'",
            "flctl run job.toml start=best",
            "flctl run job.toml --no-wait --key nightly-7",
            "flctl run job.toml --output json | jq .text",
            "flctl run job.toml --track tensorboard=runs/first",
        ),
    ),
    Verb(
        "stop",
        "operate.job_control:stop",
        "Stop a job with its round, or only the round in progress.",
        panel=JOBS,
        examples=(
            "flctl stop",
            "flctl stop --round",
            "flctl stop --job 3",
            "flctl stop --round --job digits",
        ),
    ),
    Verb(
        "store",
        "admin.meeting_store:store",
        "Host a torch TCPStore where workers meet, until SIGTERM.",
        panel=JOBS,
        examples=(
            "flctl store",
            "flctl store --listen 10.0.0.5:29500",
        ),
    ),
    Verb(
        "status",
        "operate.lists:status",
        "Show fl-server's job, round, clients and model now.",
        panel=SHOW,
        examples=(
            "flctl status",
            "flctl status --output json | jq .round.phase",
        ),
    ),
    Verb(
        "privacy",
        "operate.lists:privacy",
        "Show how much of the clients' privacy the published models have spent.",
        panel=SHOW,
        examples=(
            "flctl privacy",
            "flctl privacy --delta 1e-6",
        ),
    ),
    Verb(
        "jobs",
        "operate.lists:jobs",
        "List the jobs, newest first, with the start of each.",
        panel=SHOW,
        examples=(
            "flctl jobs",
            "flctl jobs --output json | jq '.jobs[0].start_version'",
        ),
        verbs=(
            Verb(
                "move",
                "operate.lists:move",
                "Move a queued job to another place in the queue.",
                examples=(
                    "flctl jobs move 7 --first",
                    "flctl jobs move 7 --before 5",
                ),
            ),
        ),
    ),
    Verb(
        "rounds",
        "operate.lists:rounds",
        "List the rounds, newest first, or show one round.",
        panel=SHOW,
        examples=(
            "flctl rounds --limit 5",
            "flctl rounds --metric eval/f1",
            "flctl rounds 3.12",
            "flctl rounds --job 3 12",
        ),
    ),
    Verb(
        "watch",
        "operate.watch:watch",
        "Show rounds, clients and accuracy live, until Ctrl-C.",
        panel=SHOW,
        examples=(
            "flctl watch",
            "flctl watch --output json >> events.jsonl",
        ),
    ),
    Verb(
        "clients",
        "operate.lists:clients",
        "List the clients, with the activity of each.",
        panel=SHOW,
        examples=(
            "flctl clients",
            "flctl clients --limit 10 --output json",
            "flctl clients --search ward --state away",
        ),
        verbs=(
            Verb(
                "forget",
                "operate.lists:forget",
                "Forget a client that will not come back.",
                examples=("flctl clients forget hospital-a",),
            ),
        ),
    ),
    Verb(
        "models",
        "operate.lists:models",
        "List the model versions that the server keeps, newest first.",
        panel=SHOW,
        examples=(
            "flctl models",
            "flctl models --limit 5 --output json",
        ),
        verbs=(
            Verb(
                "list",
                "operate.lists:list_models",
                "List the model versions, as `flctl models` does.",
                examples=("flctl models list",),
            ),
            Verb(
                "export",
                "operate.lists:export_model",
                "Write a model version to a safetensors file.",
                examples=(
                    "flctl models export best --out best.safetensors",
                    "flctl models export 11 --out version-11.safetensors",
                    "flctl models export newest --out newest.safetensors --exact",
                ),
            ),
        ),
    ),
    Verb(
        "evaluate",
        "local.evaluate:evaluate",
        "Evaluate a model on a data set's test samples, without clients.",
        panel=TRY,
        examples=(
            "flctl evaluate model.safetensors --model fedring.train.models:digits_mlp --data fedring.data:digits",
            "flctl evaluate 12 --model fedring.train.models:mnist_cnn --data fedring.data:mnist --data-root data",
        ),
    ),
    Verb(
        "doctor",
        "admin.doctor:doctor",
        "Check this host: configuration, ports, certificates, data and state.",
        panel=TRY,
        examples=(
            "flctl doctor",
            "flctl doctor --server-config server.toml",
            "flctl doctor --client-config client.toml --output json",
        ),
    ),
    Verb(
        "health",
        "operate.port_health:health",
        "Ask fl-server's two ports, or one health port, whether they serve.",
        panel=TRY,
        examples=(
            "flctl health",
            "flctl health -s 10.0.0.5:8444 --listen 10.0.0.5:8443",
            "flctl health --at 127.0.0.1:8445",
        ),
    ),
    Verb(
        "try",
        "local.trying:try_",
        "Run a job with a real server and clients on this machine.",
        panel=TRY,
        examples=(
            "flctl try",
            "flctl try my_job.toml --sites data/a data/b data/c",
            "flctl try my_job.toml rounds=3 --clients 2 --out first",
            "flctl try partition=dirichlet alpha=0.1 --clients 5",
            "flctl try mnist --data-root data encoding=packed keep_ratio=0.01",
            "flctl try mode=pipeline pipeline.schedule=1f1b pipeline.micro_batches=8 --clients 4",
            "flctl try private",
            "flctl try consent",
        ),
    ),
    Verb(
        "simulate",
        "local.simulate:simulate",
        "Run a federated job with simulated clients, without a server.",
        panel=TRY,
        examples=(
            "flctl simulate job.toml --clients 1000 --per-round 50",
            "flctl simulate job.toml partition=dirichlet alpha=0.1 --clients 10000 --per-round 100 --out skewed",
            "flctl simulate job.toml --clients 100 --workers 1 --seed 7 --output json | jq .accuracy",
            "flctl simulate job.toml --clients 100 --labels gpu=yes --labels gpu=no",
            "flctl simulate job.toml straggler_factor=2 --timing timing.toml --out cut --beside simulation",
        ),
    ),
    Verb(
        "profile",
        "local.profile:profile",
        "Train with each hook and without communication, and compare.",
        panel=TRY,
        examples=(
            "flctl profile --data-root data",
            "flctl profile --dataset digits --hooks none,fp16,powersgd,dgc --output json",
        ),
    ),
    Verb(
        "pipeline",
        "",
        "Show what the stages of a pipeline do and keep, without a server.",
        panel=TRY,
        verbs=(
            Verb(
                "draw",
                "local.pipeline_schedules:draw",
                "Draw the work of each worker over time.",
                examples=("flctl pipeline draw 1f1b --stages 4 --micro-batches 8 --out 1f1b.png",),
            ),
            Verb(
                "print",
                "local.pipeline_schedules:print_",
                "Print every worker's actions, and each stage's memory needs.",
                examples=(
                    "flctl pipeline print pipedream --stages 3 --versions macrobatch",
                    "flctl pipeline print interleaved_1f1b --stages 4 --workers 2 --output json | jq .bubble",
                ),
            ),
            Verb(
                "memory",
                "local.pipeline_memory:memory",
                "Print the memory of each worker, in bytes.",
                examples=(
                    "flctl pipeline memory torchvision:resnet18 --stages 1,2,4",
                    "flctl pipeline memory fedring.train.models:mnist_cnn --shape 1x28x28 --recompute",
                    "flctl pipeline memory --schedule pipedream --versions macrobatch --stages 2,4",
                ),
            ),
        ),
    ),
    Verb(
        "backup",
        "admin.state_backup:backup",
        "Copy the complete state of the server to a new folder.",
        panel=BACKUP,
        examples=(
            "flctl backup /mnt/backups/fl-2026-11-21",
            "flctl backup /mnt/backups/fl-monday --state-dir /var/lib/fedring/server",
            "flctl backup fl-backup --state-url postgresql://fedring@db/fedring --blob-url s3://models/fedring",
            "flctl backup fl-backup --output json | jq .newest_model",
        ),
    ),
    Verb(
        "restore",
        "admin.state_backup:restore",
        "Restore the server's state from a backup.",
        panel=BACKUP,
        examples=(
            "flctl restore /mnt/backups/fl-2026-11-21",
            "flctl restore /mnt/backups/fl-2026-11-21 --state-dir /var/lib/fedring/server --replace",
            "flctl restore fl-backup --state-url postgresql://fedring@db/fedring --blob-url s3://models/fedring",
        ),
    ),
    Verb(
        "migrate",
        "admin.state_backup:migrate",
        "Move the server's state into a database and an object store.",
        panel=BACKUP,
        examples=(
            "flctl migrate --state-dir /var/lib/fedring/server --state-url postgresql://fedring@db/fedring "
            "--blob-url s3://models/fedring",
        ),
    ),
    Verb(
        "audit",
        "",
        "Check the chained logs of clients and of the server.",
        panel=ACCESS,
        verbs=(
            Verb(
                "verify",
                "admin.audit:verify",
                "Check a chained log, alone or against the other side's.",
                examples=(
                    "flctl audit verify /var/lib/fedring/client/audit",
                    "flctl audit verify /var/lib/fedring/client/audit --against receipts",
                ),
            ),
        ),
    ),
    Verb(
        "certs",
        "",
        "Make, renew and revoke certificates, with an authority in a folder.",
        panel=ACCESS,
        verbs=(
            Verb(
                "init",
                "admin.certs:init",
                "Make an authority, and certificates for the server and the operator.",
                examples=("flctl certs init pki --host fl.example.org --host 10.0.0.5",),
            ),
            Verb(
                "issue",
                "admin.certs:issue",
                "Make a certificate and its key: DIR/NAME.crt and DIR/NAME.key.",
                examples=(
                    "flctl certs issue pki hospital-a",
                    "flctl certs issue pki ann --role operator",
                ),
            ),
            Verb(
                "renew",
                "admin.certs:renew",
                "Renew certificates, with new keys and the same names.",
                examples=(
                    "flctl certs renew pki",
                    "flctl certs renew pki server --days 90",
                ),
            ),
            Verb(
                "revoke",
                "admin.certs:revoke",
                "Revoke certificates: add them to the list DIR/ca.crl.",
                examples=(
                    "flctl certs revoke pki hospital-a",
                    "flctl certs revoke pki --serial 3f0c2a",
                ),
            ),
            Verb(
                "show",
                "admin.certs:show",
                "Show the owners, hosts and validity of certificates.",
                examples=(
                    "flctl certs show pki",
                    "flctl certs show /etc/fedring/server.crt --output json",
                ),
            ),
        ),
    ),
    Verb(
        "token",
        "",
        "Make, list and revoke bearer tokens.",
        panel=ACCESS,
        verbs=(
            Verb(
                "create",
                "operate.token:create",
                "Make a token and print it.",
                examples=(
                    "flctl token create --name hospital-a > hospital-a.token",
                    "flctl token create --role operator --name ann --days 30 --state-dir /var/lib/fl-server",
                ),
            ),
            Verb(
                "list",
                "operate.token:list_",
                "List all tokens, oldest first, without their secrets.",
                examples=("flctl token list",),
            ),
            Verb(
                "revoke",
                "operate.token:revoke",
                "Revoke a token, and close the sessions that were opened with it.",
                examples=("flctl token revoke 3f0c2a9d11ee",),
            ),
        ),
    ),
    Verb(
        "help",
        "help_topics:help_",
        "Explain a verb, or the topic exit-codes.",
        examples=(
            "flctl help run",
            "flctl help exit-codes",
        ),
    ),
)


class LateCommand(TyperCommand):
    """A verb that is imported when it runs."""

    def __init__(self, verb: Verb) -> None:
        super().__init__(verb.name, help=verb.help, rich_help_panel=verb.panel)
        self._verb = verb

    @cached_property
    def loaded(self) -> Any:
        """The command itself, with its options."""
        return _loaded(self._verb)

    def make_context(self, *args: Any, **named: Any) -> Any:
        """Return the context of the command itself, which then runs in it."""
        return self.loaded.make_context(*args, **named)


def program(app: typer.Typer) -> TyperGroup:
    """Return the program: the options of `app`, and all verbs."""
    return _with_verbs(app, VERBS)


def _with_verbs(app: typer.Typer, verbs: tuple[Verb, ...]) -> TyperGroup:
    group: Any = get_command(app)
    for verb in verbs:
        group.add_command(LateCommand(verb))
    return group  # type: ignore[no-any-return]


def add_verb(app: typer.Typer, name: str, function: Callable[..., Any], *examples: str) -> None:
    """Add a function as a verb, with examples for its help."""
    app.command(name, **_shown(function, examples))(_with_access(function))


def _loaded(verb: Verb) -> Any:
    """Import a verb, and make its command."""
    app = typer.Typer(
        add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False, context_settings=HELP_NAMES
    )
    if not verb.target:
        app.callback(help=verb.help, no_args_is_help=True)(_do_nothing)
        return _with_verbs(app, verb.verbs)
    function = resolve_name(f"fedring.ctl.{verb.target}")
    if not verb.verbs:
        add_verb(app, verb.name, function, *verb.examples)
        return get_command(app)
    app.callback(invoke_without_command=True, **_shown(function, verb.examples))(_with_access(function))
    return _with_verbs(app, verb.verbs)


def _shown(function: Callable[..., Any], examples: Sequence[str]) -> dict[str, Any]:
    # Typer would keep the line breaks of the source in all paragraphs but the first.
    text = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(function) or "")
    return {"help": text, "epilog": "\n\n".join(["Examples:", *examples]).replace("[", r"\[")}


def _with_access(function: Callable[..., Any]) -> Callable[..., None]:
    from fedring.ctl.access import with_access  # imports grpc

    return with_access(function)


def _do_nothing() -> None:
    """Leave all to the verbs of the group."""
