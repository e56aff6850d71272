"""The state folders of a server and clients of protocol 1 work with this version.

tests/data/make_protocol_1.py says what is in the archive. The tests read the folders as an operator could: with flctl,
as files, and as tables of the database. This file describes the old file formats itself, so that later changes of the
code do not change what is tested.
"""

import hashlib
import re
import shutil
import signal
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from numpy.typing import NDArray

from fedring.codec import decode
from fedring.train import load_model
from fedring.train.errors import SeamError
from fedring.train.models import digits_mlp
from tests import forks
from tests.conftest import ROOT, missing, path_to
from tests.damage import ask, flip, model_file
from tests.fleets import Control, Fleet
from tests.waiting import until

ARCHIVE = ROOT / "tests" / "data" / "protocol-1.tar.xz"
HIDDEN, PARAMETERS = 144, 10_810
WHOLE = 4 * PARAMETERS  # bytes of a whole model
MODELS = range(1, 5)
OPEN, NEXT = 4, 5  # the open round, and the one after it
JOB = 2  # the job of these two rounds
KEPT: dict[str, Any] = {"keep_models": 100, "keep_update_rounds": 100}
STILL: dict[str, Any] = {"trainer": "user_trainers:still"}  # with it, a client sends nothing but its residual
CLIENTS = ("client-0", "client-1", "client-2")
SECONDS = 60.0

Values = NDArray[np.float32]  # [PARAMETERS]


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """Unpack the old folders; return them. `tmp_path`/state has copies for a fleet in `tmp_path`."""
    if not ARCHIVE.exists():
        missing("tests/data/protocol-1.tar.xz, which is only in the repository,")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path / "old", filter="data")
    shutil.copytree(tmp_path / "old", tmp_path / "state")
    return tmp_path / "old"


def test_a_server_of_this_version_opens_the_old_state_without_changing_its_blobs(old: Path, tmp_path: Path) -> None:
    state = tmp_path / "state" / "server"
    with Fleet(tmp_path) as fleet, Control(fleet.control) as control:
        status = control.status()
        assert (status.job.job_id, status.job.state, status.job.rounds_done) == (JOB, "running", 0)
        assert (status.round.round, status.round.phase) == (OPEN, "training")
        until(lambda: control.status().round.delivered == 2)  # the server listens before it resumes the round
        finished = control.job(1)
        assert (finished.state, finished.rounds_done) == ("completed", 3)
        assert {round_.round: round_.model_version for round_ in control.rounds()} == {1: 2, 2: 3, 3: 4, 4: 0}
        listed = flctl(fleet, "models", "list", "-o", "json")
        for version in MODELS:
            ((digest,),) = ask(old / "backup", "SELECT digest FROM models WHERE version = ?", version)
            assert str(digest) in listed
            check_model(fleet, old, version)
        fleet.server.send(signal.SIGTERM)
        assert fleet.server.wait(SECONDS) == 0
    assert blobs(state) == blobs(old / "server")


def test_blobs_that_are_named_by_sha_256_are_still_checked(old: Path, tmp_path: Path) -> None:
    flip(model_file(old / "server", 2))
    with pytest.raises(SeamError, match="damaged"):
        load_model(2, digits_mlp(HIDDEN), state_dir=old / "server")
    flip(model_file(old / "backup", 3))
    zeros = "UPDATE updates SET payload = zeroblob(length(payload)) WHERE round = 3 AND client_id = 'client-1'"
    ask(tmp_path / "state" / "server", zeros)
    for verb, folder, state, what in (
        ("backup", tmp_path / "copy", old / "server", "model 2"),
        ("restore", old / "backup", tmp_path / "new", "model 3"),
        ("backup", tmp_path / "copy", tmp_path / "state" / "server", "the update of client-1 in round 3"),
    ):
        done = forks.run("fedring.ctl.main", verb, folder, "--state-dir", state, timeout=SECONDS)
        assert done.returncode == 1
        assert what in done.stderr
        assert "does not hold what was written to it" in done.stderr


@pytest.mark.parametrize("source", ["found", "restored"])
def test_the_old_round_goes_on_with_the_old_clients(old: Path, tmp_path: Path, source: str) -> None:
    state = tmp_path / "state" / "server"
    if source == "restored":
        shutil.rmtree(state)
        run_flctl("restore", old / "backup", "--state-dir", state)
    with Fleet(tmp_path, KEPT, [STILL] * 3, env=path_to(ROOT / "tests" / "fault")) as fleet:
        with Control(fleet.control) as control:
            for _ in control.follow_job(JOB):
                pass
            job = control.job(JOB)
            assert (job.state, job.rounds_done) == ("completed", 2), job.reason
            for number in (OPEN, NEXT):
                (round_,) = control.rounds(number=number)
                assert (round_.model_version, list(round_.missing), round_.delivered) == (number + 1, [], 3)
            downloads = [client.download_bytes for client in round_.clients]
            # Clients that hold an old model get a delta; one that was late may have needed the whole model once.
            assert 0 < sorted(downloads)[1] < WHOLE
            for version in MODELS:
                check_model(fleet, old, version)
        until(
            lambda: not any(has_spooled_update(tmp_path / "state" / name) for name in CLIENTS)
        )  # all clients have recorded the acceptance
    query = "SELECT residual_blob, optimizer_blob FROM models"
    of_newest = {str(name) for row in ask(old / "backup", query) for name in row}  # the next model replaces these
    kept = {name: digest for name, digest in blobs(old / "server").items() if name not in of_newest}
    assert kept.items() <= blobs(state).items()
    assert not list((state / "partial").iterdir())
    for name in CLIENTS:
        check_residual(old, tmp_path, name)
    check_mixed(state, tmp_path)


def check_model(fleet: Fleet, old: Path, version: int) -> None:
    """Export and load a version; assert that it has its old values."""
    truth = safetensors.numpy.load_file(model_file(old / "backup", version))
    out = fleet.directory / "exported.safetensors"
    flctl(fleet, "models", "export", version, "--out", out)
    assert_same(safetensors.numpy.load_file(out), truth)
    loaded = load_model(version, digits_mlp(HIDDEN), state_dir=fleet.directory / "state" / "server")
    assert_same({name: tensor.numpy() for name, tensor in loaded.state_dict().items()}, truth)


def check_residual(old: Path, now: Path, name: str) -> None:
    """Assert that the client's old residual was sent once, or is still in its residual.

    The client may drop a spooled update that the server does not have, if its log says so; then its residual is the one
    from before that update. It must not send an update again that the server has.
    """
    state = now / "state" / "server"
    before, log = old / name, (now / "logs" / f"{name}.log").read_text()
    assert "dropped the residual" not in log
    dropped = bool(re.search("dropped .*spooled update", log))
    sent, expected = sent_by(state, NEXT, name), residual(before)
    assert expected.any(), "there is no residual to test"
    if name == "client-2":
        sent = sent + sent_by(state, OPEN, name)
        if not dropped:
            expected = spooled(before) + residual(before, "update.residual")
    else:
        assert not dropped
        np.testing.assert_array_equal(sent_by(state, OPEN, name), sent_by(old / "backup", OPEN, name))
        if has_spooled_update(before):
            np.testing.assert_array_equal(sent_by(state, OPEN, name), spooled(before))
            expected = residual(before, "update.residual")
    np.testing.assert_array_equal(sent + residual(now / "state" / name), expected)


def check_mixed(state: Path, folder: Path) -> None:
    """Back up and restore old and new models; assert that they keep their values."""
    run_flctl("backup", folder / "copy", "--state-dir", state)
    run_flctl("restore", folder / "copy", "--state-dir", folder / "again")
    for version in (1, NEXT + 1):
        models = [load_model(version, digits_mlp(HIDDEN), state_dir=place) for place in (state, folder / "again")]
        first, second = ({name: value.numpy() for name, value in model.state_dict().items()} for model in models)
        assert_same(first, second)


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        np.testing.assert_array_equal(found[name], values)


def flctl(fleet: Fleet, *words: object) -> str:
    """Run flctl on this server; return its output."""
    return run_flctl(*words, "--server", fleet.control)


def run_flctl(*words: object) -> str:
    done = forks.run("fedring.ctl.main", *map(str, words), timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout


def blobs(state: Path) -> dict[str, str]:
    """Return the SHA-256 of each file in blobs/, by name."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (state / "blobs").iterdir()}


def sent_by(state: Path, number: int, client: str) -> Values:
    """Return the client's accepted update for the round."""
    query = "SELECT blob, payload FROM updates WHERE round = ? AND client_id = ?"
    ((blob, payload),) = ask(state, query, number, client)
    return sparse((state / "blobs" / str(blob)).read_bytes() if blob else payload)


def has_spooled_update(folder: Path) -> bool:
    """Return whether the client in this folder has an update of which it does not know whether it was accepted."""
    return any((folder / "update").read_bytes()[:8])


def spooled(folder: Path) -> Values:
    """Return that update. Protocol 1 spools a prefix, a header of the length in the prefix, and the payload."""
    data = (folder / "update").read_bytes()
    magic, version, leaves, length = struct.unpack_from("<2sBBI", data)
    assert (magic, version, leaves) == (b"SP", 1, 1)
    return sparse(data[8 + length :])


def sparse(payload: Any) -> Values:
    return decode(payload, name="fp32_sparse", length=PARAMETERS)


def residual(folder: Path, name: str = "residual.safetensors") -> Values:
    """Return the client's residual, or the one that its spooled update leaves."""
    path = folder / name
    found: Values = safetensors.numpy.load_file(path)["residual"]
    return found
