"""fl-server: the command line."""

import asyncio
import faulthandler
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # before grpc is imported; our own log says what matters

import typer

from fedring.daemon.config import ConfigError, Loaded, describe, load_config, split_arguments
from fedring.daemon.exits import Exit
from fedring.daemon.logs import set_up_logs
from fedring.daemon.memory import bound_arenas
from fedring.daemon.program import run
from fedring.extras import missing
from fedring.requirements import check_grpcio, check_torch
from fedring.server.config import ServerConfig
from fedring.server.state.failures import Deposed, FsyncFailed, StorageError, StorageFailed
from fedring.train.errors import SeamError
from fedring.version import VERSION

_HELP = """Send commands to fl-clients, average their updates, and keep the models.

[CONFIG] is a file that ends in .toml or .json. Each key=value sets one key over it; so do the environment
variables FEDRING_SERVER_<KEY>, over the file, and the options below, over all. --print-config shows every key,
its value, and where the value came from. Without any, fl-server listens on loopback and keeps its state in
./fl-server-state.

\b
  fl-server web_port=8445
  fl-server server.toml job.rounds=20
  fl-server listen=0.0.0.0:8443 insecure=true trusted='["fedring", "my_project"]'

When it serves, it prints one line of JSON with its addresses on standard output.

Exits with 0 when told to stop, with 78 if the configuration is wrong, and with 1 on a fault.
"""

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command(help=_HELP)
def fl_server(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG] [KEY=VALUE]...", show_default=False),
    ] = None,
    listen: Annotated[str | None, typer.Option(help="address for clients, host:port")] = None,
    control_listen: Annotated[str | None, typer.Option(help="address for flctl, host:port")] = None,
    state_dir: Annotated[Path | None, typer.Option(help="folder for models, updates and the database")] = None,
    check_config: Annotated[bool, typer.Option("--check-config", help="say whether it could start, and exit")] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="print every key and its origin, and exit")
    ] = False,
    drop_damaged: Annotated[
        bool, typer.Option("--drop-damaged", help="forget models of which a file is damaged, and start without them")
    ] = False,
    accept_older: Annotated[
        bool, typer.Option("--accept-older", help="go on although the database has lost its newest facts")
    ] = False,
    version: Annotated[bool, typer.Option("--version", help="print the version and exit")] = False,
) -> None:
    """Run the command line: load and check the configuration, then serve."""
    if version:
        print(f"fl-server {VERSION}")
        raise typer.Exit(Exit.OK)
    try:
        flags = {"listen": listen, "control_listen": control_listen, "state_dir": state_dir}
        loaded = load(arguments or [], flags)
        if print_config:
            print(describe(loaded))
            raise typer.Exit(Exit.OK)
        check_torch()
        check_grpcio()
        set_up_logs(loaded.config.log_style, loaded.config.log_level)
        from fedring.server import serving  # imports the database, and the ports

        with ExitStack() as stack:
            drop, accept = (drop_damaged, accept_older) if not check_config else (False, False)
            served = serving.serve(loaded, stack, check_only=check_config, drop_damaged=drop, accept_older=accept)
            code = asyncio.run(served)
    except ImportError as error:
        if not (sentence := missing(error)):
            raise
        print(f"fl-server: {sentence}", file=sys.stderr)
        raise typer.Exit(Exit.CONFIG) from error
    except (ConfigError, StorageError, FsyncFailed, SeamError) as error:
        print(f"fl-server: {error}", file=sys.stderr)
        later = isinstance(error, StorageFailed | FsyncFailed)  # nothing is wrong with the configuration
        failed = Exit.TRY_AGAIN if isinstance(error, Deposed) else Exit.FAILED
        raise typer.Exit(failed if later else Exit.CONFIG) from error
    raise typer.Exit(code)


def load(arguments: Sequence[str], flags: Mapping[str, object]) -> Loaded[ServerConfig]:
    """Load the configuration that the command line describes."""
    file, overrides = split_arguments(arguments)
    return load_config(ServerConfig, file, overrides=overrides, flags=flags)


def main() -> None:
    """Run the daemon: the console script calls this."""
    faulthandler.register(signal.SIGUSR1)  # writes all stacks to stderr, even if the daemon hangs
    bound_arenas()
    sys.exit(run(app, "fl-server", sys.argv[1:]))


if __name__ == "__main__":
    main()
