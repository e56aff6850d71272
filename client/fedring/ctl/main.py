"""flctl: the operator's command line."""

import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # before grpc is imported: it must not write to stderr itself

import typer

from fedring.control.failure import Failure
from fedring.ctl import help_topics
from fedring.ctl.access import with_access
from fedring.ctl.admin import certs, doctor, meeting_store, state_backup
from fedring.ctl.local import demo, evaluate, pipeline_memory, pipeline_schedules, profile, simulate
from fedring.ctl.operate import job_control, lists, port_health, token, watch
from fedring.daemon.config import ConfigError
from fedring.daemon.exits import Exit
from fedring.daemon.logs import visible
from fedring.version import VERSION

app = typer.Typer(
    name="flctl",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start here:\n\nflctl demo\n\nflctl help run\n\nflctl help exit-codes",
)
_MOVABLE = ("-s", "--server", "-o", "--output", "--tls-ca", "--tls-cert", "--tls-key", "--token-file")

clients_app = typer.Typer()
models_app = typer.Typer(no_args_is_help=True, help="List the versions of the model, and export one.")
pipeline_app = typer.Typer(
    no_args_is_help=True, help="Show what the stages of a pipeline do and keep, without a server."
)
certs_app = typer.Typer(
    no_args_is_help=True, help="Make, renew and revoke certificates, with an authority in a folder."
)
token_app = typer.Typer(no_args_is_help=True, help="Make, list and revoke bearer tokens.")

_JOBS, _SHOW, _TRY, _ACCESS, _BACKUP = "Run jobs", "Show", "Try and check", "Give access", "Back up"


def add_verb(group: typer.Typer, name: str, verb: Callable[..., Any], *examples: str, panel: str | None = None) -> None:
    """Add a verb with the examples that its help shows."""
    paragraphs = inspect.getdoc(verb) or ""
    # Typer would keep the line breaks of the source in all paragraphs but the first.
    text = re.sub(r"(?<!\n)\n(?!\n)", " ", paragraphs)
    group.command(name, help=text, epilog=_examples(*examples), rich_help_panel=panel)(with_access(verb))


def _examples(*lines: str) -> str:
    return "\n\n".join(["Examples:", *lines]).replace("[", r"\[")


add_verb(
    app,
    "start-round",
    job_control.start_round,
    "flctl start-round --wait",
    "flctl start-round lr=0.1 encoding=int8",
    panel=_JOBS,
)
add_verb(
    app,
    "run",
    job_control.run,
    "flctl run job.toml",
    "flctl run job.toml rounds=20 'model_args={\"hidden\": 128}'",
    "flctl run job.toml start=best",
    "flctl run job.toml --no-wait --key nightly-7",
    "flctl run job.toml --output json | jq .text",
    "flctl run job.toml --track tensorboard=runs/first",
    panel=_JOBS,
)
add_verb(app, "stop", job_control.stop, "flctl stop", "flctl stop --round", "flctl stop --job 3", panel=_JOBS)
add_verb(app, "status", lists.status, "flctl status", "flctl status --output json | jq .round.phase", panel=_SHOW)
clients_app.callback(
    invoke_without_command=True, epilog=_examples("flctl clients", "flctl clients --limit 10 --output json")
)(with_access(lists.clients))
add_verb(clients_app, "forget", lists.forget, "flctl clients forget hospital-a")
app.add_typer(clients_app, name="clients", rich_help_panel=_SHOW)
add_verb(app, "privacy", lists.privacy, "flctl privacy", "flctl privacy --delta 1e-6", panel=_SHOW)
add_verb(app, "jobs", lists.jobs, "flctl jobs", "flctl jobs --output json | jq '.jobs[0].start_version'", panel=_SHOW)
add_verb(
    app,
    "rounds",
    lists.rounds,
    "flctl rounds --limit 5",
    "flctl rounds --metric eval/f1",
    "flctl rounds 3.12",
    "flctl rounds --job 3 12",
    panel=_SHOW,
)
add_verb(app, "watch", watch.watch, "flctl watch", "flctl watch --output json >> events.jsonl", panel=_SHOW)
add_verb(models_app, "list", lists.models, "flctl models list")
add_verb(
    models_app,
    "export",
    lists.export_model,
    "flctl models export best --out best.safetensors",
    "flctl models export 11 --out version-11.safetensors",
    "flctl models export newest --out newest.safetensors --exact",
)
app.add_typer(models_app, name="models", rich_help_panel=_SHOW)
add_verb(
    app,
    "evaluate",
    evaluate.evaluate,
    "flctl evaluate model.safetensors --model fedring.train.models:digits_mlp --data fedring.data:digits",
    "flctl evaluate 12 --model fedring.train.models:mnist_cnn --data fedring.data:mnist --data-root data",
    panel=_TRY,
)
add_verb(
    app,
    "doctor",
    doctor.doctor,
    "flctl doctor",
    "flctl doctor --server-config server.toml",
    "flctl doctor --client-config client.toml --output json",
    panel=_TRY,
)
add_verb(
    app,
    "health",
    port_health.health,
    "flctl health",
    "flctl health -s 10.0.0.5:8444 --listen 10.0.0.5:8443",
    "flctl health --at 127.0.0.1:8445",
    panel=_TRY,
)
add_verb(
    app,
    "demo",
    demo.demo,
    "flctl demo",
    "flctl demo --clients 5 --partition dirichlet --alpha 0.1",
    "flctl demo --dataset mnist --data-root data --encoding packed --keep-ratio 0.01",
    "flctl demo --mode pipeline --clients 4 --schedule 1f1b --micro-batches 8",
    "flctl demo --private",
    panel=_TRY,
)
add_verb(
    app,
    "simulate",
    simulate.simulate,
    "flctl simulate job.toml --clients 1000 --per-round 50",
    "flctl simulate job.toml partition=dirichlet alpha=0.1 --clients 10000 --per-round 100 --out skewed",
    "flctl simulate job.toml --clients 100 --workers 1 --seed 7 --output json | jq .accuracy",
    panel=_TRY,
)
add_verb(
    app,
    "profile",
    profile.profile,
    "flctl profile --data-root data",
    "flctl profile --dataset digits --hooks none,fp16,powersgd,dgc --output json",
    panel=_TRY,
)
add_verb(
    pipeline_app,
    "draw",
    pipeline_schedules.draw,
    "flctl pipeline draw 1f1b --stages 4 --micro-batches 8 --out 1f1b.png",
)
add_verb(
    pipeline_app,
    "print",
    pipeline_schedules.print_,
    "flctl pipeline print pipedream --stages 3 --versions macrobatch",
    "flctl pipeline print interleaved_1f1b --stages 4 --workers 2 --output json | jq .bubble",
)
add_verb(
    pipeline_app,
    "memory",
    pipeline_memory.memory,
    "flctl pipeline memory torchvision:resnet18 --stages 1,2,4",
    "flctl pipeline memory fedring.train.models:mnist_cnn --shape 1x28x28 --recompute",
    "flctl pipeline memory --schedule pipedream --versions macrobatch --stages 2,4",
)
app.add_typer(pipeline_app, name="pipeline", rich_help_panel=_TRY)
add_verb(certs_app, "init", certs.init, "flctl certs init pki --host fl.example.org --host 10.0.0.5")
add_verb(
    certs_app, "issue", certs.issue, "flctl certs issue pki hospital-a", "flctl certs issue pki ann --role operator"
)
add_verb(certs_app, "renew", certs.renew, "flctl certs renew pki", "flctl certs renew pki server --days 90")
add_verb(
    certs_app, "revoke", certs.revoke, "flctl certs revoke pki hospital-a", "flctl certs revoke pki --serial 3f0c2a"
)
add_verb(
    certs_app, "show", certs.show, "flctl certs show pki", "flctl certs show /etc/fedring/server.crt --output json"
)
app.add_typer(certs_app, name="certs", rich_help_panel=_ACCESS)
add_verb(
    token_app,
    "create",
    token.create,
    "flctl token create --name hospital-a > hospital-a.token",
    "flctl token create --role operator --name ann --days 30 --state-dir /var/lib/fl-server",
)
add_verb(token_app, "list", token.list_, "flctl token list")
add_verb(token_app, "revoke", token.revoke, "flctl token revoke 3f0c2a9d11ee")
app.add_typer(token_app, name="token", rich_help_panel=_ACCESS)
add_verb(
    app,
    "backup",
    state_backup.backup,
    "flctl backup /mnt/backups/fl-2026-11-21",
    "flctl backup /mnt/backups/fl-monday --state-dir /var/lib/fedring/server",
    "flctl backup fl-backup --output json | jq .newest_model",
    panel=_BACKUP,
)
add_verb(
    app,
    "restore",
    state_backup.restore,
    "flctl restore /mnt/backups/fl-2026-11-21",
    "flctl restore /mnt/backups/fl-2026-11-21 --state-dir /var/lib/fedring/server --replace",
    panel=_BACKUP,
)
add_verb(
    app,
    "store",
    meeting_store.store,
    "flctl store",
    "flctl store --listen 10.0.0.5:29500",
    panel=_JOBS,
)
add_verb(app, "help", help_topics.help_, "flctl help run", "flctl help exit-codes")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"flctl {VERSION}")
        raise typer.Exit


@app.callback()
def _flctl(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Operate an fl-server: jobs, rounds, models, and clients' access.

    `flctl demo` needs no configuration: it starts a server and clients on this machine and trains a small model.

    The options --server, --output, --tls-ca, --tls-cert, --tls-key and --token-file of a verb may also stand before it.
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run flctl with some arguments, and return the exit code.

    By default they are those of the command line.
    """
    return run(app, "flctl", _behind_the_verb(sys.argv[1:] if arguments is None else arguments))


def run(program: typer.Typer, name: str, arguments: Sequence[str]) -> int:
    """Run a program with arguments, and return the exit code.

    What fails is one sentence on stderr.
    """
    try:
        program(arguments, prog_name=name)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else Exit.OK if end.code is None else Exit.FAILED
    except Failure as failure:
        return _print_error(name, failure, failure.exit_code)
    except ConfigError as error:
        return _print_error(name, error, Exit.CONFIG)
    except OSError as error:  # of a file that a verb could not check before: the disk is full, or a folder has its name
        if error.filename is None:
            raise
        return _print_error(name, Failure(f"{error.filename}: {error.strerror}"), Exit.FAILED)
    return Exit.OK


def _behind_the_verb(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with options before the verb moved behind it.

    They are options of verbs, and belong to the end.
    """
    rest, moved = list(arguments), list[str]()
    while rest and rest[0].partition("=")[0] in _MOVABLE:
        count = 1 if "=" in rest[0] else 2
        moved, rest = moved + rest[:count], rest[count:]
    end = rest.index("--") if "--" in rest else len(rest)
    return [*rest[:end], *moved, *rest[end:]] if rest else list(arguments)


def _print_error(name: str, error: Exception, code: Exit) -> int:
    print(f"{name}: " + "\n".join(map(visible, str(error).split("\n"))), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
