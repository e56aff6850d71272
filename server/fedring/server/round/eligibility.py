"""Who may deliver an update: a pure function of the round."""

from collections.abc import Container

from fedring.rpc.errors import UnknownRound
from fedring.server.round.events import Phase, Round


def check_eligible(round_: Round | None, number: int, client: str, *, workers: Container[str] | None = None) -> None:
    """Check that a client may deliver its update of a round now.

    Args:
        round_: The round in progress, if there is one.
        number: The number of the round that the update is for.
        client: The client's id.
        workers: The clients that have trained as members of the round's group; None if the round has no group, or if
            nobody remembers its members.

    Raises:
        UnknownRound: "unknown_round" if another round, or none, is in progress; "round_closed" if it takes no more
            updates; "not_selected" if the client was not asked; "not_a_worker" if it has not trained with the group.
    """
    if round_ is None or number != round_.number:
        raise UnknownRound(f"round {number} is not open")
    if round_.phase is not Phase.TRAINING:
        raise UnknownRound(f"round {number} is closed", reason="round_closed")
    if client not in round_.selected:
        raise UnknownRound(f"{client} was not selected for round {number}", reason="not_selected")
    if workers is not None and client not in workers:
        raise UnknownRound(f"{client} has not trained with the group", reason="not_a_worker")
