"""What the database knows of each client beyond the updates that it keeps: how many there were, and the newest.

An update is kept for some rounds only. A client that was killed just after its update was accepted, and returns much
later, must still learn that it was accepted. So each client's newest accepted update stays known until the client is
forgotten.
"""

from collections import Counter

from sqlalchemy import ColumnElement, Connection, Select, delete, func, select

from fedring.server.state import sealed
from fedring.server.state.rows import ClientRow, LastAccepted
from fedring.server.state.tables import clients, evaluations, rounds, updates

_KEPT = select(updates.c.client_id, func.count()).group_by(updates.c.client_id)
_PRUNED = select(clients.c.client_id, clients.c.pruned_updates)
_ACCEPTED = select(updates.c.epoch, updates.c.round, updates.c.name)
_LAST = (clients.c.last_epoch, clients.c.last_round, clients.c.last_name)
_PRUNED_LAST = select(*_LAST).where(clients.c.last_name != "")


def update_counts(connection: Connection) -> Counter[str]:
    """Return how many updates of each client were accepted, kept or pruned."""
    return _counted(connection, _PRUNED) + _counted(connection, _KEPT)


def accepted_name(connection: Connection, number: int, client_id: str) -> str:
    """Return the name of the client's accepted update in the round; empty if none is known."""
    kept = select(updates.c.name).where((updates.c.round == number) & (updates.c.client_id == client_id))
    pruned = select(clients.c.last_name).where((clients.c.last_round == number) & (clients.c.client_id == client_id))
    return connection.execute(kept).scalar() or connection.execute(pruned).scalar() or ""


def last_accepted(connection: Connection) -> dict[str, LastAccepted]:
    """Return each client's newest accepted update, kept or pruned, by client id."""
    kept = _ACCEPTED.add_columns(updates.c.client_id)
    pruned = _PRUNED_LAST.add_columns(clients.c.client_id)
    return _newest(connection, kept, pruned)


def forget(connection: Connection, client_id: str) -> int:
    """Remove a client, its evaluations and its updates in rounds that have ended; return the number of removed rows."""
    ended = select(rounds.c.round).where(rounds.c.ended_at.is_not(None))
    theirs = (updates.c.client_id == client_id) & updates.c.round.in_(ended)
    removed = connection.execute(delete(updates).where(theirs)).rowcount
    for table in (clients, evaluations):
        removed += connection.execute(delete(table).where(table.c.client_id == client_id)).rowcount
    return removed


def remember(connection: Connection, old: ColumnElement[bool]) -> None:
    """Note how many updates each client loses, and its newest, before the updates that match `old` are deleted."""
    pruned = _counted(connection, _KEPT.where(old))
    if not pruned:
        return
    counts = _counted(connection, _PRUNED)
    newest = _newest(
        connection,
        _ACCEPTED.where(old).add_columns(updates.c.client_id),
        _PRUNED_LAST.where(clients.c.client_id.in_(pruned)).add_columns(clients.c.client_id),
    )
    rows = [
        ClientRow(client, counts[client] + count, last.epoch, last.round, last.name)
        for client, count in pruned.items()
        for last in [newest[client]]
    ]
    connection.execute(delete(clients).where(clients.c.client_id.in_(pruned)))
    sealed.add(connection, *rows)


def _newest(connection: Connection, *queries: Select[int, int, str, str]) -> dict[str, LastAccepted]:
    """Return each client's newest update among the rows (epoch, round, name, client) of all queries."""
    newest: dict[str, LastAccepted] = {}
    for query in queries:
        for epoch, number, name, client in connection.execute(query):
            found = LastAccepted(epoch, number, name)
            newest[client] = max(newest.get(client, found), found)
    return newest


def _counted(connection: Connection, query: Select[str, int]) -> Counter[str]:
    return Counter(dict(connection.execute(query).all()))
