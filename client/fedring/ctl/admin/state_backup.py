"""flctl backup, restore and migrate: copies and moves of a server's state.

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
from fedring.daemon.exits import Exit

if TYPE_CHECKING:
    from fedring.server.state.backup.contents import Manifest

StateDir = Annotated[Path, typer.Option("--state-dir", metavar="DIR", help="State folder of the server, on its host.")]
StateUrl = Annotated[str, typer.Option("--state-url", metavar="URL", help="Database of a shared state, instead.")]
BlobUrl = Annotated[str, typer.Option("--blob-url", metavar="URL", help="Object store of that state.")]
DEFAULT_STATE_DIR = Path("fl-server-state")  # as in fl-server's configuration


def backup(
    target: Annotated[
        Path, typer.Argument(metavar="DIR", help="The folder to make; it appears when the backup is complete.")
    ],
    state_dir: StateDir = DEFAULT_STATE_DIR,
    state_url: StateUrl = "",
    blob_url: BlobUrl = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Copy the complete state of the server to a new folder.

    The server may run meanwhile. Every byte of the copy is checked. Protect it as you protect a key, since it holds
    what all clients have sent. A backup of a state folder can be restored into a database, and the other way round.
    """
    shared = _is_shared(state_dir, state_url, blob_url)
    from fedring.server.state.backup.create import back_up  # imports the database, which most verbs do not need

    began = time.monotonic()
    with _sentences(), _bar("backup") as tell:
        if shared:
            from fedring.server.state.shared.source import shared_source  # whose packages are an extra

            with shared_source(state_url, blob_url) as source:
                manifest = back_up(source, target, tell)
        else:
            manifest = back_up(state_dir, target, tell)
    _report("backup", {"backup": str(target)}, manifest, time.monotonic() - began, output)


def restore(
    source: Annotated[Path, typer.Argument(metavar="DIR", help="The folder that flctl backup has made.")],
    state_dir: StateDir = DEFAULT_STATE_DIR,
    state_url: StateUrl = "",
    blob_url: BlobUrl = "",
    replace: Annotated[
        bool,
        typer.Option(
            "--replace",
            help="Move an existing state aside: to a folder replaced-TIME in the state folder, "
            "or to a schema replaced_TIME in the database.",
        ),
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Restore the server's state from a backup.

    The server must not run meanwhile. Every byte of the backup is checked before anything is changed. If the restore
    into a state folder is interrupted, fl-server does not start until you have repeated it.
    """
    shared = _is_shared(state_dir, state_url, blob_url)
    from fedring.server.state.backup.restore import restore as restore_state

    began = time.monotonic()
    with _sentences(), _bar("restore") as tell:
        if shared:
            from fedring.server.state.shared.restoring import restore_shared  # whose packages are an extra

            done = restore_shared(source, state_url, blob_url, replace=replace, tell=tell)
        else:
            done = restore_state(source, state_dir, replace=replace, tell=tell)
    place = {"state_url": state_url, "blob_url": blob_url} if shared else {"state_dir": str(state_dir)}
    replaced = str(done.replaced or done.replaced_schema) or None
    more = {"backup": str(source), **place, "replaced": replaced, "finished": done.finished, "left": done.left or None}
    _report("restored", more, done.manifest, time.monotonic() - began, output)


def migrate(
    state_url: Annotated[str, typer.Option("--state-url", metavar="URL", help="Database without a state.")],
    blob_url: Annotated[
        str, typer.Option("--blob-url", metavar="URL", help="Object store, below a prefix of its own.")
    ],
    state_dir: StateDir = DEFAULT_STATE_DIR,
    output: OutputOption = Output.TABLE,
) -> None:
    """Move the server's state into a database and an object store.

    The server must not run meanwhile. Jobs go on where they were, in the same round. What was in the folder is kept in
    a folder migrated-TIME there. If the move is interrupted, no server starts on the folder until you have repeated it.
    """
    from fedring.server.state.shared.moving import move  # whose packages are an extra

    began = time.monotonic()
    with _sentences(), _bar("migrate") as tell:
        done = move(state_dir, state_url, blob_url, tell)
    found, seconds = done.contents, time.monotonic() - began
    if output is Output.JSON:
        return print_json(
            {
                "state_dir": str(state_dir),
                "state_url": state_url,
                "blob_url": blob_url,
                "aside": str(done.aside),
                "finished": found is None,
                "run_id": found.run_id if found else None,
                "models": found.models if found else None,
                "rounds": found.rounds if found else None,
                "open_round": (found.open_round or None) if found else None,
                "blobs": len(found.blobs) if found else None,
                "seconds": round(seconds, 3),
            }
        )
    rows = [("from", str(state_dir)), ("database", state_url), ("objects", blob_url)]
    if found is None:
        rows.append(("completed", "a move that had been interrupted"))
    else:
        rows += [("models", f"{found.models}"), ("rounds", f"{found.rounds}")]
        rows += [("open round", f"{found.open_round or 'none'}"), ("blobs", f"{len(found.blobs)}")]
    rows += [("earlier files", str(done.aside)), ("time", duration(seconds))]
    print_table("moved", ("what", "now"), rows)


def _is_shared(state_dir: Path, state_url: str, blob_url: str) -> bool:
    """Return whether a shared state is meant."""
    if bool(state_url) != bool(blob_url):
        raise Failure("--state-url and --blob-url belong together: give both, or none", Exit.USAGE)
    if state_url and state_dir != DEFAULT_STATE_DIR:
        raise Failure("give --state-dir, or --state-url and --blob-url, not all of them", Exit.USAGE)
    return bool(state_url)


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
    if left := more.get("left"):
        rows.append(("left", f"the next server to lead tidies the object store up: {left}"))
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
