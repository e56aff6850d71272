"""Measure how many updates a server accepts durably in a second, from many clients with a small model.

    python -m tests.bench.updates [--clients 100] [--processes 2] [--parameters 10000] [--rounds 20]

Every client receives every model and sends every update. The rate is that of the whole time of the rounds. The line
also has the processor time of an update, which depends less on other load of the machine, and that of a bare echo of as
many bytes between as many channels of grpc.aio, measured just before and just after.
"""

import argparse
import subprocess
import sys
import time
from statistics import mean

from fedring.ctl.local.runner import run_job
from tests.bench.lab.daemons import cpu_seconds, fleet_of, peak_bytes, print_line
from tests.bench.lab.echo import server_seconds

_ECHO_SECONDS = 2.0


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100, help="clients of all processes together")
    parser.add_argument("--processes", type=int, default=2, help="processes that share the clients")
    parser.add_argument("--parameters", type=int, default=10_000, help="size of the model")
    parser.add_argument("--rounds", type=int, default=20, help="rounds to count")
    args = parser.parse_args()
    job = {
        "model": "fedring.train.models:vector",
        "model_args": {"size": args.parameters},
        "encoding": "fp32",
        "min_clients": args.clients,
        "min_clients_to_aggregate": args.clients,
        "evaluate": False,
    }
    share = args.clients // args.processes
    shape = (args.processes, share, 4 * args.parameters, _ECHO_SECONDS)
    echoes = [server_seconds(*shape)]
    with fleet_of([]) as (fleet, control):
        command = [
            sys.executable,
            "-m",
            "tests.bench.lab.hosted_clients",
            fleet.listen,
            str(fleet.directory / "clients"),
        ]
        hosts = [
            subprocess.Popen([*command, str(index * share), str(share), str(args.parameters)])
            for index in range(args.processes)
        ]
        try:
            run_job(fleet, control, {**job, "rounds": 2})  # a warm-up of all clients
            pids = [[fleet.server.pid], [host.pid for host in hosts]]
            used, began = [cpu_seconds(each) for each in pids], time.monotonic()
            rounds = run_job(fleet, control, {**job, "rounds": args.rounds})
            seconds = time.monotonic() - began
            server, clients = (cpu_seconds(each) - before for each, before in zip(pids, used, strict=True))
        finally:
            for host in hosts:
                host.kill()
                host.wait()
        peak = peak_bytes(fleet.server.pid)
    echo = mean([*echoes, server_seconds(*shape)])
    updates = sum(round_.delivered for round_ in rounds)
    print_line(
        {
            "bench": "updates",
            "clients": args.clients,
            "parameters": args.parameters,
            "updates": updates,
            "updates_per_second": round(updates / seconds, 1),
            "server_cpu_ms_per_update": round(1000 * server / updates, 2),
            "client_cpu_ms_per_update": round(1000 * clients / updates, 2),
            "echo_server_cpu_ms": round(1000 * echo, 3),
            "server_cpu_in_echoes": round(server / updates / echo, 1),
            "round_seconds": round(seconds / len(rounds), 3),
            "server_peak_mb": round(peak / 1e6),
        }
    )


if __name__ == "__main__":
    main()
