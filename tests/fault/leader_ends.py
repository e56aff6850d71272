"""Ways in which the leader of two servers ends, after each of which the other one leads.

A way registers itself in ENDS by its name. It returns when the other server serves, and another standby has started.
"""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import nan
from random import Random

from sqlalchemy import NullPool, create_engine, text

from fedring.control.failure import Failure
from fedring.daemon.crash import REGISTERED, SHARED
from fedring.daemon.exits import Exit
from tests.fault.faulty_fleet import SECONDS, FaultyFleet, wait_for
from tests.fault.killable_clients import KillableClients
from tests.fault.random_kills import wait
from tests.fault.two_servers import TwoServers, terms
from tests.ports import free_port
from tests.waiting import until

KILLED = 137  # how a process ends at a crash point
CRASH_POINTS = sorted(REGISTERED | SHARED)
_MOMENT = 0.5  # seconds, at most, in which the other server goes on before the frozen one does
_NEAR = (4.0, 7.0)  # seconds around those after which a silent leader is replaced


class TwoAddresses(TwoServers):
    """Two servers, each at an address of its own: so one may serve while the other one stands still.

    Attributes:
        led_at: When the newest leader had printed that it serves, monotonic seconds; NaN if it has not come that far.
    """

    led_at = 0.0

    @property
    def database(self) -> str:
        """The address of the database that both share."""
        return str(self.server.settings["state_url"])

    @property
    def leaders(self) -> int:
        """How many leaders there have been."""
        return sum(each.log.read_text().count('"leads in term ') for each in (self.server, self.standby))

    def start(self) -> None:
        FaultyFleet.start(self)
        self.standby.settings |= {key: f"127.0.0.1:{free_port()}" for key in ("listen", "control_listen")}
        self.start_standby()

    def until_the_standby_leads(self) -> None:
        try:
            wait_for(self, "the standby leads", lambda: self.standby.first_line(SECONDS))
            self.led_at = time.monotonic()
        except Failure:
            if self.standby.poll() != KILLED:
                raise
            self.led_at = nan  # it came to its crash point before it served
        self.listen, self.control = (str(self.standby.settings[key]) for key in ("listen", "control_listen"))

    def take_turns(self, crash_at: str = "") -> None:
        self.server, self.standby = self.standby, self.server
        self.start_standby(crash_at)

    def start_standby(self, crash_at: str = "") -> None:
        """Start the standby anew; it dies at a crash point, if one is given, once it leads."""
        self.standby.kill()
        self._standby_log = self.standby.log.stat().st_size if self.standby.log.exists() else 0
        self.standby.env |= {"FL_CRASH_AT": crash_at}
        self.standby.start()
        del self.standby.env["FL_CRASH_AT"]

    def until_the_standby_waits(self) -> bool:
        """Wait until the standby has found that the other server leads, or that one has ended; return which."""

        def waits() -> bool:
            return b"waits as a standby" in self.standby.log.read_bytes()[self._standby_log :]

        until(lambda: waits() or not self.server.running)
        return waits()


End = Callable[[TwoAddresses, KillableClients, Random], None]

ENDS: dict[str, End] = {}
"""Every way by its name, in the order of this file."""


def end(do: End) -> End:
    """Register a way under the name of its function."""
    ENDS[do.__name__] = do
    return do


@contextmanager
def exchange(fleet: TwoAddresses, clients: KillableClients, *, crash_at: str = "") -> Iterator[None]:
    """Let no client connect within; wait afterwards until the other server leads, and start another standby.

    Args:
        fleet: The two servers.
        clients: Their clients.
        crash_at: Where that standby dies, once it leads.
    """
    clients.server_is_up.clear()
    yield
    fleet.until_the_standby_leads()
    fleet.take_turns(crash_at)
    if crash_at:
        fleet.until_the_standby_waits()
    clients.server_is_up.set()


@end
def killed(fleet: TwoAddresses, clients: KillableClients, rng: Random) -> None:
    """Kill the leader."""
    with exchange(fleet, clients):
        fleet.server.kill()


@end
def stopped(fleet: TwoAddresses, clients: KillableClients, rng: Random) -> None:
    """Stop the leader with SIGTERM."""
    with exchange(fleet, clients):
        fleet.server.send(signal.SIGTERM)
        assert wait_for(fleet, "the end of the leader", fleet.server.wait) == Exit.OK


@end
def session_ended(fleet: TwoAddresses, clients: KillableClients, rng: Random) -> None:
    """End the leader's session with the database, as an administrator does, or a firewall."""
    with exchange(fleet, clients):
        ask(fleet.database, "SELECT pg_terminate_backend(pid) FROM leader")
        assert wait_for(fleet, "the end of the leader", fleet.server.wait) == Exit.TRY_AGAIN


@end
def frozen(fleet: TwoAddresses, clients: KillableClients, rng: Random) -> None:
    """Freeze the leader, and let it go on a moment after the other one serves."""
    freeze(fleet, clients, rng, rng.uniform(0, _MOMENT))


@end
def nearly_replaced(fleet: TwoAddresses, clients: KillableClients, rng: Random) -> None:
    """Freeze the leader for about as long as it may be silent; kill it if it goes on."""
    term = terms(fleet.database)
    clients.server_is_up.clear()
    fleet.server.send(signal.SIGSTOP)
    wait(rng.uniform(*_NEAR))
    fleet.server.send(signal.SIGCONT)
    wait(rng.uniform(0, _MOMENT))
    with exchange(fleet, clients):
        if terms(fleet.database) == term:
            fleet.server.kill()
        else:
            assert wait_for(fleet, "the end of the frozen leader", fleet.server.wait) == Exit.TRY_AGAIN


@end
def died_at_a_crash_point(fleet: TwoAddresses, clients: KillableClients, rng: Random) -> None:
    """Kill the leader, and let its successor die at a crash point, too."""
    fleet.start_standby(crash_at=rng.choice(CRASH_POINTS))
    killed(fleet, clients, rng)
    assert wait_for(fleet, "the crash", fleet.server.wait) == KILLED
    with exchange(fleet, clients):
        pass


def freeze(fleet: TwoAddresses, clients: KillableClients, rng: Random, seconds: float) -> None:
    """Freeze the leader, and let it go on some seconds after the other one serves; some clients wait for it."""
    clients.server_is_up.clear()
    fleet.server.send(signal.SIGSTOP)
    fleet.until_the_standby_leads()
    for name in rng.sample(clients.names, rng.randrange(len(clients.names))):
        clients.kill(name, spool=True)
    clients.server_is_up.set()
    wait(seconds)
    fleet.server.send(signal.SIGCONT)
    assert wait_for(fleet, "the end of the frozen leader", fleet.server.wait) == Exit.TRY_AGAIN
    fleet.take_turns()


def die_at_each(fleet: TwoAddresses, clients: KillableClients, places: Sequence[str]) -> dict[str, float]:
    """Let one leader after the other die at a crash point, while clients deliver.

    Returns:
        Of each place, the seconds from the death until the other server served; NaN if that one was just starting.
    """
    seconds = dict[str, float]()
    fleet.start_standby(places[0])
    fleet.until_the_standby_waits()
    with exchange(fleet, clients, crash_at=places[1]):
        fleet.server.kill()
    for number, place in enumerate(places):
        assert wait_for(fleet, f"the crash at {place}", fleet.server.wait) == KILLED
        died = time.monotonic() if fleet.until_the_standby_waits() else nan
        with exchange(fleet, clients, crash_at="".join(places[number + 2 : number + 3])):
            pass
        seconds[place] = fleet.led_at - died
    return seconds


def ask(database: str, query: str) -> list[tuple[object, ...]]:
    """Return the rows of a query, which is committed."""
    with create_engine(database, poolclass=NullPool).begin() as connection:
        found = connection.execute(text(query))
        return [tuple(row) for row in found] if found.returns_rows else []
