"""flctl store: a meeting place for the workers of a training.

They find each other there, also after some of them are lost.
"""

import signal
import socket
import threading
from typing import Annotated

import typer

from fedring.control.failure import Failure
from fedring.ctl.options import checked_address
from fedring.daemon.signals import wait

DEFAULT_LISTEN = "127.0.0.1:29500"


def store(
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", callback=checked_address, help="Where to listen; workers need it as MASTER_ADDR:PORT."
        ),
    ] = DEFAULT_LISTEN,
) -> None:
    """Host a torch TCPStore where workers meet, until SIGTERM.

    After a loss, workers meet there again (fedring.ring.rejoin). It has no authentication and no encryption: whoever
    reaches the port can read and change everything. Let it listen only on loopback, or in a network that you trust.
    """
    from fedring.c10d import TCPStore  # torch takes seconds to load

    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    try:
        listener = socket.create_server(
            (host, int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET, reuse_port=False
        )
    except OSError as error:
        raise Failure(f"cannot listen on {listen}: {error.strerror}") from error
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    number = listener.getsockname()[1]
    hosted = TCPStore(host, number, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
    print(f"the store listens on {host}:{hosted.port}, without authentication", flush=True)
    wait(stopped)
