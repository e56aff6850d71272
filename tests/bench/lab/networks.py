"""The hosts of a measurement's ranks.

They all run on this host, or each behind a link of a given rate. As root, each rank gets a network namespace of its
own, behind a full-duplex link that the kernel limits (`tc tbf`). All namespaces are connected by one switch. Without
root the ranks share the loopback interface, which has no limit.
"""

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fedring.control.failure import Failure
from fedring.ctl.local.ranks import Host
from fedring.ctl.local.runner import ended_by_signals
from fedring.daemon.exits import Exit

_RATE = re.compile(r"[1-9]\d*(kbit|mbit|gbit)")
LIMITED = "network namespaces, tc tbf"
UNSHAPED = "unshaped: loopback without a limit"


@dataclass(frozen=True, slots=True)
class Network:
    """The hosts of a measurement, and their connection."""

    hosts: list[Host]
    rate: str  # such as "100mbit"; empty = no limit was wanted
    limit: str  # how the rate is enforced, in words

    def facts(self) -> dict[str, str | None]:
        """Return the network's facts for a file of results."""
        return {"rate": self.rate or None, "limit": self.limit}


@contextlib.contextmanager
def network(count: int, rate: str = "", *, shared_memory: bool = False, free: int = 0) -> Iterator[Network]:
    """Make `count` hosts, and remove them afterwards.

    Args:
        count: Number of hosts.
        rate: The rate of each host's link, such as "100mbit"; it needs root, and without root there is no limit.
            Without a rate, all hosts are this machine's loopback interface.
        shared_memory: Whether ranks of the ring may use shared memory, if there is no rate.
        free: How many of the first hosts have a link without a limit.
    """
    with ended_by_signals(), contextlib.ExitStack() as stack:
        if rate and (hosts := stack.enter_context(_namespaces(count, rate, free))):
            yield Network(hosts, rate, LIMITED)
        else:
            env = _variables("127.0.0.1", "lo", shared_memory=shared_memory and not rate)
            yield Network([Host(env=env)] * count, rate, UNSHAPED)


def line_of(facts: Mapping[str, Any]) -> str:
    """Return what connects the hosts, in a word, from a network's facts."""
    return str(facts["rate"]) if facts["limit"] == LIMITED else "loopback without a limit"


def check_rate(option: str, rate: str) -> str:
    """Return the rate of a line that an option names.

    Raises:
        Failure: It is no rate.
    """
    if not _RATE.fullmatch(rate):
        raise Failure(f"{option} {rate!r} is no rate: write a number and kbit, mbit or gbit, as in 100mbit", Exit.USAGE)
    return rate


@contextlib.contextmanager
def _namespaces(count: int, rate: str, free: int) -> Iterator[list[Host]]:
    """Make a namespace for each host, and remove them afterwards.

    There are none without the right to make them.
    """
    switch = f"fedring{os.getpid()}"
    names = [f"{switch}-{index}" for index in range(count)]
    made: list[str] = []
    try:
        try:
            _ip("netns", "add", switch)
        except (OSError, subprocess.CalledProcessError):  # no such program, or not root
            yield []
            return
        made.append(switch)
        for name in names:
            _ip("netns", "add", name)
            made.append(name)
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for index, name in enumerate(names):
            _attach(switch, name, index, "" if index < free else rate)
        yield [
            Host(("ip", "netns", "exec", name), _variables(_address(index), "eth0")) for index, name in enumerate(names)
        ]
    finally:
        for name in made:
            _ip("netns", "delete", name)


def _attach(switch: str, name: str, index: int, rate: str) -> None:
    """Connect a host to the switch by a limited link.

    Both ends of the link are limited to the rate, if there is one.
    """
    port = f"port{index}"
    _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
    _ip("-n", switch, "link", "set", port, "master", "switch", "up")
    _ip("-n", name, "addr", "add", f"{_address(index)}/24", "dev", "eth0")
    _ip("-n", name, "link", "set", "eth0", "up")
    _ip("-n", name, "link", "set", "lo", "up")
    for where, device in ((switch, port), (name, "eth0")) if rate else ():
        shape = ["tbf", "rate", rate, "burst", "128kb", "latency", "200ms"]
        _run("tc", "-n", where, "qdisc", "add", "dev", device, "root", *shape)


def _variables(address: str, interface: str, *, shared_memory: bool = False) -> dict[str, str]:
    """Return the variables that bind a rank to an address.

    Without shared memory, the rank uses the network only.
    """
    return {
        "GLOO_SOCKET_IFNAME": interface,
        "FEDRING_RING_LISTEN": f"{address}:0",
        "FEDRING_RING_LOCAL_TRANSPORT": str(shared_memory).lower(),
    }


def _address(index: int) -> str:
    return f"10.77.0.{index + 1}"


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
