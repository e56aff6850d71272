"""Daemons behind lines of a given rate: the server and this process on one host, and each client on one of its own."""

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from fedring.ctl.fleet import Fleet
from fedring.ctl.local.ranks import Host
from tests.bench.lab.networks import LIMITED, Network, check_rate, network

RateOption = Annotated[
    str,
    typer.Option(
        help="Rate of each client's line, such as 100mbit; it needs root. Empty = the loopback interface, which has no "
        "limit."
    ),
]
SeedsOption = Annotated[
    int | None,
    typer.Option(
        min=1, help="Seeds of model and samples, each a training of its own.", show_default="3, with --quick 1"
    ),
]

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET, of linux/sched.h


@dataclass(frozen=True, slots=True)
class Lines:
    """The network of an experiment: what its server needs to know, and where its daemons run."""

    network: Network

    @property
    def server(self) -> Mapping[str, Any]:
        """Further configuration keys of the server."""
        if self.network.limit != LIMITED:
            return {}
        return {"listen": _listen(self.network.hosts[0]), "insecure": True}

    def place(self, fleet: Fleet) -> None:
        """Have each client run on its host."""
        if self.network.limit != LIMITED:
            return
        for client, host in zip(fleet.clients, self.network.hosts[1:], strict=True):
            client.prefix = host.prefix
            client.env.update(host.env)
            client.settings |= {"peer_listen": _listen(host), "insecure": True}


@contextmanager
def lines(clients: int, rate: str, *, limited: bool = True) -> Iterator[Lines]:
    """Make a line for each client, and put this process on the server's host, which has no limit.

    Args:
        clients: Number of clients.
        rate: As of `networks.network`; without root there is no limit.
        limited: Whether the clients' lines have the rate; otherwise they are as fast as this machine.
    """
    if rate:
        check_rate("--rate", rate)
    with network(clients + 1, rate, free=1 if limited else clients + 1) as net:
        if net.limit != LIMITED:
            yield Lines(net)
            return
        # Threads inherit the network of the thread that starts them, so gRPC's first channel must come after this.
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            _enter(f"/run/netns/{net.hosts[0].prefix[-1]}")
            yield Lines(net)
        finally:
            _set_network(before)
            os.close(before)


def _enter(path: str) -> None:
    """Put this thread, and all that it starts from now on, into a network."""
    there = os.open(path, os.O_RDONLY)
    try:
        _set_network(there)
    finally:
        os.close(there)


def _set_network(file: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(file, _NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "setns")


def _listen(host: Host) -> str:
    return host.env["FEDRING_RING_LISTEN"]
