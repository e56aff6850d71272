"""The contracts of import-linter are kept, and a breach of each of them is found."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCES = ("server", "client", "common", "protos")

CIRCLES = "no circles, at any depth"

BREACHES = {
    "packages import downwards only": ("client/fedring/ring/errors.py", "fedring.ddp.profile"),
    "what the daemons share knows neither of them": ("common/fedring/rpc/contract.py", "fedring.client.config"),
    "the server's rooms import downwards only": (
        "server/fedring/server/state/files.py",
        "fedring.server.round.events",
    ),
    "the modules of guard import downwards only": (
        "server/fedring/server/guard/callers.py",
        "fedring.server.guard.ports",
    ),
    "the modules of jobs import downwards only": (
        "server/fedring/server/jobs/starting.py",
        "fedring.server.jobs.queue",
    ),
    "the modules of operator import downwards only": (
        "server/fedring/server/operator/readiness.py",
        "fedring.server.operator.view",
    ),
    "the modules of round import downwards only": (
        "server/fedring/server/round/machine.py",
        "fedring.server.round.open_round",
    ),
    "the modules of running import downwards only": (
        "server/fedring/server/running/rounds.py",
        "fedring.server.running.runner",
    ),
    "the modules of secure import downwards only": (
        "server/fedring/server/secure/machine.py",
        "fedring.server.secure.exchange",
    ),
    "the modules of asynchronous import downwards only": (
        "server/fedring/server/asynchronous/phases.py",
        "fedring.server.asynchronous.rounds",
    ),
    "the modules of service import downwards only": (
        "server/fedring/server/service/spans.py",
        "fedring.server.service.commands",
    ),
    "the modules of sessions import downwards only": (
        "server/fedring/server/sessions/returns.py",
        "fedring.server.sessions.sessions",
    ),
    "the modules of group import downwards only": (
        "server/fedring/server/group/machine.py",
        "fedring.server.group.rendezvous",
    ),
    "the modules of update import downwards only": (
        "server/fedring/server/update/admission.py",
        "fedring.server.update.upload",
    ),
    "the modules of state import downwards only": (
        "server/fedring/server/state/rows.py",
        "fedring.server.state.ratings",
    ),
    "the modules of a shared state import downwards only": (
        "server/fedring/server/state/shared/leadership.py",
        "fedring.server.state.shared.opening",
    ),
    "the modules of the database import downwards only": (
        "server/fedring/server/state/sql/tables.py",
        "fedring.server.state.sql.updates",
    ),
    "the modules of model import downwards only": (
        "server/fedring/server/model/guards.py",
        "fedring.server.model.making",
    ),
    "the modules of aggregation import downwards only": (
        "server/fedring/server/aggregation/walk.py",
        "fedring.server.aggregation.mean",
    ),
    "an algorithm needs its room's interface only": (
        "server/fedring/server/model/transforms/masked.py",
        "fedring.server.model.transforms.listing",
    ),
    "only the state knows its database, and where its files lie": ("server/fedring/server/parts.py", "sqlite3"),
    "only its own modules and the lists of kinds know secure aggregation": (
        "client/fedring/client/task.py",
        "fedring.client.secure.client",
    ),
    "the client's rooms import downwards only": (
        "client/fedring/client/session/inbox.py",
        "fedring.client.transfer.fetch",
    ),
    "the ring's rooms import downwards only": (
        "client/fedring/ring/transport/frames.py",
        "fedring.ring.engine.operation",
    ),
    "fedring.train imports downwards only": ("common/fedring/train/plan.py", "fedring.train.batches"),
    "the schema of jobs imports downwards only": (
        "common/fedring/train/jobs/labels.py",
        "fedring.train.jobs.job_keys",
    ),
    "the orders of operators import downwards only": (
        "common/fedring/train/orders/signed_job.py",
        "fedring.train.orders.checks",
    ),
    "the names in jobs import downwards only": (
        "common/fedring/train/names/arguments.py",
        "fedring.train.names.seam",
    ),
    "the tensors of models import downwards only": (
        "common/fedring/train/tensors/sharing.py",
        "fedring.train.tensors.files",
    ),
    "fedring.data imports downwards only": ("common/fedring/data/samples.py", "fedring.data.images"),
    "fedring.privacy imports downwards only": ("common/fedring/privacy/skellam.py", "fedring.privacy.integer_plan"),
    "fedring.schedules imports downwards only": (
        "common/fedring/schedules/schedule.py",
        "fedring.schedules.simulation",
    ),
    "fedring.workers imports downwards only": ("client/fedring/workers/usage.py", "fedring.workers.stage_checkpoints"),
    "fedring.pipeline imports downwards only": ("client/fedring/pipeline/search.py", "fedring.pipeline.worker"),
    "fedring.remote imports downwards only": ("client/fedring/remote/stepping.py", "fedring.remote.holdings"),
    "flctl's rooms import downwards only": ("client/fedring/ctl/operate/lists.py", "fedring.ctl.admin.doctor"),
    "fedring.control imports downwards only": ("client/fedring/control/failure.py", "fedring.control.access"),
    CIRCLES: ("common/fedring/codec/errors.py", "fedring.codec.payload"),
}
"""For each contract a file, and a module that it must not import."""


def contracts(folder: Path) -> dict[str, bool]:
    """Run import-linter in the folder, and return the name of each contract and whether it is kept."""
    linter = Path(sys.executable).with_name("lint-imports")
    command = [str(linter), "--no-cache", "--config", str(folder / "pyproject.toml")]
    env = {**os.environ, "PYTHONPATH": str(folder)}  # its sitecustomize puts the copied sources first
    output = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False).stdout
    return {name: verdict == "KEPT" for name, verdict in re.findall(r"^(.+?) (KEPT|BROKEN)", output, re.M)}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a copy of the sources, which a test may change."""
    folder = tmp_path_factory.mktemp("contracts")
    for name in SOURCES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    paths = [str(folder / name) for name in SOURCES]
    text = (ROOT / "pyproject.toml").read_text()
    (folder / "pyproject.toml").write_text(text)
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.path[:0] = {paths}\n")
    return folder


def breach(copy: Path, *names: str) -> dict[str, bool]:
    """Break these contracts in the copy. Returns the name of each contract and whether it is kept."""
    originals = {copy / BREACHES[name][0]: (copy / BREACHES[name][0]).read_text() for name in names}
    try:
        for name in names:
            path, module = BREACHES[name]
            (copy / path).write_text(f"{originals[copy / path]}\nimport {module}\n")
        return contracts(copy)
    finally:
        for module_path, text in originals.items():
            module_path.write_text(text)


@pytest.mark.programs
def test_all_contracts_are_kept(copy: Path) -> None:
    found = breach(copy)
    assert found.keys() == BREACHES.keys()
    assert all(found.values()), found


@pytest.mark.programs
def test_a_breach_of_any_contract_is_found(copy: Path) -> None:
    found = breach(copy, *BREACHES.keys() - {CIRCLES})
    assert [name for name, kept in found.items() if kept and name != CIRCLES] == []


@pytest.mark.programs
def test_two_modules_that_import_each_other_are_found(copy: Path) -> None:
    found = breach(copy, CIRCLES)
    assert [name for name, kept in found.items() if not kept] == [CIRCLES]
