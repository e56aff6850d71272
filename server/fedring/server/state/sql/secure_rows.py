"""The database's rows of rounds with secure aggregation.

They are the clients' messages and the decisions. Nothing of it is secret from the server, and all of it goes with the
end of its round.
"""

from sqlalchemy import Connection, delete, select

from fedring.server.state.interfaces import Acceptance
from fedring.server.state.rows import SecureMessageRow, SecureRoundRow
from fedring.server.state.sql import sealed
from fedring.server.state.sql.tables import rounds, secure_messages, secure_rounds


def add_message(connection: Connection, row: SecureMessageRow) -> Acceptance:
    """Keep a message, unless one of its kind is known.

    The client and the round count.
    """
    same = (
        (secure_messages.c.round == row.round)
        & (secure_messages.c.client_id == row.client_id)
        & (secure_messages.c.kind == row.kind)
    )
    if known := sealed.rows_of(connection, select(secure_messages).where(same), SecureMessageRow):
        return Acceptance.ALREADY if known == [row] else Acceptance.OTHER
    sealed.add(connection, row)
    return Acceptance.NEW


def messages_of(connection: Connection, number: int) -> list[SecureMessageRow]:
    """Return the messages of a round, sorted by client and kind."""
    query = select(secure_messages).where(secure_messages.c.round == number)
    ordered = query.order_by(secure_messages.c.client_id, secure_messages.c.kind)
    return sealed.rows_of(connection, ordered, SecureMessageRow)


def save_decisions(connection: Connection, row: SecureRoundRow) -> None:
    """Keep a round's decisions, in place of earlier ones."""
    connection.execute(delete(secure_rounds).where(secure_rounds.c.round == row.round))
    sealed.add(connection, row)


def decisions_of(connection: Connection, number: int) -> SecureRoundRow | None:
    """Return the decisions of a round; None if none are kept."""
    query = select(secure_rounds).where(secure_rounds.c.round == number)
    return next(iter(sealed.rows_of(connection, query, SecureRoundRow)), None)


def forget_ended(connection: Connection) -> None:
    """Remove the rows of rounds that have ended."""
    opened = select(rounds.c.round).where(rounds.c.ended_at.is_(None))
    for table in (secure_messages, secure_rounds):
        connection.execute(delete(table).where(table.c.round.not_in(opened)))
