"""Which of the servers that share a state leads."""

from dataclasses import dataclass


@dataclass(slots=True)
class Lead:
    """The server that leads, as far as this one knows.

    Attributes:
        here: Whether it is this one.
        leader: The address at which clients reach it, which is its name.
        control: Its address for flctl.
        term: The number of its term.
        since: When that began, by the database's clock, in seconds since 1970.
        standbys: The names of the servers that wait to lead.
        fault: Why it cannot be found out now who leads; empty while it can.
    """

    here: bool
    leader: str
    control: str = ""
    term: int = 0
    since: float = 0.0
    standbys: tuple[str, ...] = ()
    fault: str = ""

    @property
    def why_waits(self) -> str:
        """Why this server does not serve, for people."""
        return f"it waits as a standby: {self.fault or f'{self.leader} leads'}"


def absent(lead: Lead | None) -> str:
    """Return the state of a client without a session here.

    A standby has no sessions, so it does not know.
    """
    return "away" if lead is None or lead.here else "unknown"
