"""flctl doctor: check this host, and say how to repair it."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fedring.client.config import ClientConfig
from fedring.control.failure import Failure
from fedring.ctl.admin import doctor_checks
from fedring.ctl.options import OutputOption
from fedring.ctl.output import Output, print_json, print_table, stderr_console
from fedring.daemon.checks import Check, Level
from fedring.server.config import ServerConfig
from fedring.train.jobs.job import Job


def doctor(
    server_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Configuration of fl-server: check this host as a server.")
    ] = None,
    client_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Configuration of fl-client: check this host as a client.")
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Check this host: configuration, ports, certificates, data and state.

    The result says what is wrong. Without a file it is checked as a server with default settings. Nothing is changed.
    """
    console = stderr_console()
    with console.status("checking ...") if console.is_terminal else nullcontext():
        rows = list(_examine(server_config, client_config))
    bad = [row for row in rows if row.level is Level.FAIL]
    if output is Output.JSON:
        print_json({"checks": [asdict(row) for row in rows], "ok": not bad})
    else:
        cells = [(row.name, row.level.value, row.found, row.advice) for row in rows]
        print_table("", ("check", "result", "found", "advice"), cells)
    if bad:
        raise Failure(f"{len(bad)} of {len(rows)} checks failed; the first is {bad[0].name}: {bad[0].found}")


def _examine(server_path: Path | None, client_path: Path | None) -> Iterator[Check]:
    job = Job.model_validate({})
    if server_path or not client_path:
        check, server = doctor_checks.check_config("server config", ServerConfig, server_path)
        yield check
        if server:
            job = server.job
            yield from _examine_server(server)
    if client_path:
        check, client = doctor_checks.check_config("client config", ClientConfig, client_path)
        yield check
        if client:
            yield from _examine_client(client, job)


def _examine_server(config: ServerConfig) -> Iterator[Check]:
    from fedring.server.startup_checks import check_names  # imports torch

    yield from doctor_checks.check_certificates(config.tls)
    yield doctor_checks.check_listen("listen", config.listen, service=doctor_checks.FOR_CLIENTS, tls=config.tls)
    yield doctor_checks.check_listen(
        "control_listen", config.control_listen, service=doctor_checks.FOR_FLCTL, tls=config.tls
    )
    yield from doctor_checks.check_state_dir(config.state_dir)
    yield from doctor_checks.check_database(config.state_dir)
    yield from doctor_checks.check_shared_state(config)
    yield from check_names(config)


def _examine_client(config: ClientConfig, job: Job) -> Iterator[Check]:
    from fedring.client.startup_checks import check_names  # imports torch

    certificates = list(doctor_checks.check_certificates(config.tls))
    yield from certificates
    if all(row.level is Level.OK for row in certificates):  # else a connection would fail for the same reason
        yield from doctor_checks.check_identity(config.client_id, config.tls, config.token_file)
        yield doctor_checks.check_reachable("server", config.server, config.tls)
    yield from doctor_checks.check_state_dir(config.state_dir)
    rows = list(check_names(config, job))
    yield from rows
    if any(row.level is Level.OK for row in rows if row.name == "data"):
        yield _check_samples(config, config.data or job.data, job)


def _check_samples(config: ClientConfig, data: str, job: Job) -> Check:
    """Check that the client's samples can be read.

    There must be at least one in its part.
    """
    from fedring.client.training.trainer import offered_by  # imports torch
    from fedring.data import ClientPart, DataError, load_part, load_split, takes_part
    from fedring.job_code import job_code
    from fedring.train.batches import size_of

    index, count = config.partition_index, config.partition_count
    try:
        with job_code():
            load = offered_by(config).get("data", data)
            split = load_split(load, config.data_root, config.download, ClientPart(index, count, config.client_id))
            if not takes_part(load):
                split = load_part(split, job.partition, index=index, count=count, alpha=job.alpha, seed=job.seed)
            size = size_of(split.train)
    except DataError as error:
        return Check("samples", Level.FAIL, str(error), "correct data_root, or allow download")
    except Exception as error:  # noqa: BLE001  # the user's data callable may raise anything
        return Check("samples", Level.FAIL, f"{data} failed: {type(error).__name__}: {error}", "correct the callable")
    if not size:
        return Check("samples", Level.FAIL, f"{data}: this client's part is empty", "use a smaller partition_count")
    return Check("samples", Level.OK, f"{data}: {size:,} for training in this client's part")
