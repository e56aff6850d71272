"""flctl health: ask ports whether they serve."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import grpc
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fedring.control.access import Access
from fedring.control.failure import Failure, Unreachable
from fedring.ctl.access import PLAIN, access, connect
from fedring.ctl.options import DEFAULT_SERVER, OutputOption, ServerOption, checked_address
from fedring.ctl.output import Output, print_json, print_table
from fedring.rpc.errors import status_of

DEFAULT_LISTEN = "127.0.0.1:8443"


def health(
    server: ServerOption = DEFAULT_SERVER,
    listen: Annotated[
        str,
        typer.Option(
            "--listen",
            envvar="FLCTL_LISTEN",
            metavar="HOST:PORT",
            callback=checked_address,
            help="Address of fl-server's port for clients, its listen.",
        ),
    ] = DEFAULT_LISTEN,
    at: Annotated[
        str,
        typer.Option(
            "--at",
            envvar="FLCTL_HEALTH",
            metavar="HOST:PORT",
            callback=checked_address,
            help="Ask only this port: the health_listen of an fl-server or an fl-client.",
        ),
    ] = "",
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for the answer of each port.")] = 5.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Ask fl-server's two ports, or one health port, whether they serve.

    The health port can be that of any daemon. The exit code is 0 if they do, 1 if one does not, and 69 if one is
    unreachable. An fl-client serves while it is in session with its fl-server.
    """
    ports = [("health", at)] if at else [("control", server), ("listen", listen)]
    identity = PLAIN if at else access()  # health_listen has no TLS
    rows = [
        {"port": name, "address": address, "status": check_health(address, timeout, identity)}
        for name, address in ports
    ]
    # A health port tells nobody why. The control port tells those who may ask it.
    why = _reason(server) if not at and any(row["status"] == "not_serving" for row in rows) else ""
    if output is Output.JSON:
        print_json({"ports": rows, "ok": all(row["status"] == "serving" for row in rows), "why": why})
    else:
        print_table("health", ("port", "address", "status"), [tuple(row.values()) for row in rows])
    _judge(rows, why)


def _reason(server: str) -> str:
    """Return why fl-server does not serve, or nothing."""
    try:
        with connect(server) as control:
            return control.status().not_serving
    except Failure:
        return ""


def _judge(rows: Sequence[Mapping[str, str]], why: str) -> None:
    because = f": {why}" if why else ""
    for row in rows:
        if row["status"] == "unreachable":
            raise Unreachable(f"no answer from {row['address']}, the {row['port']} port: is the daemon running?")
    for row in rows:
        if row["status"] != "serving":
            raise Failure(f"the {row['port']} port at {row['address']} answers {row['status']}{because}")


def check_health(address: str, timeout_seconds: float, access: Access = PLAIN, *, service: str = "") -> str:
    """Ask grpc.health.v1 at an address whether a service is served.

    Args:
        address: "host:port", or "unix:path".
        timeout_seconds: How long to wait for the answer.
        access: The identity to call with.
        service: Full name of the gRPC service; "" = the whole server.

    Returns:
        "serving", "not_serving", "unreachable", or in lower case the status with which the call failed.
    """
    with access.channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # the stub has no types
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            reply = stub.Check(request, timeout=timeout_seconds)
        except grpc.RpcError as error:
            status = status_of(error)
            if status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                return "unreachable"
            return status.name.lower()
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status).lower())
