"""fl-client: train where the data lives, whenever fl-server asks."""

import faulthandler
import gc
import logging
import signal
import sys
from contextlib import closing, suppress
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from fedring.client.config import ClientConfig
from fedring.client.errors import Refused
from fedring.daemon.config import ConfigError, Loaded, describe, load_config, split_arguments
from fedring.daemon.exits import Exit
from fedring.daemon.logs import log_always, set_up_logs
from fedring.daemon.memory import bound_arenas
from fedring.daemon.notify import sd_notify
from fedring.daemon.program import run
from fedring.daemon.tracing import set_up_tracing
from fedring.extras import missing
from fedring.job_code import AskedToStop
from fedring.requirements import check_grpcio, check_torch
from fedring.version import SOFTWARE, VERSION

log = logging.getLogger(__name__)

_HELP = """Train where the data lives, whenever fl-server asks.

[CONFIG] is a file that ends in .toml or .json. Each key=value sets one key over it; so do the environment
variables FEDRING_CLIENT_<KEY>, over the file, and the options below, over all. --print-config shows every key,
its value, and where the value came from.

\b
  fl-client --server fl.example.org:8443 insecure=true
  fl-client /etc/fedring/client.toml --partition 0/4
  fl-client client.toml trainer=my_project.training:train trusted='["fedring", "my_project"]'
  fl-client cards --help

Exits with 0 when told to stop, with 78 if the configuration is wrong or another client uses this client_id, and with
77 if the server refuses this client. If the server cannot be reached, fl-client keeps trying.
"""

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command(help=_HELP)
def command(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[CONFIG] [KEY=VALUE]...", show_default=False)
    ] = None,
    server: Annotated[str | None, typer.Option(help="the address of fl-server, host:port")] = None,
    client_id: Annotated[str | None, typer.Option(help="the stable name of this client, unique in the fleet")] = None,
    state_dir: Annotated[Path | None, typer.Option(help="a folder that only this client uses")] = None,
    data_root: Annotated[Path | None, typer.Option(help="the folder of the data sets")] = None,
    partition: Annotated[str | None, typer.Option(metavar="I/N", help="train on part I of N, counted from 0")] = None,
    check_config: Annotated[
        bool, typer.Option("--check-config", help="check whether fl-client could start, and exit")
    ] = False,
    fingerprint: Annotated[
        bool,
        typer.Option("--fingerprint", help="print the fingerprint of this client's key, and exit"),
    ] = False,
    print_config: Annotated[bool, typer.Option("--print-config", help="print the configuration, and exit")] = False,
    version: Annotated[bool, typer.Option("--version", help="print the version, and exit")] = False,
) -> None:
    """Run the command line: load and check the configuration, then serve."""
    if version:
        print(f"fl-client {VERSION}")
        raise typer.Exit
    flags = {"server": server, "client_id": client_id, "state_dir": state_dir, "data_root": data_root}
    try:
        file, overrides = split_arguments(arguments or [])
        loaded = load_config(ClientConfig, file, overrides=overrides, flags=flags | parse_partition(partition))
        if print_config:
            print(describe(loaded))
            raise typer.Exit
        if fingerprint:
            from fedring.client.policy.identity import load_signer  # imports cryptography

            print(load_signer(loaded.config.tls, loaded.config.state_dir).fingerprint)
            raise typer.Exit
        check_torch()
        check_grpcio()
        from fedring.client.policy.privacy import coverage
        from fedring.client.startup_checks import check  # imports torch

        check(loaded.config)
        if check_config:
            from fedring.client.training.trainer import offered_by

            offered, covered = offered_by(loaded.config).lines(), coverage(loaded.config.privacy)
            print(*offered, *covered, "the configuration is good", sep="\n")
            raise typer.Exit
        code = serve(loaded)
    except ConfigError as error:
        print(f"fl-client: {error}", file=sys.stderr)
        code = Exit.CONFIG
    except ImportError as error:
        if not (sentence := missing(error)):
            raise
        print(f"fl-client: {sentence}", file=sys.stderr)
        code = Exit.CONFIG
    raise typer.Exit(code)


def parse_partition(text: str | None) -> dict[str, str | None]:
    """Return the flags that --partition stands for.

    Args:
        text: "I/N", part I of N; None = the option was not given.

    Raises:
        ConfigError: If the text has another form.
    """
    if text is None:
        return {}
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal()):
        raise ConfigError(f"--partition {text!r} is not of the form I/N, such as 0/4")
    return {"partition_index": index, "partition_count": count}


def serve(loaded: Loaded[ClientConfig]) -> Exit:
    """Take part until told to stop or refused by the server.

    Returns:
        The exit code.
    """
    from fedring.client.federation import Federation
    from fedring.client.restart import Restart
    from fedring.client.startup_checks import warn_of_insecurity
    from fedring.client.training.process import CodeProcess
    from fedring.client.training.trainer import DeclaredTrainer, prepare
    from fedring.train.jobs.modes import MODES

    config, folder = loaded.config, Path.cwd()
    set_up_logs(config.log_style, config.log_level)
    origins = ", ".join(sorted(set(loaded.origins.values()))) or "defaults"
    where = f"server {config.server}, client {config.client_id}, state in {config.state_dir}"
    log_always(lambda: {"client": config.client_id})
    log.info("fl-client of %s, %s, configuration from %s", SOFTWARE, where, origins)
    warn_of_insecurity(config)
    set_up_tracing("fl-client")
    prepare(config, trains=not config.training.process)
    trainer = DeclaredTrainer(config)
    if config.training.process:
        trainer.run_apart(CodeProcess(config, trainer.waits_for_code))
    try:
        federation = Federation(
            config, on_evaluate=trainer.evaluate, modes=MODES, tell=lambda text: sd_notify(f"STATUS={text}")
        )
    except OSError as error:  # Such as a full disk: a later start may work.
        log.error("cannot start with the state folder %s: %s", config.state_dir, error)
        return Exit.FAILED
    log_always(lambda: federation.ids)
    restart = Restart(federation.close, folder)

    def stop(number: int, frame: FrameType | None) -> None:
        restart.cancel()
        signal.signal(number, signal.SIG_DFL)  # A second signal ends the process at once.
        sd_notify("STOPPING=1\nSTATUS=stopping")
        federation.close()
        if trainer.in_users_code:
            raise AskedToStop  # The built-in loop checks whether to stop, but a user's may not.

    with closing(trainer), federation:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        signal.signal(signal.SIGUSR2, restart.ask)
        sd_notify("READY=1")
        gc.freeze()  # Collections need not look at these objects again, since they live as long as the process.
        try:
            with suppress(KeyboardInterrupt):
                for task in federation:
                    with restart.after_training():
                        trainer.train(task)
                    if restart.wanted:
                        break
        except Refused as error:
            log.error("%s", error)
            return error.exit_code
    if restart.wanted:
        restart.now()
    log.info("stopped")
    return Exit.OK


def main() -> None:
    """Run the program fl-client."""
    faulthandler.register(signal.SIGUSR1)  # Prints all stacks to stderr, even if the daemon is stuck.
    if sys.argv[1:2] == ["cards"]:
        from fedring.client.cards_command import app as cards

        sys.exit(run(cards, "fl-client cards", sys.argv[2:]))
    bound_arenas()
    sys.exit(run(app, "fl-client", sys.argv[1:]))


if __name__ == "__main__":
    main()
