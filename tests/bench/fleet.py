"""Measure what thousands of sessions cost one fl-server: memory, heartbeats, a round, a list, and a kill.

    python -m tests.bench.fleet [--sessions 10000] [--processes 2] [--tls] [--out fleet.json]

A few processes hold the sessions, each with a connection of its own; what they use themselves is told apart. All
figures of memory are those of the server, above what it uses without any session.
"""

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from fedring.control.calls import Control
from fedring.ctl.fleet import Fleet
from fedring.ctl.local.runner import run_job
from fedring.rpc.tls import PLAINTEXT, Tls
from tests.bench.lab.daemons import ROOT, cpu_seconds, fleet_of, peak_bytes, resident_bytes
from tests.pki import Pki

_PATIENCE = 600.0  # seconds for all sessions to come
_SETTLE = 10.0  # seconds after which the server has freed what joining took

GOALS = {"plaintext": 70.0, "tls": 150.0}
"""Kilobytes of a session."""


class Hosts:
    """The processes that hold the sessions."""

    def __init__(self, plans: list[Mapping[str, Any]]) -> None:
        self._counts: dict[int, dict[str, int]] = {}
        self._readers: list[threading.Thread] = []
        self._changed: queue.Queue[None] = queue.Queue()
        self._processes = [self._start(plan) for plan in plans]
        self.pids = [process.pid for process in self._processes]

    def _start(self, plan: Mapping[str, Any]) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "tests.bench.lab.sessions", json.dumps(plan)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        self._readers.append(threading.Thread(target=self._read, args=(process,)))
        self._readers[-1].start()
        return process

    def _read(self, process: "subprocess.Popen[str]") -> None:
        with process.stdout or nullcontext() as lines:
            for line in lines or ():
                self._counts[process.pid] = json.loads(line)
                self._changed.put(None)

    @property
    def watching(self) -> int:
        """The sessions that are up now."""
        return sum(counts["watching"] for counts in tuple(self._counts.values()))

    def until(self, count: int, *, least: bool = True) -> float:
        """Wait until so many sessions are up, or at most so many; return the seconds that it took."""
        began = time.monotonic()
        while (self.watching < count) if least else (self.watching > count):
            if time.monotonic() > began + _PATIENCE:
                raise TimeoutError(f"{self.watching} sessions are up after {_PATIENCE:g} s")
            self._changed.get(timeout=_PATIENCE)
        return time.monotonic() - began

    def stop(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.wait()
        for reader in self._readers:
            reader.join()


def main() -> None:
    """Measure, and print a table and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=10_000, help="clients that are connected at once")
    parser.add_argument("--processes", type=int, default=2, help="processes that hold them")
    parser.add_argument("--tls", action="store_true", help="mutual TLS, with a certificate for each client")
    parser.add_argument("--sample", type=int, default=100, help="clients that a round draws")
    parser.add_argument("--parameters", type=int, default=10_000, help="size of the model")
    parser.add_argument("--rounds", type=int, default=10, help="rounds to measure")
    parser.add_argument("--beats", type=float, default=60.0, help="seconds over which heartbeats are measured")
    parser.add_argument("--ramp", type=float, help="seconds over which the sessions begin; default 2 ms each")
    parser.add_argument("--server", action="append", default=[], metavar="KEY=VALUE", help="a key of the server")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    args = parser.parse_args()
    results = measure(args)
    print_table(results)
    text = json.dumps(results)
    print(text)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run all measurements on one server, and return their figures."""
    with _server(args) as (fleet, control, tls, pki), ExitStack() as stack:
        pid, idle = fleet.server.pid, resident_bytes(fleet.server.pid)
        share = -(-args.sessions // args.processes)
        ramp = args.sessions * 0.002 if args.ramp is None else args.ramp
        plan = {"server": fleet.listen, "parameters": args.parameters, "ramp_seconds": ramp, "pki": pki}
        hosts = Hosts(
            [
                {**plan, "first": first, "count": min(share, args.sessions - first)}
                for first in range(0, args.sessions, share)
            ]
        )
        stack.callback(hosts.stop)
        _say(f"{args.sessions} sessions begin")
        joined = {"seconds": hosts.until(args.sessions), "server_cpu_seconds": cpu_seconds([pid])}
        _say(f"all have joined: {joined}")
        _wait(min(_SETTLE, args.beats))
        memory = resident_bytes(pid)
        beats = _share_of(pid, hosts, args.beats)
        _say(f"heartbeats: {beats}; {(memory - idle) / args.sessions:.0f} bytes a session")
        rounds = _rounds(args, fleet, control, hosts)
        listed = _clients_seconds(fleet, tls)
        _say(f"a round: {rounds}; the list: {listed:.2f} s")
        back = _kill(fleet, hosts, args.sessions)
    return {
        "bench": "fleet",
        "sessions": args.sessions,
        "tls": args.tls,
        "idle_bytes": idle,
        "bytes_per_session": round((memory - idle) / args.sessions),
        "join": joined,
        "heartbeats": beats,
        "round": rounds,
        "clients_seconds": listed,
        "killed": back,
    }


def print_table(results: Mapping[str, Any]) -> None:
    """Print the figures beside the goals for 10,000 sessions."""
    goal = GOALS["tls" if results["tls"] else "plaintext"]
    joined, beats, rounds, killed = (results[key] for key in ("join", "heartbeats", "round", "killed"))
    rows = [
        ("memory of a session above idle", f"{results['bytes_per_session'] / 1000:.1f} kB", f"{goal:g} kB"),
        ("all have joined", f"{joined['seconds']:.1f} s ({joined['server_cpu_seconds']:.1f} s of a core)", ""),
        ("heartbeats", f"{beats['server_share']:.1%} of a core", "25 %"),
        ("the load generator beside it", f"{beats['clients_share']:.1%} of a core", ""),
        (f"a round of {rounds['sampled']} clients", f"{rounds['seconds']:.2f} s", "3 s"),
        ("flctl clients", f"{results['clients_seconds']:.2f} s", "1 s"),
        ("all are back after kill -9", f"{killed['seconds']:.1f} s", "120 s"),
        ("the server's peak memory then", f"{killed['peak_bytes'] / 1e6:.0f} MB", ""),
    ]
    tls = "mutual TLS" if results["tls"] else "plaintext"
    print(f"{results['sessions']} sessions, {tls}; an idle server takes {results['idle_bytes'] / 1e6:.0f} MB")
    for what, figure, wanted in rows:
        print(f"  {what:34} {figure:>32}   {wanted and 'goal: ' + wanted}")


@contextmanager
def _server(args: argparse.Namespace) -> Iterator[tuple[Fleet, Control, Tls, str]]:
    keys: dict[str, Any] = {"max_clients": args.sessions + 100, "exempt_addresses": ["127.0.0.0/8"]}
    keys |= {key: json.loads(value) for key, _, value in (pair.partition("=") for pair in args.server)}
    with ExitStack() as stack:
        tls, pki = PLAINTEXT, ""
        if args.tls:
            pki = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-pki-"))
            authority = Pki(Path(pki))
            tls, keys["tls"] = authority.tls("operator"), authority.table("server")
        fleet, control = stack.enter_context(fleet_of([], operator=tls, **keys))
        yield fleet, control, tls, pki


def _share_of(pid: int, hosts: Hosts, seconds: float) -> dict[str, float]:
    """Return the shares of a core that the server and the sessions' processes use while nothing else happens."""
    pids = [pid], hosts.pids
    used, began = [cpu_seconds(each) for each in pids], time.monotonic()
    _wait(seconds)
    took = time.monotonic() - began
    server, clients = ((cpu_seconds(each) - before) / took for each, before in zip(pids, used, strict=True))
    return {"server_share": server, "clients_share": clients, "seconds": took}


def _rounds(args: argparse.Namespace, fleet: Fleet, control: Control, hosts: Hosts) -> dict[str, Any]:
    count = min(args.sample, args.sessions)
    job = {
        "model": "fedring.train.models:vector",
        "model_args": {"size": args.parameters},
        "encoding": "fp32",
        "min_clients": count,
        "sample_clients": count,
        "min_clients_to_aggregate": count,
        "evaluate": False,
    }
    run_job(fleet, control, {**job, "rounds": 1})  # the first job imports torch
    pids = [fleet.server.pid], hosts.pids
    used, began = [cpu_seconds(each) for each in pids], time.monotonic()
    run_job(fleet, control, {**job, "rounds": args.rounds})
    seconds = (time.monotonic() - began) / args.rounds
    server, clients = ((cpu_seconds(each) - before) / args.rounds for each, before in zip(pids, used, strict=True))
    return {"sampled": count, "seconds": seconds, "server_cpu_seconds": server, "clients_cpu_seconds": clients}


def _clients_seconds(fleet: Fleet, tls: Tls) -> float:
    """Return the seconds of a whole `flctl clients`, of which the second call is measured."""
    command = [sys.executable, "-m", "fedring.ctl.main", "clients", "--server", fleet.control]
    if tls.on:
        command += ["--tls-ca", str(tls.ca), "--tls-cert", str(tls.cert), "--tls-key", str(tls.key)]
    took = []
    for _ in range(2):
        began = time.monotonic()
        subprocess.run(command, cwd=ROOT, env=os.environ, stdout=subprocess.DEVNULL, check=True)
        took.append(time.monotonic() - began)
    return took[-1]


def _kill(fleet: Fleet, hosts: Hosts, sessions: int) -> dict[str, float]:
    began = time.monotonic()
    fleet.server.kill()
    hosts.until(0, least=False)
    fleet.start_server()
    started = time.monotonic() - began
    hosts.until(sessions)
    pid = fleet.server.pid
    return {
        "seconds": time.monotonic() - began,
        "start_seconds": started,
        "peak_bytes": peak_bytes(pid),
        "server_cpu_seconds": cpu_seconds([pid]),
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _wait(seconds: float) -> None:
    threading.Event().wait(seconds)


if __name__ == "__main__":
    main()
