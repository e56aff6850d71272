"""Slow networks on one host: network namespaces that a switch connects, each behind a link of a given rate."""

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Host:
    """A place to run processes: this machine, or a network namespace on it."""

    address: str  # by which the other hosts reach it
    interface: str
    prefix: tuple[str, ...] = ()  # words before a command that make it run here

    def start(self, command: Sequence[str], **options: object) -> "subprocess.Popen[str]":
        """Start the command on this host; options are those of subprocess.Popen."""
        return subprocess.Popen([*self.prefix, *command], text=True, **options)  # type: ignore[call-overload,no-any-return]


@contextlib.contextmanager
def network(count: int, rate: str = "") -> Iterator[list[Host]]:
    """Make `count` hosts, and remove them afterwards.

    With a rate such as "100mbit" each host is a namespace behind a full-duplex link of that rate, which needs root.
    Without a rate all hosts are this machine's loopback interface.
    """
    if not rate:
        yield [Host("127.0.0.1", "lo")] * count
        return
    name = f"fedring{os.getpid()}"
    names = [f"{name}-{index}" for index in range(count)]
    made: list[str] = []
    try:
        for space in (name, *names):
            _ip("netns", "add", space)
            made.append(space)
        _ip("-n", name, "link", "add", "switch", "type", "bridge")
        _ip("-n", name, "link", "set", "switch", "up")
        for index, space in enumerate(names):
            _attach(name, space, index, rate)
        prefixes = [("ip", "netns", "exec", space) for space in names]
        yield [Host(_address(index), "eth0", prefix) for index, prefix in enumerate(prefixes)]
    finally:
        for space in made:
            _ip("netns", "delete", space)


def sent_bytes(interface: str) -> int:
    """Return the bytes that this process' host has sent through an interface, with all headers."""
    with Path("/proc/net/dev").open() as table:  # this is the namespace's own, while /sys may show another one's
        for line in table:
            device, _, counters = line.partition(":")
            if device.strip() == interface:
                return int(counters.split()[8])
    raise KeyError(interface)


def _attach(switch: str, space: str, index: int, rate: str) -> None:
    """Connect a host to the switch, with both ends of the link limited to the rate."""
    port = f"port{index}"
    _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
    _ip("-n", switch, "link", "set", port, "master", "switch", "up")
    _ip("-n", space, "addr", "add", f"{_address(index)}/24", "dev", "eth0")
    _ip("-n", space, "link", "set", "eth0", "up")
    _ip("-n", space, "link", "set", "lo", "up")
    for where, device in ((switch, port), (space, "eth0")):
        shape = ["tbf", "rate", rate, "burst", "128kb", "latency", "200ms"]
        subprocess.run(["tc", "-n", where, "qdisc", "add", "dev", device, "root", *shape], check=True)


def _address(index: int) -> str:
    return f"10.77.0.{index + 1}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
