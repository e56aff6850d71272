"""A server that somebody else wrote, and real clients: whatever names it sends, it runs no code at a client.

The two attacks with which this was once possible come first. They are tried on a site whose policy demands things of
jobs. Then a client gets names and arguments of all kinds. It refuses each, writes nothing, and trains the next job.
"""

import io
import json
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from fedring import vision
from fedring.ctl.process import stop_all
from fedring.train.models import digits_mlp
from fedring.v1 import federation_pb2 as pb
from tests.fleets import PATIENT
from tests.forks import Daemon
from tests.scripted_server import SECONDS, ScriptedServer

JOB: dict[str, Any] = {
    "mode": "federated",
    "rounds": 9,
    "model": "fedring.train.models:digits_mlp",
    "data": "fedring.data:digits",
    "loss": "fedring.train.losses:cross_entropy",
    "optimizer": "fedring.train.optimizers:sgd",
    "partition": "iid",
    "alpha": 0.5,
    "min_results": 2,
}
TOOLBOX = '''
"""What a site offers: some functions with a mark, and others that are not for jobs."""

from functools import partial
from os import system
from pathlib import Path
from subprocess import run

from fedring.data import digits
from fedring.offers import offers
from fedring.train.models import digits_mlp

@offers("model")
def net(hidden: int = 64):
    return digits_mlp(hidden)

@offers("model")
def reads(base: Path, hidden: int = 64):
    return digits_mlp(len(base.read_text()))

@offers("model")
def anything(**values):
    return digits_mlp()

@offers("data")
def records(root, download):
    return digits()

@offers("model")
def _hidden():
    return digits_mlp()

def plain():
    return digits_mlp()

class Called:
    def __call__(self, *arguments, **values):
        Path("called").touch()

called = Called()
half = partial(run, ["touch", "called"])
'''
ATTIC = "from pathlib import Path\nPath('imported').touch()\nPath(__file__).with_name('imported').touch()\n"
ATTIC += "from fedring.offers import offers\n@offers('model', 'data')\ndef net(*given): ...\n"


class Victim:
    """A client that runs, and all that it can write.

    Args:
        folder: Gets its state, its data, its modules, and the folder that it works in.
        settings: Of the client.
    """

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder, self.server, self._rounds = folder, ScriptedServer(), count(1)
        for name in ("state", "data", "home", "work", "code/toolbox"):
            (folder / name).mkdir(parents=True)
        (folder / "code" / "toolbox" / "__init__.py").write_text(TOOLBOX)
        (folder / "code" / "toolbox" / "attic.py").write_text(ATTIC)
        (folder / "data" / "base.txt").write_text("x" * 64)
        (folder / "data" / "out").symlink_to("..")
        (folder / "secret.txt").write_text("x" * 64)
        self.server.start()
        given = {
            "server": f"127.0.0.1:{self.server.port}",
            "client_id": "alice",
            "state_dir": str(folder / "state"),
            "data_root": str(folder / "data"),
            "trusted": ["fedring", "toolbox"],
            "threads": 1,
        }
        self._client = Daemon("alice", "fedring.client.main", given | settings, folder.with_suffix(".log"))
        home = {"HOME": str(folder / "home"), "XDG_CACHE_HOME": str(folder / "home")}
        self._client.env |= PATIENT | home | {"PYTHONPATH": str(folder / "code")}
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder / "work")
            self._client.start()
        self.server.joins.get(timeout=SECONDS)

    def close(self) -> None:
        """End the client and the server."""
        stop_all([self._client], SECONDS)
        self.server.close()

    def _order(self, fields: dict[str, Any]) -> int:
        """Send a job with other fields than usual, and return the number of its round."""
        number, job = next(self._rounds), pb.JobSpec(**JOB | fields)
        self.server.train(self.server.command(digits_mlp(), round_=number, job=job, subset_size=32))
        return number

    def refuses(self, **fields: Any) -> pb.Failure:
        """Send a job with other fields than usual, and return how the client says that it failed."""
        number = self._order(fields)
        failure = self.server.failures.get(timeout=SECONDS)
        assert failure.round == number
        assert failure.detail
        return failure

    def trains(self, **fields: Any) -> None:
        """Send a job, and assert that the client trains it."""
        number = self._order(fields)
        assert self.server.accepted.get(timeout=SECONDS)[0].round == number
        assert self.server.failures.empty()

    def written(self) -> dict[str, bytes]:
        """Return all files that the client can write, with their contents."""
        files = (path for path in self.folder.rglob("*") if path.is_file())
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    """Run a client whose site has a policy and an account."""
    client = Victim(tmp_path_factory.mktemp("strict") / "client", privacy={"min_clients": 2})
    (client.folder / "state" / "privacy.json").write_text("{}")
    yield client
    client.close()


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    """Run a client without a policy."""
    client = Victim(tmp_path_factory.mktemp("open") / "client")
    yield client
    client.close()


@pytest.fixture
def victim(started: Victim) -> Iterator[Victim]:
    """Yield the running client; afterwards, assert that it has written nothing, and that it trains an honest job."""
    started.refuses(data="fedring.data:nothing")  # After this, it has written what it writes of any refused job.
    before = started.written()
    yield started
    assert started.written() == before
    assert started.server.joins.empty()
    started.trains()


class Web(ThreadingHTTPServer):
    """A server on loopback that answers each request with the same bytes, and counts."""

    def __init__(self, answer: bytes) -> None:
        self.requests = 0

        class Handler(BaseHTTPRequestHandler):
            def do_GET(handler) -> None:  # `self` is the server
                self.requests += 1
                handler.send_response(200)
                handler.send_header("Content-Length", str(len(answer)))
                handler.end_headers()
                handler.wfile.write(answer)

            def log_message(handler, format: str, *arguments: Any) -> None:
                """Stay silent."""

        super().__init__(("127.0.0.1", 0), Handler)


@pytest.fixture
def web() -> Iterator[Web]:
    """Serve a zip that holds a forged account."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("privacy.json", '{"forged": true}')
    with Web(data.getvalue()) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_job_cannot_start_a_second_client_without_the_policy(strict: Victim) -> None:
    second = [f"server=127.0.0.1:{strict.server.port}", "client_id=mallory", f"state_dir={strict.folder / 'second'}"]
    name = "fedring.client.main:command"
    assert strict.refuses(model=name, model_args=json.dumps({"arguments": second})).reason == "not_offered"
    assert not (strict.folder / "second").exists()
    assert strict.server.joins.empty()
    strict.trains()


def test_a_job_cannot_replace_a_file_of_the_client(strict: Victim, web: Web, tmp_path: Path) -> None:
    name, url = (
        "torchvision.datasets.utils:download_and_extract_archive",
        f"http://127.0.0.1:{web.server_port}/bomb.zip",
    )
    account = strict.folder / "state" / "privacy.json"
    before = account.read_bytes()
    args = {"url": url, "download_root": str(account.parent)}
    assert strict.refuses(model=name, model_args=json.dumps(args)).reason == "not_offered"
    assert account.read_bytes() == before
    assert web.requests == 0
    vision.load()
    from torchvision.datasets.utils import download_and_extract_archive

    download_and_extract_archive(url, str(tmp_path))
    assert (tmp_path / "privacy.json").read_text() == '{"forged": true}', "the attack would work"
    strict.trains()


def test_a_site_with_a_policy_offers_no_class_that_nobody_has_marked(strict: Victim) -> None:
    assert strict.refuses(model="toolbox:plain").reason == "not_offered"
    strict.trains(model="toolbox:net")


PARTS = ("model", "data", "loss", "optimizer", "trainer", "evaluator")
ELSEWHERE = ["os:system", "subprocess:run", "builtins:exec", "builtins:__import__", "torch.hub:load", "torch:load"]
ELSEWHERE += [
    "fedring.client.main:command",
    "fedring.client.main:main",
    "fedring.ctl.main:main",
    "importlib:import_module",
]
ELSEWHERE += ["torchvision.datasets.utils:download_and_extract_archive", "torchvision:resnet18", "antigravity:fly"]
ELSEWHERE += ["__main__:command", "__main__:main", "sys:exit", "torch.nn:Linear", "torch.serialization:load"]
INSIDE = ["toolbox:run", "toolbox:system", "toolbox:plain", "toolbox:half", "toolbox:called", "toolbox:Called"]
INSIDE += ["toolbox:_hidden", "toolbox:offers", "toolbox:Path", "toolbox:__builtins__", "toolbox:__loader__"]
INSIDE += ["toolbox:__init__", "toolbox:__dict__", "toolbox.attic:net", "toolbox.attic:Path", "toolbox.net:net"]
LOOKALIKES = ["tооlbox:net", "toolbox:nеt", "toolbox:neｔ", "fedring.train.models:digits_mlр"]
WIDE = ["ｔoolbox:net", "toolbox:ｎet"]
NO_NAMES = ["", "net", "os.system", "os:system('touch called')", "toolbox:net as model", "../toolbox:net", "a:b:c"]
NO_NAMES += ["toolbox:Called.__call__", "toolbox:net;os:system", "toolbox:\u202enet", "x" * 30_000]


@pytest.mark.parametrize("name", ELSEWHERE + INSIDE + LOOKALIKES + WIDE)
def test_what_is_not_offered_cannot_be_named_as_any_part_of_a_job(victim: Victim, name: str) -> None:
    for part in PARTS:
        assert victim.refuses(**{part: name}).reason == "not_offered", part


@pytest.mark.parametrize("name", NO_NAMES, ids=lambda name: ascii(name)[:30])
def test_what_is_no_name_is_refused_as_any_part_of_a_job(victim: Victim, name: str) -> None:
    for part in PARTS:
        if name or part not in ("trainer", "evaluator"):  # of which a job may have none
            assert victim.refuses(**{part: name}).reason == "bad_name", part


@pytest.mark.parametrize("name", ELSEWHERE + INSIDE + LOOKALIKES)
@pytest.mark.parametrize(("mode", "key"), [("data_parallel", "hook"), ("pipeline", "cut")])
def test_what_is_not_offered_cannot_be_named_in_the_table_of_a_group(
    victim: Victim, mode: str, key: str, name: str
) -> None:
    assert victim.refuses(**{"mode": mode, mode: json.dumps({key: name})}).reason == "not_offered"


@pytest.mark.parametrize("name", NO_NAMES + WIDE, ids=lambda name: ascii(name)[:30])
@pytest.mark.parametrize(("mode", "key"), [("data_parallel", "hook"), ("pipeline", "cut")])
def test_what_is_no_name_is_refused_in_the_table_of_a_group(victim: Victim, mode: str, key: str, name: str) -> None:
    assert victim.refuses(**{"mode": mode, mode: json.dumps({key: name})}).reason == "bad_job"


@pytest.mark.parametrize(
    ("part", "name"),
    [
        *(("data", "toolbox:net"), ("loss", "toolbox:net"), ("trainer", "toolbox:records")),
        *(
            ("model", "toolbox:records"),
            ("model", "fedring.data:digits"),
            ("evaluator", "fedring.train.losses:cross_entropy"),
        ),
    ],
)
def test_what_is_offered_as_one_part_is_no_other(victim: Victim, part: str, name: str) -> None:
    failure = victim.refuses(**{part: name})
    assert (failure.reason, f"and not as {part}" in failure.detail) == ("not_offered", True)


@pytest.mark.parametrize("name", [*ELSEWHERE[:6], *INSIDE[:6], "toolbox.attic:net", *LOOKALIKES])
def test_nothing_else_is_called_to_evaluate_a_model(victim: Victim, name: str) -> None:
    for part in PARTS:
        asked: dict[str, Any] = JOB | {part: name}
        order = victim.server.evaluation(1, job=pb.JobSpec(**asked))
        victim.server.send(pb.ServerEvent(evaluate=order))
        assert victim.server.evaluations.get(timeout=SECONDS).total == 0, part


NO_ARGUMENTS = ["not json", "[", "[1]", '"x"', "3", "{}{}", "[" * 60_000, '{"a":' * 6000, '{"a": ' + "[" * 30_000]
NO_ARGUMENTS += ['{"a": NaN}', '{"a": 1e999}', '{"a": ' + "1" * 5000 + "}", "{" + " " * 70_000 + "}"]
NO_ARGUMENTS += ['{"\\ud800": {"a": {"b": 1}}}', '{"\\ud800": 1}', '{"a\\nb": 1}', '{"a": "\\ud800"}']
WRONG: list[Any] = [2**70, -(2**63), [0] * 20_000, [[[[1]]]], {"a": {"b": 1}}, [{"a": 1}], "x" * 300, "\0"]
NO_ARGUMENTS += [json.dumps({"a": value}) for value in WRONG]
PATHS = ["/etc/passwd", "../secret.txt", "..", "~", "~/x", "https://127.0.0.1/x", "file:///etc/passwd", "a\\b", "C:\\x"]


@pytest.mark.parametrize("text", NO_ARGUMENTS, ids=lambda text: text[:30])
@pytest.mark.parametrize(
    ("part", "name"), [("model", JOB["model"]), ("model", "toolbox:anything"), ("optimizer", JOB["optimizer"])]
)
def test_arguments_that_are_no_small_table_are_refused(victim: Victim, part: str, name: str, text: str) -> None:
    assert victim.refuses(**{part: name, f"{part}_args": text}).reason == "bad_argument"


NOT_TAKEN: dict[str, list[dict[str, Any]]] = {
    "model_args": [{"colour": 3}, {"hidden": "64"}, {"hidden": None}, {"self": 1}],
    "optimizer_args": [{"colour": 3}, {"lr": 1.0}, {"nesterov": 1}, {"parameters": []}],
}


@pytest.mark.parametrize(
    ("key", "args"), [(key, args) for key, several in NOT_TAKEN.items() for args in several], ids=str
)
def test_arguments_that_a_function_does_not_take_are_refused(victim: Victim, key: str, args: dict[str, Any]) -> None:
    assert victim.refuses(**{key: json.dumps(args)}).reason == "bad_argument"


@pytest.mark.parametrize("path", [*PATHS[:3], "~", *PATHS[5:]])
def test_a_text_that_could_be_a_path_or_a_url_is_refused(victim: Victim, path: str) -> None:
    for value in (path, [path], {"a": path}):
        for name, key in (("toolbox:anything", "values"), (JOB["model"], "hidden")):
            assert victim.refuses(model=name, model_args=json.dumps({key: value})).reason == "bad_path"
    assert victim.refuses(optimizer_args=json.dumps({"weight_decay": path})).reason == "bad_path"


@pytest.mark.parametrize("path", [*PATHS, "out/secret.txt", "out", ["base.txt"], 3], ids=str)
def test_a_path_leads_to_nothing_but_the_data_of_the_site(victim: Victim, path: object) -> None:
    assert victim.refuses(model="toolbox:reads", model_args=json.dumps({"base": path})).reason == "bad_path"


def test_an_honest_job_is_trained_with_a_function_of_the_site_and_a_file_of_its_data(started: Victim) -> None:
    started.trains(model="toolbox:reads", model_args='{"base": "base.txt"}', data="toolbox:records")
