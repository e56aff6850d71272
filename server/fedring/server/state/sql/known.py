"""The database's memory of each client's pruned updates.

It has their number, and the newest. An update is kept for some rounds only. A client that was killed just after its
update was accepted, and returns much later, must still learn that it was accepted. So each client's newest accepted
update stays known until the client is forgotten.
"""

from collections import Counter
from collections.abc import Iterable

from sqlalchemy import ColumnElement, Connection, delete, func, select

from fedring.server.state.rows import ClientRow, LastAccepted, UpdateRow
from fedring.server.state.sql import sealed
from fedring.server.state.sql.sealed import covered, rows_of
from fedring.server.state.sql.tables import clients, evaluations, rounds, updates

_KEPT = select(updates.c.client_id, func.count()).group_by(updates.c.client_id)
_PRUNED = select(clients.c.client_id, clients.c.pruned_updates)


def update_counts(connection: Connection) -> Counter[str]:
    """Return the number of accepted updates of each client.

    Kept and pruned updates count. The numbers are for people: digests are not checked.
    """
    return Counter(dict(connection.execute(_PRUNED).all())) + Counter(dict(connection.execute(_KEPT).all()))


def accepted_name(connection: Connection, number: int, client_id: str) -> str:
    """Return the name of a client's accepted update in the round.

    Empty if none is known.
    """
    this = (updates.c.round == number) & (updates.c.client_id == client_id)
    if kept := rows_of(connection, covered(UpdateRow).where(this), UpdateRow):
        return kept[0].name
    pruned = rows_of(connection, select(clients).where(clients.c.client_id == client_id), ClientRow)
    return next((row.last_name for row in pruned if row.last_round == number), "")


def last_accepted(connection: Connection) -> dict[str, LastAccepted]:
    """Return each client's newest accepted update, kept or pruned, by client id."""
    return _newest(rows_of(connection, covered(UpdateRow), UpdateRow), rows_of(connection, select(clients), ClientRow))


def forget(connection: Connection, client_id: str) -> int:
    """Remove a client, its evaluations and its updates of ended rounds.

    Returns:
        The number of removed rows.
    """
    ended = select(rounds.c.round).where(rounds.c.ended_at.is_not(None))
    theirs = (updates.c.client_id == client_id) & updates.c.round.in_(ended)
    removed = connection.execute(delete(updates).where(theirs)).rowcount
    for table in (clients, evaluations):
        removed += connection.execute(delete(table).where(table.c.client_id == client_id)).rowcount
    return removed


def remember(connection: Connection, old: ColumnElement[bool]) -> None:
    """Note the number and the newest of each client's old updates.

    This comes before the updates that match `old` are deleted.
    """
    lost = rows_of(connection, covered(UpdateRow).where(old), UpdateRow)
    if not lost:
        return
    pruned = Counter(row.client_id for row in lost)
    theirs = clients.c.client_id.in_(pruned)
    before = rows_of(connection, select(clients).where(theirs), ClientRow)
    counts = pruned + Counter({row.client_id: row.pruned_updates for row in before})
    rows = [
        ClientRow(client, counts[client], last.epoch, last.round, last.name)
        for client, last in _newest(lost, before).items()
    ]
    connection.execute(delete(clients).where(theirs))
    sealed.add(connection, *rows)


def _newest(kept: Iterable[UpdateRow], pruned: Iterable[ClientRow]) -> dict[str, LastAccepted]:
    """Return each client's newest accepted update, by client id."""
    found = [(row.client_id, LastAccepted(row.epoch, row.round, row.name)) for row in kept]
    found += [
        (row.client_id, LastAccepted(row.last_epoch, row.last_round, row.last_name)) for row in pruned if row.last_name
    ]
    newest: dict[str, LastAccepted] = {}
    for client, last in found:
        newest[client] = max(newest.get(client, last), last)
    return newest
