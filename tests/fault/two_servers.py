"""Two servers of one shared state."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, text

from fedring.ctl.process import stop_all
from tests.fault.faulty_fleet import SECONDS, FaultyFleet, wait_for
from tests.ports import free_port


class TwoServers(FaultyFleet):
    """A fleet with a second server.

    Args:
        apart: It has addresses of its own, which the clients know; else it listens where the first one does, as soon
            as that is gone.
    """

    def __init__(
        self, folder: Path, database: str, clients: Sequence[Any] = (), settings: Any = None, *, apart: bool = False
    ) -> None:
        (folder / "objects").mkdir(exist_ok=True)
        shared = {"state_url": database, "blob_url": (folder / "objects").as_uri(), **(settings or {})}
        self._apart = {key: f"127.0.0.1:{free_port()}" for key in ("listen", "control_listen")} if apart else {}
        others = {"other_servers": [self._apart["listen"]]} if apart else {}
        super().__init__(folder, shared, [{**others, **each} for each in clients])
        self.standby = self._process("standby", "fedring.server.main", {**self.server.settings})
        self.standby.settings |= {"state_dir": str(folder / "state" / "standby"), "name": "standby"}

    def start(self) -> None:
        super().start()
        self.standby.settings |= {"listen": self.listen, "control_listen": self.control, **self._apart}
        self.standby.start()

    def stop(self) -> None:
        super().stop()
        stop_all([self.standby], SECONDS)

    def exchange(self) -> None:
        """Kill the server that leads, wait until the other one leads, and start another standby."""
        self.server.kill()
        self.until_the_standby_leads()
        self.take_turns()

    def take_turns(self) -> None:
        """Start the server that has ended as the standby of the other one."""
        self.server, self.standby = self.standby, self.server
        self.standby.start()

    def until_the_standby_leads(self) -> None:
        ready = json.loads(wait_for(self, "the standby leads", lambda: self.standby.first_line(SECONDS)))
        self.listen, self.control = (str(self.standby.settings[key]) for key in ("listen", "control_listen"))
        assert (ready["listen"], ready["control"]) == (self.listen, self.control)


def terms(database: str) -> int:
    engine = create_engine(database)
    with engine.begin() as connection:
        term = connection.execute(text("SELECT term FROM leader")).scalar_one()
    engine.dispose()
    return int(term)
