"""What people read after a usual mistake: the command, its exit code, and a sentence that says what to do."""

import os
import queue
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fedring.client import ClientConfig
from fedring.client.federation import Federation
from fedring.ctl.main import main
from fedring.daemon.exits import Exit
from tests.fleets import Fleet
from tests.pki import Pki
from tests.ports import free_port

SECONDS = 240.0  # an interpreter that imports everything on a busy machine


class Place(NamedTuple):
    """A server in plaintext, one with TLS, and files that commands name."""

    plain: Fleet
    secure: Fleet
    folder: Path
    nobody: str  # an address at which nothing listens


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("place")
    hook = 'mode = "data_parallel"\ndata_parallel = { hook = "fp16(powersgd(warm_start=perhaps))" }\n'
    (folder / "hook.toml").write_text(hook)
    pki = Pki(folder / "pki")
    with Fleet(folder / "plain") as plain, Fleet(folder / "secure", {"tls": pki.table("server")}) as secure:
        yield Place(plain, secure, folder, f"127.0.0.1:{free_port()}")


FLCTL = [
    ("status -s {nobody}", Exit.UNAVAILABLE, "is it running? Start it with `fl-server`"),
    ("-s {nobody} status", Exit.UNAVAILABLE, "is it running? Start it with `fl-server`"),
    ("-s {plain.control} -o json status", Exit.OK, ""),
    ("--server={plain.control} clients forget ann", Exit.USAGE, "ann"),
    ("status -s {plain.listen}", Exit.FAILED, "is it the port for clients? Name the control_listen address"),
    ("status -s {secure.control}", Exit.UNAVAILABLE, "it speaks TLS: give --tls-ca, and --tls-cert with --tls-key"),
    ("status -s {plain.control} --tls-ca {folder}/pki/ca.crt", Exit.UNAVAILABLE, "speaks plaintext"),
    ("start-round -s {plain.control} sever=1", Exit.USAGE, "unknown key 'sever' on the command line; valid keys: "),
    ("start-round -s {plain.control} epoch=1", Exit.USAGE, "on the command line; did you mean 'epochs'?"),
    ("start-round -s {plain.control} lr=fast", Exit.USAGE, "must be a number"),
    ("run {folder}/none.toml -s {plain.control}", Exit.CONFIG, "cannot read"),
    (
        "start-round -s {plain.control} mode=data_parallel data_parallel.hook=dgc(sampl_ratio=0.1)",
        Exit.USAGE,
        "hook dgc has no parameter 'sampl_ratio': it takes ratio, warmup_epochs, momentum, ",
    ),
    (
        "start-round -s {plain.control} optimizer_args.weight_deacy=0.1",
        Exit.CONFIG,
        "optimizer_args: fedring.train.optimizers:sgd cannot be called with {'weight_deacy': 0.1}: got an unexpected ",
    ),
    (
        "start-round -s {plain.control} mode=data_parallel data_parallel.hook=dgc optimizer_args.nesterov=true",
        Exit.CONFIG,
        "With dgc, an optimizer is made with momentum 0; for Nesterov's momentum, use dgc(nesterov=true).",
    ),
    (
        "run {folder}/hook.toml -s {plain.control}",
        Exit.CONFIG,
        "hook powersgd cannot work with warm_start='perhaps': ",
    ),
]


@pytest.mark.parametrize(("command", "code", "sentence"), FLCTL)
def test_flctl_answers_a_mistake_with_what_to_do(
    command: str, code: Exit, sentence: str, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command.format(**place._asdict()).split()) == code
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") <= 1, error


CLIENT = [
    ("{plain.control}", "is fl-server's port for flctl, its control_listen: name its `listen` address as `server`"),
    ("{secure.listen}", "it speaks TLS: set tls.ca, and tls.cert with tls.key or token_file"),
    ("{nobody}", "cannot reach fl-server at 127.0.0.1:"),
]


@pytest.mark.parametrize(("server", "sentence"), CLIENT)
def test_a_client_says_what_is_wrong_with_its_servers_address(
    server: str, sentence: str, place: Place, tmp_path: Path
) -> None:
    told: queue.Queue[str] = queue.Queue()
    settings: dict[str, Any] = {"client_id": "ann", "state_dir": tmp_path, "server": server.format(**place._asdict())}
    with Federation(ClientConfig(**settings), tell=told.put):
        assert sentence in told.get(timeout=SECONDS)


def test_a_server_whose_port_is_taken_says_so_in_one_line(place: Place, tmp_path: Path) -> None:
    settings = [f"state_dir={tmp_path}", "log_style=json", "control_listen=127.0.0.1:0"]
    command = [sys.executable, "-m", "fedring.server.main", *settings, f"listen={place.plain.listen}"]
    as_users_have_it = {key: value for key, value in os.environ.items() if key != "GRPC_VERBOSITY"}
    ended = subprocess.run(command, env=as_users_have_it, capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == Exit.CONFIG
    plain = [line for line in ended.stderr.splitlines() if not line.startswith("{")]
    assert plain == [f"fl-server: cannot listen on {place.plain.listen}: is another program using it?"]
    assert not ended.stdout
