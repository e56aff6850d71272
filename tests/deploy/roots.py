"""Debian systems in folders, and programs that run in them: containers by systemd-nspawn, each with its own network.

They need root, and Debian's programs debootstrap and systemd-nspawn. Nothing stays behind but the folders.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests.conftest import ROOT, missing
from tests.processes import children_of

SUITE = "bookworm"
EXTRAS = "server,ha,cli,tracing"  # all that the image and the units install
SECONDS = 900.0

_CGROUPS = Path("/sys/fs/cgroup")
_LEFT = ("payload", "supervisor")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def require(*programs: str) -> None:
    """Skip the test unless it runs as root and these programs are installed."""
    if os.geteuid() != 0:
        missing("root")
    for program in programs:
        if shutil.which(program, path=_PATH) is None:
            missing(program)


def run(*command: str | Path, cwd: Path = ROOT, ok: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command of this host; with `ok`, it must succeed."""
    env = {**os.environ, "PATH": _PATH, "LC_ALL": "C"}
    words = [*map(str, command)]
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0 or not ok, f"{words} ended with {done.returncode}:\n{_tail(done)}"
    return done


def debian(folder: Path, *packages: str) -> Path:
    """Make a small Debian with these packages in a folder; return the folder.

    Whatever becomes of debootstrap, nothing stays mounted there: the folder is deleted later.
    """
    run("unshare", "--mount", "debootstrap", "--variant=minbase", f"--include={','.join(packages)}", SUITE, folder)
    return folder


def wheels(folder: Path) -> Path:
    """Put all packages that an installation of this checkout downloads into a folder; return the folder.

    pip gets them from where this host's configuration says. With `pip_configuration`, an installation then uses only
    them.
    """
    needed = ["hatchling", "grpcio-tools==1.76.0", "mypy-protobuf==5.1.0", "pip", "setuptools"]
    pip: list[str | Path] = [sys.executable, "-m", "pip", "wheel", "--quiet", "--constraint", ROOT / "constraints.txt"]
    run(*pip, "--wheel-dir", folder, f"{ROOT}[{EXTRAS}]", *needed)
    for own in folder.glob("fedring-*.whl"):
        own.unlink()
    return folder


def pip_configuration(folder: Path, at: str) -> Path:
    """Write a pip.conf with which pip takes packages only from the folder `at`; return its path."""
    path = folder / "pip.conf"
    path.write_text(f"[global]\nno-index = true\nfind-links = {at}\n")
    return path


def checkout(folder: Path) -> Path:
    """Copy the files of this checkout that git would keep to a folder; return the folder."""
    listed = run("git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


class Container:
    """A process that systemd-nspawn runs in a root folder; it is killed at the end of the `with` block.

    Args:
        root: The folder.
        options: Options of systemd-nspawn, and after "--" the command.
        log: Receives what it writes.
    """

    def __init__(self, root: Path, options: Sequence[str], log: Path) -> None:
        self.log = log
        # Where systemd runs this host, nspawn asks it for a scope. Elsewhere, nobody could be asked.
        alone = [] if Path("/run/systemd/system").exists() else ["--register=no", "--keep-unit"]
        words = ["systemd-nspawn", "--quiet", *alone, "--console=pipe", "--resolv-conf=off", "--timezone=off"]
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [*words, f"--directory={root}", *options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={"PATH": _PATH},
            )

    def __enter__(self) -> "Container":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            with suppress(ProcessLookupError, IndexError):
                os.kill(self.first, signal.SIGKILL)  # the kernel kills everything in it
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    @property
    def first(self) -> int:
        """The process id, on this host, of the container's process 1."""
        return children_of(self.process.pid)[0]

    @property
    def command(self) -> int:
        """The process id, on this host, of the command that the container's own process 1 runs."""
        return children_of(self.first)[0]

    def text(self) -> str:
        """Return what was written so far."""
        return self.log.read_text(errors="replace")


@contextmanager
def clean_cgroups() -> Iterator[None]:
    """Remove the groups of processes that systemd-nspawn makes, and leaves, where no systemd runs."""
    try:
        yield
    finally:
        for top in (folder / name for folder in (_CGROUPS / "systemd", _CGROUPS / "unified") for name in _LEFT):
            for path in sorted([top, *top.rglob("*")], reverse=True):
                with suppress(OSError):
                    path.rmdir()  # fails for files, and for groups that are in use


class Network:
    """Hosts with a network of their own, connected by a bridge that nothing else can reach."""

    def __init__(self, names: Sequence[str]) -> None:
        self._mark = f"fr{os.getpid()}"
        self._stack = ExitStack()
        self.addresses = {name: f"10.77.0.{number}" for number, name in enumerate(names, 2)}

    def __enter__(self) -> "Network":
        hub = self._add("hub")
        run("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", hub, "link", "set", "bridge", "up")
        for name, address in self.addresses.items():
            space = self._add(name)
            peer = ["peer", "name", "eth0", "netns", space]
            run("ip", "-n", hub, "link", "add", f"to-{name}"[:15], "type", "veth", *peer)
            run("ip", "-n", hub, "link", "set", f"to-{name}"[:15], "master", "bridge", "up")
            run("ip", "-n", space, "address", "add", f"{address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                run("ip", "-n", space, "link", "set", link, "up")
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def space(self, name: str) -> str:
        """Return the network namespace of a host."""
        return f"{self._mark}-{name}"

    def hosts(self) -> str:
        """Return the content of /etc/hosts."""
        return "".join(f"{address} {name}\n" for name, address in {"localhost": "127.0.0.1", **self.addresses}.items())

    def _add(self, name: str) -> str:
        space = self.space(name)
        run("ip", "netns", "add", space)
        self._stack.callback(run, "ip", "netns", "delete", space, ok=False)
        return space


def _tail(done: subprocess.CompletedProcess[str]) -> str:
    return f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
