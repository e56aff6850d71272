"""What people read after a usual mistake: the command, its exit code, and a sentence that says what to do."""

import os
import queue
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fedring.client import ClientConfig
from fedring.client.federation import Federation
from fedring.client.main import app
from fedring.ctl.main import main
from fedring.daemon.exits import Exit
from fedring.daemon.program import run
from fedring.rpc.tls import Tls
from tests.fleets import Fleet
from tests.pki import Pki
from tests.ports import free_port
from tests.waiting import until

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
    override = 'min_clients = 1\n[[override]]\nwhere = { gpu = "yes" }\n'
    (folder / "override.toml").write_text(f"{override}epoch = 2\n")
    feddyn = '[[transforms]]\nname = "feddyn"\nargs = { alpha = 0.1 }\n'
    (folder / "feddyn.toml").write_text(f'weights = "uniform"\n{override}mu = 0.5\n{feddyn}')
    (folder / "marked.toml").write_text('\ufeffmodel = "fedring.train.models:none"\n', encoding="utf-8")
    pki, other = Pki(folder / "pki"), Pki(folder / "other")
    other.issue("ann")
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
    ("status -s http://{nobody}", Exit.USAGE, "is not host:port: leave out http://, as in 127.0.0.1:"),
    ("status -s https://{nobody}/", Exit.USAGE, "is not host:port: leave out https://, as in 127.0.0.1:"),
    (
        "run {folder}/override.toml -s {plain.control}",
        Exit.CONFIG,
        "override.toml; did you mean 'override.0.epochs'?",
    ),
    (
        "run {folder}/feddyn.toml -s {plain.control}",
        Exit.CONFIG,
        "override.0: transforms: feddyn needs mu = 0.0, and it is 0.5",
    ),
    ("run {folder}/hook.toml --lr 0.1", Exit.USAGE, "keys are given without dashes, as in lr=0.1"),
    ("run {folder}/hook.toml --batch-size=8", Exit.USAGE, "keys are given without dashes, as in batch_size=8"),
    ("run {folder}/hook.toml --sever {plain.control}", Exit.USAGE, "no such option: --sever: did you mean --server?"),
    ("run {folder}/marked.toml rounds = 5", Exit.USAGE, "are one argument, without spaces: rounds=5"),
    ("run {folder}/marked.toml rounds= 5", Exit.USAGE, "are one argument, without spaces: rounds=5"),
    ("run {folder}/marked.toml rounds =5", Exit.USAGE, "are one argument, without spaces: rounds=5"),
    ("run {folder}/marked.toml -s {plain.control}", Exit.CONFIG, "fedring.train.models:none"),
    ("run", Exit.USAGE, "missing argument 'JOB': see flctl run --help"),
    ("--server {plain.control} rounds", Exit.OK, ""),
    ("--server {plain.control} models", Exit.OK, ""),
    ("--server {plain.control} models list", Exit.OK, ""),
    ("--server {plain.control} token", Exit.USAGE, "name one of create, list, revoke, and give it behind that"),
    ("token create --name ann -s {plain.control}", Exit.OK, "takes no tokens: set tokens = true, and start it again"),
    (
        "status -s {secure.control} --tls-ca {folder}/pki/ca.crt --tls-cert {folder}/other/operator.crt "
        "--tls-key {folder}/other/operator.key",
        Exit.UNAVAILABLE,
        "/other/operator.crt: set --tls-cert and --tls-key to a certificate that the server's authority has signed",
    ),
    (
        "status -s {secure.control} --tls-ca {folder}/other/ca.crt --tls-cert {folder}/pki/operator.crt "
        "--tls-key {folder}/pki/operator.key",
        Exit.UNAVAILABLE,
        "shows a certificate that is not trusted: unable to get local issuer certificate: set --tls-ca to the ca.crt",
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


FOREIGN = {"ca": "{folder}/pki/ca.crt", "cert": "{folder}/other/ann.crt", "key": "{folder}/other/ann.key"}
CLIENT = [
    ("{plain.control}", {}, "is fl-server's port for flctl, its control_listen: name its `listen` address as `server`"),
    ("{secure.listen}", {}, "it speaks TLS: set tls.ca, and tls.cert with tls.key or token_file"),
    (
        "{secure.listen}",
        FOREIGN,
        "/other/ann.crt: set tls.cert and tls.key to a certificate that the server's authority",
    ),
    ("{nobody}", {}, "cannot reach fl-server at 127.0.0.1:"),
]


@pytest.mark.parametrize(("server", "tls", "sentence"), CLIENT)
def test_a_client_says_what_is_wrong_with_its_server(
    server: str, tls: dict[str, str], sentence: str, place: Place, tmp_path: Path
) -> None:
    told: queue.Queue[str] = queue.Queue()
    files = {key: Path(path.format(**place._asdict())) for key, path in tls.items()}
    settings: dict[str, Any] = {"client_id": "ann", "state_dir": tmp_path, "server": server.format(**place._asdict())}
    with Federation(ClientConfig(**settings, tls=Tls(**files)), tell=told.put):
        assert sentence in told.get(timeout=SECONDS)


DAEMONS = [
    (["server=http://fl.example.org:8443"], "is not host:port: leave out http://, as in fl.example.org:8443"),
    (["--data_root", "data"], "did you mean --data-root?"),
    (["--clients_on_host", "2"], "keys are given without dashes, as in clients_on_host=2"),
    (["client_id", "=", "ann"], "are one argument, without spaces: client_id=ann"),
]


@pytest.mark.parametrize(("arguments", "sentence"), DAEMONS)
def test_a_daemon_answers_a_mistake_on_its_command_line(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, "fl-client", arguments) in (Exit.USAGE, Exit.CONFIG)
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def test_flctl_run_waits_for_a_server_that_starts(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = str(place.folder / "marked.toml")
    with Fleet(tmp_path) as fleet:
        fleet.server.kill()
        # The job cannot be queued, so that flctl ends as soon as the server has answered.
        with ThreadPoolExecutor() as pool:
            ended = pool.submit(main, ["run", job, "-s", fleet.control, "--patience", f"{SECONDS:g}"])
            told = ""
            while "waiting for fl-server" not in told and not ended.done():
                told += capsys.readouterr().err
            look_twice(fleet.control, ended)
            fleet.start_server()
            assert ended.result(SECONDS) == Exit.CONFIG
    waits = f"waiting for fl-server at {fleet.control}, which does not answer yet"
    assert told == f"{waits} (for {SECONDS:g} s at most; Ctrl-C ends)\n"


def look_twice(address: str, ended: Future[int]) -> None:
    """Listen as a server does that starts and answers nobody yet, until flctl has looked at it twice."""
    host, _, port = address.rpartition(":")
    looks = 0
    with socket.create_server((host, int(port))) as listener:
        listener.settimeout(0.2)
        while looks < 2 and not ended.done():
            with suppress(TimeoutError, ConnectionError), listener.accept()[0] as caller:
                caller.settimeout(2.0)  # one may say nothing, and others wait behind it
                looks += caller.recv(1) == b"\x16"  # TLS begins with it, which flctl tries to find out who listens


def test_ctrl_c_ends_the_wait_for_a_server_that_starts_with_one_line(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []

    def waits_now() -> bool:
        told.append(capsys.readouterr().err)
        return "Ctrl-C ends" in "".join(told)

    def interrupt() -> None:
        until(waits_now)
        os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(interrupt)
        code = main(["run", str(place.folder / "marked.toml"), "-s", place.nobody, "--patience", f"{SECONDS:g}"])
        waiting.result()
    assert code == Exit.INTERRUPTED
    waits = (
        f"waiting for fl-server at {place.nobody}, which does not answer yet (for {SECONDS:g} s at most; Ctrl-C ends)"
    )
    assert "".join(told) + capsys.readouterr().err == f"{waits}\nflctl: interrupted\n"


def test_flctl_run_does_not_wait_for_ever(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run", str(place.folder / "marked.toml"), "-s", place.nobody, "--patience", "0.1"]
    assert main(command) == Exit.UNAVAILABLE
    waits, fails = capsys.readouterr().err.splitlines()
    assert "(for 0.1 s at most; Ctrl-C ends)" in waits
    assert "is it running? Start it with `fl-server`" in fails


@pytest.mark.parametrize("program", ["ctl", "client", "server"])
def test_ctrl_c_during_the_imports_of_a_program_is_one_line(program: str) -> None:
    """A finder of modules interrupts the program at the first import of a package that is not fedring's own."""
    name = {"ctl": "flctl", "client": "fl-client", "server": "fl-server"}[program]
    code = f"""
import sys
from fedring.{program}.__main__ import main
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name in ("pydantic", "typer", "fedring.{program}.main"):
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
sys.exit(main())
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS)
    assert (ended.returncode, ended.stderr, ended.stdout) == (Exit.INTERRUPTED, f"{name}: interrupted\n", "")


MODULE = """
import torch
from fedring.data import Samples, Split
from fedring.offers import offers
from torch import nn

@offers("model")
def net() -> nn.Module:
    return nn.Linear(4, 2)

@offers("data")
def flawed(root, download) -> Split:
    inputs = torch.ones(40, 4)
    inputs[17, 2] = float("nan")
    samples = Samples(inputs, torch.zeros(40, dtype=torch.int64))
    return Split(samples, samples, 2)
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, Path]]:
    """Start a server and a client that trust a module in a folder of its own."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "mistaken.py").write_text(MODULE)
    trusted = {"trusted": ["fedring", "mistaken"]}
    with Fleet(folder, trusted, [trusted], env={"PYTHONPATH": str(folder)}) as fleet:
        yield fleet, folder


def test_nan_in_the_data_names_the_sample_and_not_the_learning_rate(
    own: tuple[Fleet, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    job = own[1] / "job.toml"
    job.write_text('model = "mistaken:net"\ndata = "mistaken:flawed"\nrounds = 1\nmin_clients = 1\nbatch_size = 8\n')
    assert main(["run", str(job), "-s", own[0].control]) == Exit.FAILED
    printed = "".join(capsys.readouterr())
    assert "NaN or infinity in sample 17 of this client, in batch " in printed
    assert "learning rate" not in printed


def test_an_edited_module_is_told_with_the_daemon_that_has_the_old_code(
    own: tuple[Fleet, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    job, module = own[1] / "renamed.toml", own[1] / "mistaken.py"
    job.write_text('model = "mistaken:better"\ndata = "mistaken:flawed"\nrounds = 1\nmin_clients = 1\n')
    module.write_text(MODULE.replace("def net", "def better"))
    told = "mistaken was edited after fl-server had read it: restart fl-server, which still runs the old code"
    assert main(["run", str(job), "-s", own[0].control]) == Exit.CONFIG
    assert f"({told})" in capsys.readouterr().err
    # What the old code still has runs, with a warning of the server and of the client.
    assert main(["run", str(job), "model=mistaken:net", "-s", own[0].control]) == Exit.FAILED
    printed = capsys.readouterr()
    assert f"warning: {told}\n" in printed.err
    assert "restart fl-client, which still runs the old code, or send it SIGUSR2" in printed.out + printed.err


def test_a_server_whose_port_is_taken_says_so_in_one_line(place: Place, tmp_path: Path) -> None:
    settings = [f"state_dir={tmp_path}", "log_style=json", "control_listen=127.0.0.1:0"]
    command = [sys.executable, "-m", "fedring.server.main", *settings, f"listen={place.plain.listen}"]
    as_users_have_it = {key: value for key, value in os.environ.items() if key != "GRPC_VERBOSITY"}
    ended = subprocess.run(command, env=as_users_have_it, capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == Exit.CONFIG
    plain = [line for line in ended.stderr.splitlines() if not line.startswith("{")]
    assert plain == [f"fl-server: cannot listen on {place.plain.listen}: is another program using it?"]
    assert not ended.stdout
