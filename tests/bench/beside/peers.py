"""How Flower and NVFlare run a task: real servers and clients, as their own pages start them."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.beside.fleets import Run, Task, processes, wait_for
from tests.bench.lab.environments import FLOWER, NVFLARE, environment

_HERE = Path(__file__).parent
_PORT = 8000
_APP = """
[project]
name = "fedring-beside"
version = "1.0.0"
description = "the work of one client"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedring"

[tool.flwr.app.components]
serverapp = "fedring_beside.flower_app:server"
clientapp = "fedring_beside.flower_app:client"

[tool.flwr.app.config]
cell = {cell}
root = {root}
clients = {clients}
rounds = {rounds}
out = {out}
"""
_CONNECTION = """
[superlink]
default = "here"

[superlink.here]
address = "127.0.0.1:8000"
insecure = true
"""
_PROJECT = """
api_version: 3
name: beside
description: a server and its clients
participants:
  - {{name: {server}, type: server, org: org, fed_learn_port: {port}}}
{clients}
  - {{name: admin@org.org, type: admin, org: org, role: project_admin}}
builders:
  - path: nvflare.lighter.impl.workspace.WorkspaceBuilder
    args: {{template_file: [master_template.yml]}}
  - path: nvflare.lighter.impl.static_file.StaticFileBuilder
    args: {{config_folder: config}}
  - path: nvflare.lighter.impl.cert.CertBuilder
  - path: nvflare.lighter.impl.signature.SignatureBuilder
"""


@contextmanager
def flower(task: Task) -> Iterator[Run]:
    """Run a task with a SuperLink and SuperNodes, without TLS; the SuperLink keeps its state in a file."""
    programs = Path(environment(FLOWER)).parent
    app, home = task.folder / "app", task.folder / "home"
    package = app / "fedring_beside"
    package.mkdir(parents=True)
    home.mkdir()
    (package / "__init__.py").touch()
    for name in ("work.py", "flower_app.py"):
        shutil.copy(_HERE / name, package / name)
    told = {"cell": task.cell, "root": task.root, "out": str(task.folder)}
    keys = {name: json.dumps(value) for name, value in told.items()}
    (app / "pyproject.toml").write_text(_APP.format(**keys, clients=task.clients, rounds=task.rounds))
    (home / "config.toml").write_text(_CONNECTION)
    env = {"FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "PATH": f"{programs}:{os.environ['PATH']}"}
    launched = time.time()
    with processes(task) as start:
        link = ["flower-superlink", "--insecure", "--disable-runtime-dependency-installation", "--host", "0.0.0.0"]
        link += ["--port", str(_PORT), "--database", str(task.folder / "state.db")]
        server = start(task.server, link, **env)
        clients = []
        for part, host in enumerate(task.hosts):
            node = ["flower-supernode", "--insecure", "--superlink", f"{task.address}:{_PORT}"]
            own = ["--port", str(9100 + part), "--node-config", f"part={part}"]
            clients.append(start(host, [*node, *own], **env))
        _submit(task, env)
        yield _run(task, launched, server, clients, lambda: start(task.server, link, **env))


def _submit(task: Task, env: dict[str, str]) -> None:
    """Submit the run as soon as the SuperLink answers."""
    command = [*task.server.prefix, "flwr", "run", str(task.folder / "app"), "here"]

    def sent() -> bool:
        done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, check=False)
        return done.returncode == 0 and "Successfully" in done.stdout

    wait_for(task, sent)


@contextmanager
def nvflare(task: Task) -> Iterator[Run]:
    """Run a task with a provisioned server and clients, over mutual TLS."""
    python = environment(NVFLARE)
    name = "fedring-beside" if task.apart else "localhost"
    sites = [f"site-{part + 1}" for part in range(task.clients)]
    clients = "\n".join(f"  - {{name: {site}, type: client, org: org}}" for site in sites)
    project = task.folder / "project.yml"
    project.write_text(_PROJECT.format(server=name, port=_PORT + 2, clients=clients))
    kits = task.folder / "kits" / "beside" / "prod_00"
    provision = [python, "-m", "nvflare.cli", "provision", "--force", "-p", str(project), "-w", "kits"]
    subprocess.run(provision, check=True, capture_output=True, cwd=task.folder)
    env = {"PATH": f"{Path(python).parent}:{os.environ['PATH']}", "PYTHONPATH": str(_HERE)}
    commands = {kit: ["bash", str(kits / kit / "startup" / "sub_start.sh"), "--once"] for kit in (name, *sites)}
    places, launched = (task.server, *task.hosts), time.time()
    with _named(task, name), processes(task) as start:
        server, *pids = (start(host, run, **env) for run, host in zip(commands.values(), places, strict=True))
        told = [task.cell, str(task.rounds), str(task.clients), task.root, str(task.folder)]
        job = start(task.server, [python, str(_HERE / "nvflare_job.py"), *told, str(kits / "admin@org.org")], **env)
        run = _run(task, launched, server, pids, lambda: start(task.server, commands[name], **env))
        yield replace(run, others=[job])


@contextmanager
def _named(task: Task, name: str) -> Iterator[None]:
    """Let all hosts find the server by its name, which its certificate has."""
    folders = [Path("/etc/netns") / host.prefix[-1] for host in (task.server, *task.hosts)] if task.apart else []
    try:
        for folder in folders:
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{task.address} {name}\n")
        yield
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def _run(task: Task, launched: float, server: int, clients: Sequence[int], restart: Callable[[], object]) -> Run:
    """Return a run whose server writes its rounds and its model into the task's folder."""

    def rounds() -> list[dict[str, float]]:
        with suppress(OSError, ValueError):  # nothing is there yet, or not all of it
            found: list[dict[str, float]] = json.loads((task.folder / "rounds.json").read_text())
            return found
        return []

    def model() -> dict[str, Any]:
        with np.load(task.folder / "model.npz", allow_pickle=False) as state:
            return dict(state)

    return Run(launched, server, clients, rounds, (task.folder / "done").exists, model, restart)
