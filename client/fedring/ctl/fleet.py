"""A real fl-server and real fl-clients on this host, for as long as a `with` lasts.

    with Fleet(directory, {"keep_models": 3}, [{}, {"data": "mine:samples"}]) as fleet:
        with Control(fleet.control) as control: ...
        fleet.kill(0, signal.SIGKILL)
        fleet.restart(0)

State is below `directory`/state, logs below `directory`/logs. Both are left behind, and found again by the next Fleet.
"""

import json
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self
from urllib.parse import urlsplit

from fedring.ctl.failure import Failure
from fedring.ctl.process import Process, stop_all

_READY_SECONDS = 120.0
_STOP_SECONDS = 15.0


class Fleet:
    """The daemons; `listen`, `control` and, if it has a page, `web` are the server's addresses once it runs."""

    daemon: ClassVar[type[Process]] = Process
    """How each of them is run."""

    def __init__(
        self,
        directory: Path,
        server_overrides: Mapping[str, Any] | None = None,
        clients: Sequence[Mapping[str, Any]] = (),
        *,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = directory.absolute()
        self.listen = ""
        self.control = ""
        self.ready: dict[str, str] = {}
        """All addresses that the server told when it was ready, by name."""
        self.web = ""
        self.server = self._process("server", "fedring.server.main", {**_ANY_PORTS, **(server_overrides or {})})
        self.clients = [
            self._process(f"client-{i}", "fedring.client.main", {**_part(i, len(clients)), **given})
            for i, given in enumerate(clients)
        ]
        for process in (self.server, *self.clients):
            process.env.update(env or {})

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:  # also an interrupt: nothing that was started stays
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        """The server is ready, and the clients are on their way to it."""
        (self.directory / "logs").mkdir(parents=True, exist_ok=True)
        (self.directory / "state").mkdir(parents=True, exist_ok=True)
        self.start_server()
        for client in self.clients:
            client.settings["server"] = self.listen
            client.start()

    def stop(self) -> None:
        """No process is left: clients go first, so that they do not miss the server."""
        try:
            stop_all(self.clients, _STOP_SECONDS)
        finally:
            stop_all([self.server], _STOP_SECONDS)

    def start_server(self) -> None:
        """The server is ready: at its old addresses, if it had some."""
        self.server.start()
        self.ready = json.loads(self.server.first_line(_READY_SECONDS))
        self.listen, self.control = self.ready["listen"], self.ready["control"]
        self.server.settings |= {"listen": self.listen, "control_listen": self.control}
        if page := self.ready.get("web", ""):
            self.web, self.server.settings["web_port"] = page, urlsplit(page).port

    def restart_server(self) -> None:
        """The server has been killed, if it still ran, and is ready again."""
        self.server.kill()
        self.start_server()

    def kill(self, index: int, number: int = signal.SIGKILL) -> None:
        """The client has got the signal; after SIGKILL it is gone."""
        self.clients[index].send(number)
        if number == signal.SIGKILL:
            self.clients[index].wait()

    def restart(self, index: int) -> None:
        """The client has been killed, if it still ran, and runs again."""
        self.clients[index].kill()
        self.clients[index].start()

    def on_death(self, call: Callable[[], None]) -> None:
        """From now on `call` is called, in another thread, when a daemon ends."""

        def watch(process: Process) -> None:
            process.wait()
            call()

        for process in (self.server, *self.clients):
            threading.Thread(target=watch, args=(process,), daemon=True, name=f"watch {process.name}").start()

    def failure(self) -> Failure | None:
        """What is to be said of the first daemon that has ended, if one has."""
        return next((p.failure() for p in (self.server, *self.clients) if p.poll() is not None), None)

    def _process(self, name: str, module: str, settings: Mapping[str, Any]) -> Process:
        state = {"state_dir": str(self.directory / "state" / name)}
        return self.daemon(name, module, state | dict(settings), self.directory / "logs" / f"{name}.log")


_ANY_PORTS = {"listen": "127.0.0.1:0", "control_listen": "127.0.0.1:0"}


def _part(index: int, count: int) -> dict[str, Any]:
    return {
        "client_id": f"client-{index}",
        "partition_index": index,
        "partition_count": count,
        "clients_on_host": count,
    }
