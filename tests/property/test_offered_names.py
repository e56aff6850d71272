"""Whatever a job names, it gets what is offered or a refusal: nothing is imported, and nothing else is called.

The names are those of what could do harm: everything public in fedring, in much of torch, and in a hundred modules of
the standard library. They are read from source files, so that no module is imported for its names.
"""

import ast
import importlib
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fedring.offers import KINDS
from fedring.train.errors import SeamError
from fedring.train.names.offered import Offered, collect

ROOT = Path(__file__).parents[2]
STANDARD = (
    "abc antigravity argparse array ast asyncio atexit base64 bdb binascii builtins bz2 cProfile cgi code codecs "
    "codeop collections concurrent.futures configparser contextlib copy copyreg csv ctypes ctypes.util curses dbm dis "
    "doctest email ensurepip faulthandler fcntl filecmp fileinput ftplib functools gc getpass glob gzip http.client "
    "http.server imaplib importlib importlib.machinery importlib.util inspect io ipaddress itertools json json.tool "
    "linecache logging logging.config logging.handlers lzma mailbox marshal mimetypes mmap modulefinder "
    "multiprocessing multiprocessing.managers operator os os.path pathlib pdb pickle pickletools pip pkgutil platform "
    "plistlib poplib posix profile pstats pty pwd py_compile pydoc random re readline resource runpy sched select "
    "selectors shelve shlex shutil signal site smtplib socket socketserver sqlite3 ssl string subprocess symtable sys "
    "sysconfig tarfile tempfile termios this threading timeit tkinter tokenize trace traceback tracemalloc tty turtle "
    "types typing unittest unittest.mock urllib.parse urllib.request uuid venv warnings weakref webbrowser "
    "wsgiref.simple_server xml.etree.ElementTree xmlrpc.client zipapp zipfile zipimport zlib"
)
TORCH = (
    "torch torch.nn torch.nn.functional torch.nn.init torch.nn.utils torch.optim torch.optim.lr_scheduler torch.hub "
    "torch.serialization torch.jit torch.package torch.storage torch.multiprocessing torch.distributed torch.onnx "
    "torch.distributed.rpc torch.library torch.ops torch.cuda torch._C torch.fx torch.autograd torch.profiler "
    "torch.utils torch.utils.data"
)
USER = """
import os
import subprocess
from functools import partial
from fedring.offers import offers
from torch import nn

@offers("model")
def net(): ...

@offers("loss")
def loss(): ...

class Scored(nn.Module): ...

def plain(): ...

half = partial(os.system, "true")
"""
ALLOWED_FILES = (
    *("fedring/train/names/offered.py", "fedring/train/errors.py", "difflib.py", "json/__init__.py", "json/encoder.py"),
    *("collections/__init__.py", "heapq.py", "<string>", "test_offered_names.py"),
)
ALLOWED_MODULES = (None, "builtins")  # None: methods of texts, lists and tables
DANGEROUS = ("exec", "eval", "compile", "__import__", "open", "input", "breakpoint", "setattr", "delattr")
HARMFUL = {
    *("os:system", "subprocess:run", "builtins:exec", "torch.hub:load", "fedring.client.main:command"),
    *("shutil:rmtree", "ctypes:CDLL", "pty:spawn", "runpy:run_path", "webbrowser:open", "pickle:loads"),
    *("torch.serialization:load", "torch:load", "importlib:import_module", "socket:create_connection"),
}


def public(body: Sequence[ast.stmt]) -> set[str]:
    """Return the public names that statements define, and the modules that they import."""
    names = set[str]()
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Import(names=found):
                names.update((alias.asname or alias.name).partition(".")[0] for alias in found)
            case ast.Assign(targets=targets):
                parts = [part for target in targets for part in getattr(target, "elts", [target])]
                names.update(part.id for part in parts if isinstance(part, ast.Name))
            case ast.If(body=inner, orelse=other) | ast.Try(body=inner, orelse=other):
                names |= public([*inner, *other])
                names |= public([each for handler in getattr(node, "handlers", ()) for each in handler.body])
    return {name for name in names if not name.startswith("_")}


def names_of(module: str, place: Path) -> Iterator[str]:
    """Return names of a module whose source lies below a folder; of one without a source, what is loaded of it."""
    path, loaded = place.joinpath(*module.split(".")), sys.modules.get(module)
    files = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
    known = set(vars(loaded)) if isinstance(loaded, ModuleType) and not files else set[str]()
    known = known.union(*(public(ast.parse(file.read_bytes()).body) for file in files))
    return (f"{module}:{attribute}" for attribute in known | {"main", "run", "load", "__init__", "__dict__"})


@cache
def all_names() -> Sequence[str]:
    """Return the names that no job should reach, and those that it may, without an import."""
    standard, installed = Path(sysconfig.get_path("stdlib")), Path(torch.__file__).parents[1]
    utils = [f"torch.utils.{file.stem}" for file in (installed / "torch" / "utils").glob("[a-z]*.py")]
    own = [(part, file) for part in ("client", "common", "server") for file in (ROOT / part / "fedring").rglob("*.py")]
    names = {name for module in STANDARD.split() for name in names_of(module, standard)}
    names |= {name for module in [*TORCH.split(), *utils] for name in names_of(module, installed)}
    for part, file in own:
        module = ".".join(file.relative_to(ROOT / part).with_suffix("").parts).removesuffix(".__init__")
        names |= set(names_of(module, ROOT / part))
    names |= {f"user_part:{name}" for name in ("net", "loss", "Scored", "plain", "half", "os", "subprocess", "offers")}
    names |= {"user_part.sub:net", "user_part.antigravity:fly", "fedring.antigravity:fly", "torchvision:resnet18"}
    names |= {"__main__:main", "__main__:command", "torchvision.datasets.utils:download_and_extract_archive"}
    names |= {name.replace("posix:", "os:") for name in names if name.startswith("posix:")}
    return sorted(names | {"", "os", "os:", ":system", "os.system", "os:path.join"})


@pytest.fixture
def offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Offered]:
    """Return what fedring and a module of the user's offer."""
    (tmp_path / "user_part.py").write_text(USER)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield collect(["fedring", "user_part"])
    sys.modules.pop("user_part", None)


def outcome(offered: Offered, kind: Any, name: str) -> object:
    """Return what a job gets that names this, or the reason why it is refused."""
    try:
        return offered.get(kind, name)
    except SeamError as error:
        return error.reason


class Watched:
    """Records what is called while it is entered, but for what a look-up needs."""

    def __init__(self) -> None:
        self.calls = set[str]()

    def __enter__(self) -> "Watched":
        sys.setprofile(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            if not frame.f_code.co_filename.endswith(ALLOWED_FILES):
                self.calls.add(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")
        elif event == "c_call":
            module, name = getattr(argument, "__module__", None), getattr(argument, "__name__", "")
            if argument not in (sys.setprofile,) and (module not in ALLOWED_MODULES or name in DANGEROUS):
                self.calls.add(f"{module}.{name}")


def test_there_are_thousands_of_names_to_try() -> None:
    assert len(all_names()) > 5000
    assert set(all_names()) >= HARMFUL


def test_no_other_name_is_found_as_any_kind_and_none_is_imported(offered: Offered) -> None:
    names, before = all_names(), set(sys.modules)
    found = {(kind, name): outcome(offered, kind, name) for name in names for kind in KINDS}
    assert set(sys.modules) == before
    known = {(kind, name) for kind, of_kind in offered.names().items() for name in of_kind if name in names}
    assert {key for key, each in found.items() if not isinstance(each, str)} == known
    assert ("model", "user_part:Scored") in known
    assert {each for each in found.values() if isinstance(each, str)} == {"not_offered", "bad_name"}


@pytest.mark.parametrize("trusted", [[], ["fedring"]])
def test_without_a_module_of_the_users_nothing_else_is_found(trusted: list[str]) -> None:
    offered, before = collect(trusted), set(sys.modules)
    assert [name for name in all_names() if outcome(offered, "model", name) not in ("not_offered", "bad_name")] == [
        name for name in all_names() if name in offered.names().get("model", ())
    ]
    assert set(sys.modules) == before


def test_a_look_up_calls_nothing_but_what_it_needs(offered: Offered) -> None:
    names = all_names()
    with Watched() as watched:
        for number, name in enumerate(names):
            outcome(offered, KINDS[number % len(KINDS)], name)
    assert watched.calls == set()


@pytest.mark.parametrize(
    "act",
    [
        lambda: importlib.import_module("json"),
        lambda: __import__("json"),
        lambda: compile("1", "", "eval"),
        lambda: os.getpid(),
        lambda: subprocess.list2cmdline([]),
    ],
)
def test_a_look_up_that_imported_or_called_something_would_be_noticed(act: Callable[[], Any]) -> None:
    with Watched() as watched:
        act()
    assert watched.calls


PIECES = st.sampled_from(
    ["os", "fedring", "data", "user_part", "net", "system", "__main__", "torch", "digits", "", " "]
)
MARKS = st.sampled_from([":", ".", "::", " as model", "\0", "\n", "/", "..", "(", "ａ", "\u202e"])


@given(st.sampled_from(KINDS), st.one_of(st.text(), st.lists(st.one_of(PIECES, MARKS), max_size=8).map("".join)))
@example(KINDS[0], "\U00010400" * 200)
@example(KINDS[0], f"fedring:{chr(0x10400) * 200}")
def test_any_text_is_refused_in_one_short_line_unless_it_is_offered(kind: Any, name: str) -> None:
    offered, before = collect(["fedring"]), set(sys.modules)
    if name in offered.names().get(kind, ()):
        assert callable(offered.get(kind, name))
        return
    with pytest.raises(SeamError) as caught:
        offered.get(kind, name)
    assert caught.value.reason in ("not_offered", "bad_name")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000
    assert set(sys.modules) == before
