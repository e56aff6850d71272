"""A real fl-server and fl-clients on this host, for a `with` block.

    with Fleet(directory, {"keep_models": 3}, [{}, {"data": "mine:samples"}]) as fleet:
        with Control(fleet.control) as control: ...
        fleet.kill(0, signal.SIGKILL)
        fleet.restart(0)

State is below `directory`/state, logs are below `directory`/logs. Both stay there, and the next Fleet in the same
directory continues with the state.
"""

import json
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self
from urllib.parse import urlsplit

from fedring.control.failure import Failure
from fedring.ctl.process import Process, stop_all

_READY_SECONDS = 120.0
_STOP_SECONDS = 15.0


class Fleet:
    """A server and its clients as child processes.

    The maker of a Fleet stops it, best by a `with` block. `listen`, `control` and `web` are the server's addresses,
    once it runs; `web` is empty if it has no page.

    Args:
        directory: Folder of state and logs.
        server_overrides: Configuration keys of the server; by default it listens on free ports.
        clients: Configuration keys of each client. By default client number i has the id "client-i", and the i-th part
            of the samples.
        env: Environment variables of all daemons.
        code: Folders in which the daemons find modules, after all others.
    """

    daemon: ClassVar[type[Process]] = Process
    """The class of every daemon's process."""

    def __init__(
        self,
        directory: Path,
        server_overrides: Mapping[str, Any] | None = None,
        clients: Sequence[Mapping[str, Any]] = (),
        *,
        env: Mapping[str, str] | None = None,
        code: Sequence[Path] = (),
    ) -> None:
        self.directory = directory.absolute()
        self.listen = ""
        self.control = ""
        self.ready: dict[str, str] = {}
        """All addresses that the server has printed when it was ready, by name."""
        self.web = ""
        self.server = self._process("server", "fedring.server.main", {**_ANY_PORTS, **(server_overrides or {})})
        self.clients = [
            self._process(f"client-{i}", "fedring.client.main", {**_part(i, len(clients)), **given})
            for i, given in enumerate(clients)
        ]
        for process in (self.server, *self.clients):
            process.env.update(env or {})
            if code:
                process.find_code_in(code)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:  # also KeyboardInterrupt: what was started must not keep running
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server, and then the clients.

        This waits until the server is ready, but not for the clients.
        """
        (self.directory / "logs").mkdir(parents=True, exist_ok=True)
        (self.directory / "state").mkdir(parents=True, exist_ok=True)
        self.start_server()
        for client in self.clients:
            client.settings["server"] = self.listen
            client.start()

    def stop(self) -> None:
        """Stop all daemons, the clients first.

        So they do not try to reach a server that is gone.
        """
        try:
            stop_all(self.clients, _STOP_SECONDS)
        finally:
            stop_all([self.server], _STOP_SECONDS)

    def start_server(self) -> None:
        """Start the server, and wait until it is ready.

        It keeps the addresses of an earlier start.
        """
        self.server.start()
        self.ready = json.loads(self.server.first_line(_READY_SECONDS))
        self.listen, self.control = self.ready["listen"], self.ready["control"]
        self.server.settings |= {"listen": self.listen, "control_listen": self.control}
        if page := self.ready.get("web", ""):
            self.web, self.server.settings["web_port"] = page, urlsplit(page).port

    def restart_server(self) -> None:
        """Kill the server, if it runs, and start it again."""
        self.server.kill()
        self.start_server()

    def kill(self, index: int, number: int = signal.SIGKILL) -> None:
        """Send the signal to a client.

        After SIGKILL, wait until it has ended.
        """
        self.clients[index].send(number)
        if number == signal.SIGKILL:
            self.clients[index].wait()

    def restart(self, index: int) -> None:
        """Kill a client, if it runs, and start it again."""
        self.clients[index].kill()
        self.clients[index].start()

    def on_death(self, call: Callable[[], None]) -> None:
        """Call `call`, in another thread, as soon as a daemon ends."""

        def watch(process: Process) -> None:
            process.wait()
            call()

        for process in (self.server, *self.clients):
            threading.Thread(target=watch, args=(process,), daemon=True, name=f"watch {process.name}").start()

    def failure(self) -> Failure | None:
        """Return the failure of the first ended daemon, or None.

        None means that all of them run.
        """
        return next((p.failure() for p in (self.server, *self.clients) if p.poll() is not None), None)

    def _process(self, name: str, module: str, settings: Mapping[str, Any]) -> Process:
        state = {"state_dir": str(self.directory / "state" / name)}
        log = self.directory / "logs" / f"{name}.log"
        return self.daemon(str(settings.get("client_id", name)), module, state | dict(settings), log)


_ANY_PORTS = {"listen": "127.0.0.1:0", "control_listen": "127.0.0.1:0"}


def _part(index: int, count: int) -> dict[str, Any]:
    return {
        "client_id": f"client-{index}",
        "partition_index": index,
        "partition_count": count,
        "clients_on_host": count,
    }
