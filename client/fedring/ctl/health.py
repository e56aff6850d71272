"""flctl health: do both ports serve?"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import grpc
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fedring.ctl.failure import Failure, Unreachable
from fedring.ctl.options import DEFAULT_SERVER, OutputOption, ServerOption
from fedring.ctl.output import Output, print_json, print_table
from fedring.rpc.channel import CLIENT_OPTIONS
from fedring.rpc.errors import status_of

DEFAULT_LISTEN = "127.0.0.1:8443"


def health(
    server: ServerOption = DEFAULT_SERVER,
    listen: Annotated[
        str,
        typer.Option("--listen", envvar="FLCTL_LISTEN", metavar="HOST:PORT", help="fl-server's port for clients."),
    ] = DEFAULT_LISTEN,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that each port has to answer.")] = 5.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Ask both ports of fl-server whether they serve: 0 = yes, 1 = not now, 69 = unreachable."""
    rows = [
        {"port": name, "address": address, "status": check_health(address, timeout)}
        for name, address in (("control", server), ("listen", listen))
    ]
    if output is Output.JSON:
        print_json({"ports": rows, "ok": all(row["status"] == "serving" for row in rows)})
    else:
        print_table("fl-server", ("port", "address", "status"), [tuple(row.values()) for row in rows])
    _judge(rows)


def _judge(rows: Sequence[Mapping[str, str]]) -> None:
    for row in rows:
        if row["status"] == "unreachable":
            raise Unreachable(f"nobody answers at {row['address']}, fl-server's {row['port']} port: is it running?")
    for row in rows:
        if row["status"] != "serving":
            raise Failure(f"fl-server's {row['port']} port at {row['address']} answers {row['status']}")


def check_health(address: str, timeout_seconds: float) -> str:
    """What grpc.health.v1 says at `address`: "serving", "not_serving", ..., or "unreachable"."""
    with grpc.insecure_channel(address, options=CLIENT_OPTIONS) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # it has no types
        try:
            request = health_pb2.HealthCheckRequest()
            reply = stub.Check(request, timeout=timeout_seconds)
        except grpc.RpcError as error:
            status = status_of(error)
            if status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                return "unreachable"
            return status.name.lower()
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status).lower())
