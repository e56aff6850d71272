"""flctl token: make, list and revoke bearer tokens, for clients without certificates."""

from pathlib import Path
from typing import Annotated

import typer

from fedring.control.failure import Failure
from fedring.ctl.access import connect
from fedring.ctl.options import DEFAULT_SERVER, OutputOption, ServerOption
from fedring.ctl.output import Output, print_json, print_table, say, to_dict, warn
from fedring.daemon.exits import Exit
from fedring.daemon.wording import counted
from fedring.rpc.identity import Role
from fedring.v1 import control_pb2 as pb

_DAY = 24 * 3600
_MOST_DAYS = 36_500


def create(
    name: Annotated[str, typer.Option(help="Whose token it is: the client_id of a client.")],
    role: Annotated[
        Role, typer.Option(help="What the token allows: to join as a client, or to use flctl as an operator.")
    ] = Role.CLIENT,
    days: Annotated[float, typer.Option(min=0, max=_MOST_DAYS, help="Days until it expires; 0 = never.")] = 365,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Write the token into this state folder on the server's host: for the first operator."
        ),
    ] = None,
    server: ServerOption = DEFAULT_SERVER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Make a token and print it.

    It cannot be printed again, since the server keeps only its digest.
    """
    seconds = round(days * _DAY)
    if state_dir is None:
        with connect(server) as control:
            created = control.tokens.create(role, name, valid_seconds=seconds)
    else:
        created = _create_offline(state_dir, role, name, seconds)
    if created.warning:
        warn(f"warning: {created.warning}")
    if output is Output.JSON:
        return print_json(to_dict(created))
    say(created.secret)


def list_(server: ServerOption = DEFAULT_SERVER, output: OutputOption = Output.TABLE) -> None:
    """List all tokens, oldest first, without their secrets."""
    with connect(server) as control:
        known = control.tokens.known()
    if output is Output.JSON:
        return print_json(to_dict(pb.TokenList(tokens=known)))
    columns = ("id", "role", "name", "created", "expires", "revoked")
    rows = [
        (row.token_id, row.role, row.name, row.created_at, row.expires_at or "never", row.revoked_at or "-")
        for row in known
    ]
    print_table(counted(len(rows), "token"), columns, rows)


def revoke(
    token_id: Annotated[
        str,
        typer.Argument(metavar="ID", help="The id in the list; in a token it is between the first two underscores."),
    ],
    server: ServerOption = DEFAULT_SERVER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Revoke a token, and close the sessions that were opened with it."""
    with connect(server) as control:
        row = control.tokens.revoke(token_id)
    if output is Output.JSON:
        return print_json(to_dict(row))
    say(f"the token {row.token_id} of {row.role} {row.name} is revoked")


def _create_offline(state_dir: Path, role: Role, name: str, seconds: int) -> pb.CreatedToken:
    from fedring.rpc.errors import BadRequest
    from fedring.server.guard.tokens import create_offline  # imports the database, which other verbs do not need

    try:
        row, token = create_offline(state_dir, role, name, seconds)
    except BadRequest as error:
        raise Failure(str(error), Exit.USAGE) from error
    return pb.CreatedToken(secret=token, token=pb.Token(token_id=row.token_id, role=row.role, name=row.name))
