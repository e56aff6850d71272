"""flctl backup and restore: copies of a server's state.

A copy can be made while the server runs.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from fedring.control.failure import Failure
from fedring.ctl.options import OutputOption
from fedring.ctl.output import Output, duration, print_json, print_table, size, stderr_console

if TYPE_CHECKING:
    from fedring.server.state.backup.contents import Manifest

StateDir = Annotated[Path, typer.Option("--state-dir", metavar="DIR", help="State folder of the server, on its host.")]
DEFAULT_STATE_DIR = Path("fl-server-state")  # as in fl-server's configuration


def backup(
    target: Annotated[
        Path, typer.Argument(metavar="DIR", help="The folder to make; it appears when the backup is complete.")
    ],
    state_dir: StateDir = DEFAULT_STATE_DIR,
    output: OutputOption = Output.TABLE,
) -> None:
    """Copy the complete state of the server to a new folder.

    The server may run meanwhile. Every byte of the copy is checked. Protect it as you protect a key, since it holds
    what all clients have sent.
    """
    from fedring.server.state.backup.create import back_up  # imports the database, which most verbs do not need

    began = time.monotonic()
    with _sentences(), _bar("backup") as tell:
        manifest = back_up(state_dir, target, tell)
    _report("backup", {"backup": str(target)}, manifest, time.monotonic() - began, output)


def restore(
    source: Annotated[Path, typer.Argument(metavar="DIR", help="The folder that flctl backup has made.")],
    state_dir: StateDir = DEFAULT_STATE_DIR,
    replace: Annotated[
        bool, typer.Option("--replace", help="Move an existing state into a folder replaced-TIME in the state folder.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Restore the server's state from a backup.

    The server must not run meanwhile. Every byte of the backup is checked before anything is changed. If the restore is
    interrupted, fl-server does not start until you have repeated it.
    """
    from fedring.server.state.backup.restore import restore as restore_state

    began = time.monotonic()
    with _sentences(), _bar("restore") as tell:
        done = restore_state(source, state_dir, replace=replace, tell=tell)
    replaced = str(done.replaced) if done.replaced else None
    more = {"backup": str(source), "state_dir": str(state_dir), "replaced": replaced, "finished": done.finished}
    _report("restored", more, done.manifest, time.monotonic() - began, output)


def _report(title: str, more: dict[str, Any], manifest: "Manifest", seconds: float, output: Output) -> None:
    if output is Output.JSON:
        return print_json(
            {
                **more,
                "created_at": manifest.created_at,
                "software": manifest.software,
                "run_id": manifest.run_id,
                "models": manifest.models,
                "newest_model": manifest.newest_model or None,
                "rounds": manifest.rounds,
                "open_round": manifest.open_round or None,
                "blobs": manifest.blobs,
                "bytes": manifest.bytes,
                "seconds": round(seconds, 3),
            }
        )
    newest = f", the newest is {manifest.newest_model}" if manifest.newest_model else ""
    rows = [
        ("folder", more["backup"]),
        ("taken", manifest.created_at),
        ("models", f"{manifest.models}{newest}"),
        ("rounds", f"{manifest.rounds}"),
        ("open round", f"{manifest.open_round}" if manifest.open_round else "none"),
        ("blobs", f"{manifest.blobs}"),
        ("size", size(manifest.bytes)),
        ("time", duration(seconds)),
    ]
    if replaced := more.get("replaced"):
        rows.append(("earlier state", replaced))
    if more.get("finished"):
        rows.append(("completed", "a restore that had been interrupted"))
    print_table(title, ("what", "now"), rows)


@contextmanager
def _sentences() -> Iterator[None]:
    from fedring.server.state.backup.contents import BackupError

    try:
        yield
    except BackupError as error:
        raise Failure(str(error), error.exit_code) from error


@contextmanager
def _bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that advances a progress bar on stderr.

    There is no bar if stderr is no terminal.
    """
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=stderr_console()) as progress:
        task = progress.add_task(label, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
