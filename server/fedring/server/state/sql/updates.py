"""The accepted updates in the database, kept and pruned.

An update is kept for some rounds only; of each client's pruned ones, the number and the newest are known. A client that
was killed just after its update was accepted, and returns much later, must still learn that it was accepted. So each
client's newest accepted update stays known until the client is forgotten.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, delete, exists, func, select
from sqlalchemy.exc import IntegrityError

from fedring.daemon.crash import crashpoint
from fedring.server.state.failures import StoreError
from fedring.server.state.rows import Acceptance, ClientRow, LastAccepted, Pruned, UpdateRow
from fedring.server.state.sql import sealed
from fedring.server.state.sql.blob_names import named_blobs
from fedring.server.state.sql.sealed import covered, rows_of, stored_of
from fedring.server.state.sql.tables import PUBLISHED, clients, commands, evaluations, rounds, updates
from fedring.server.state.sql.transactions import Database

_KEPT = select(updates.c.client_id, func.count()).group_by(updates.c.client_id)
_PRUNED = select(clients.c.client_id, clients.c.pruned_updates)


class UpdateStore:
    """The accepted updates of a run."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def accept(self, rows: Sequence[UpdateRow]) -> list[Acceptance]:
        """Accept updates, all in one transaction.

        Of a client, only the first answer to a round's command is accepted, also within `rows`.

        Returns:
            The outcome of each, in order.

        Raises:
            StorageError: "database", if there is no such round; then none of the updates was accepted.
        """
        if not rows:
            return []
        try:
            return self._accept(rows, look=False)
        except StoreError as error:
            if not isinstance(error.__cause__, IntegrityError):
                raise
        return self._accept(rows, look=True)

    def _accept(self, rows: Sequence[UpdateRow], *, look: bool) -> list[Acceptance]:
        """Accept updates, perhaps after a look for those that are there.

        There is hardly ever one, and to look takes a third of a transaction. Without a look, the database refuses all.
        """
        with self._database.transaction() as connection:
            keys = [(row.round, row.client_id) for row in rows]
            accepted: list[UpdateRow] = []
            if look:
                numbers, clients_ = map(set, zip(*keys, strict=True))
                # Two conditions, because SQLite would read the whole table for pairs (round, client).
                known = updates.c.round.in_(numbers) & updates.c.client_id.in_(clients_)
                accepted = rows_of(connection, select(updates).where(known), UpdateRow)
            names = {(row.round, row.client_id): row.name for row in accepted}
            outcome, new = [], []
            for key, row in zip(keys, rows, strict=True):
                if key not in names:
                    names[key] = row.name
                    new.append(row)
                    outcome.append(Acceptance.NEW)
                else:
                    outcome.append(Acceptance.ALREADY if names[key] == row.name else Acceptance.OTHER)
            if new:
                sealed.add(connection, *new)
            crashpoint("before_row_commit")
        crashpoint("after_row_commit")
        return outcome

    def accepted_name(self, number: int, client_id: str) -> str:
        """Return the name of a client's accepted answer to a round's command.

        Of pruned updates, only the newest is known.
        """
        this = (updates.c.round == number) & (updates.c.client_id == client_id)
        with self._database.transaction() as connection:
            if kept := rows_of(connection, covered(UpdateRow).where(this), UpdateRow):
                return kept[0].name
            pruned = rows_of(connection, select(clients).where(clients.c.client_id == client_id), ClientRow)
        return next((row.last_name for row in pruned if row.last_round == number), "")

    def last_accepted(self) -> dict[str, LastAccepted]:
        """Return each client's newest accepted update, kept or pruned, by client id."""
        with self._database.transaction() as connection:
            kept = stored_of(connection, covered(UpdateRow), UpdateRow)
            return _newest(kept, rows_of(connection, select(clients), ClientRow))

    def of_round(self, number: int) -> list[UpdateRow]:
        """Return the accepted updates of a round's model in client-id order."""
        query = select(updates).where(updates.c.buffer == number).order_by(updates.c.client_id)
        return self._database.all(query, UpdateRow)

    def uncounted(self, job_id: int) -> list[UpdateRow]:
        """Return a job's updates of rounds abandoned since its newest model.

        They are in the order of their rounds and clients. While a job with transforms runs, none is pruned.
        """
        query = select(updates).where(updates.c.buffer.in_(abandoned_since_a_model(job_id)))
        return self._database.all(query.order_by(updates.c.buffer, updates.c.client_id), UpdateRow)

    def counts(self) -> Counter[str]:
        """Return the number of accepted updates of each client id.

        Kept and pruned updates count.
        """
        with self._database.transaction() as connection:  # the numbers are for people: digests are not checked
            pruned, kept = connection.execute(_PRUNED).all(), connection.execute(_KEPT).all()
        return Counter(dict(pruned)) + Counter(dict(kept))

    def drop(self, number: int, clients: Sequence[str]) -> Pruned:
        """Remove clients' updates of a round.

        It is as if they had never been accepted.
        """
        theirs = (updates.c.buffer == number) & updates.c.client_id.in_(clients)
        with self._database.transaction() as connection:
            before = named_blobs(connection)
            removed = connection.execute(delete(updates).where(theirs)).rowcount
            return Pruned(removed, frozenset(before - named_blobs(connection)))

    def forget_client(self, client_id: str) -> Pruned:
        """Remove a client's evaluations and its updates of ended rounds.

        Its pruned updates are forgotten, too.
        """
        ended = select(rounds.c.round).where(rounds.c.ended_at.is_not(None))
        theirs = (updates.c.client_id == client_id) & updates.c.buffer.in_(ended)
        with self._database.transaction() as connection:
            before = named_blobs(connection)
            forget_answered(connection, theirs)
            removed = connection.execute(delete(updates).where(theirs)).rowcount
            for table in (clients, evaluations):
                removed += connection.execute(delete(table).where(table.c.client_id == client_id)).rowcount
            return Pruned(removed, frozenset(before - named_blobs(connection)))


def abandoned_since_a_model(job_id: int) -> Select[tuple[int]]:
    """Return the query of the rounds abandoned since a job's newest model."""
    mine = rounds.c.job_id == job_id
    newest = select(func.coalesce(func.max(rounds.c.round), 0)).where(mine, PUBLISHED)
    since = rounds.c.round > newest.scalar_subquery()
    return select(rounds.c.round).where(mine, since, rounds.c.ended_at.is_not(None))


def remember(connection: Connection, old: ColumnElement[bool]) -> None:
    """Note the number and the newest of each client's old updates.

    This comes before the updates that match `old` are deleted.
    """
    lost = stored_of(connection, covered(UpdateRow).where(old), UpdateRow)
    if not lost:
        return
    pruned = Counter(stored["client_id"] for stored in lost)
    theirs = clients.c.client_id.in_(pruned)
    before = rows_of(connection, select(clients).where(theirs), ClientRow)
    counts = pruned + Counter({row.client_id: row.pruned_updates for row in before})
    rows = [
        ClientRow(client, counts[client], last.epoch, last.round, last.name)
        for client, last in _newest(lost, before).items()
    ]
    connection.execute(delete(clients).where(theirs))
    sealed.add(connection, *rows)


def forget_answered(connection: Connection, answers: ColumnElement[bool]) -> None:
    """Forget the commands that some updates have answered.

    This comes before the updates that match `answers` are deleted: nothing else says that the commands are over.
    """
    same = (updates.c.round == commands.c.round) & (updates.c.client_id == commands.c.client_id)
    connection.execute(delete(commands).where(exists().where(same, answers)))


def _newest(kept: Iterable[Mapping[str, Any]], pruned: Iterable[ClientRow]) -> dict[str, LastAccepted]:
    """Return each client's newest accepted update, by client id.

    Args:
        kept: the stored values of updates.
        pruned: the clients whose updates were pruned.
    """
    found = [(row["client_id"], LastAccepted(row["epoch"], row["round"], row["name"])) for row in kept]
    found += [
        (row.client_id, LastAccepted(row.last_epoch, row.last_round, row.last_name)) for row in pruned if row.last_name
    ]
    newest: dict[str, LastAccepted] = {}
    for client, last in found:
        newest[client] = max(newest.get(client, last), last)
    return newest
