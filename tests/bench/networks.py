"""Slow networks on one host: namespaces on a switch, each with a link of a given rate. Needs root."""

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Host:
    """A place to run processes; `address` is what the other hosts reach it by."""

    address: str
    interface: str
    prefix: tuple[str, ...] = ()  # what a command begins with to run here

    def start(self, command: Sequence[str], **options: object) -> "subprocess.Popen[str]":
        """The command runs on this host."""
        return subprocess.Popen([*self.prefix, *command], text=True, **options)  # type: ignore[call-overload,no-any-return]


@contextlib.contextmanager
def network(count: int, rate: str = "") -> Iterator[list[Host]]:
    """`count` hosts; with a rate such as "100mbit" each behind a full-duplex link of it, else all on loopback."""
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
    """Bytes that this process' host has put on the wire of an interface, headers included."""
    with Path("/proc/net/dev").open() as table:  # a namespace's own, whatever /sys shows
        for line in table:
            device, _, counters = line.partition(":")
            if device.strip() == interface:
                return int(counters.split()[8])
    raise KeyError(interface)


def _attach(switch: str, space: str, index: int, rate: str) -> None:
    """Join a host to the switch; both ends send at the link's rate."""
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
