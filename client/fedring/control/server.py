"""fl-server and its jobs as objects, for scripts and notebooks."""

import json
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from pydantic import ValidationError

from fedring.control import figures
from fedring.control.access import Access
from fedring.control.calls import Control, check_completed
from fedring.control.code_names import with_names
from fedring.control.failure import Failure
from fedring.control.figures import Row
from fedring.control.notebook import live_view
from fedring.control.view import JobView, RoundFigures
from fedring.daemon.config import ConfigError, explain, read_document
from fedring.daemon.exits import Exit
from fedring.rpc.address import check_address
from fedring.rpc.tls import Tls
from fedring.train.metrics import best_of
from fedring.v1 import control_pb2 as pb

if TYPE_CHECKING:
    from torch import nn

    _Module = TypeVar("_Module", bound=nn.Module)

DEFAULT_SERVER = "127.0.0.1:8444"

_ROUND_ENDED = ("round_evaluated", "round_abandoned")
_ENDED_PHASES = ("published", "abandoned")
_ALL = 2**31


def connect(
    server: str = "",
    *,
    tls_ca: str | Path | None = None,
    tls_cert: str | Path | None = None,
    tls_key: str | Path | None = None,
    token_file: str | Path | None = None,
) -> "Server":
    """Connect to the control port of an fl-server.

    Values that are not given are read from the environment, as flctl reads them.

    Args:
        server: "host:port"; empty = FLCTL_SERVER, or 127.0.0.1:8444.
        tls_ca: Certificate of the authority that signed fl-server's; without it, traffic is in plaintext.
        tls_cert: Your own certificate, with the role operator.
        tls_key: Its private key.
        token_file: A file with your bearer token.

    Raises:
        Failure: If the address or the certificates cannot be used, or if the server does not answer.
    """
    given = {"ca": tls_ca, "cert": tls_cert, "key": tls_key}
    try:
        address = check_address(server or os.environ.get("FLCTL_SERVER", DEFAULT_SERVER))
        tls = Tls.model_validate(
            {name: path or os.environ.get(f"FLCTL_TLS_{name.upper()}") for name, path in given.items()}
        )
        token = token_file or os.environ.get("FLCTL_TOKEN_FILE")
        control = Control(address, channel=Access(tls, Path(token) if token else None).channel(address), tls=tls)
    except ValidationError as error:
        raise Failure(explain(error, {}).replace("tls.", "tls_"), Exit.USAGE) from error
    except ConfigError as error:
        raise Failure(str(error), Exit.CONFIG) from error
    except ValueError as error:
        raise Failure(str(error), Exit.USAGE) from error
    try:
        # Ask once, so that a wrong address or certificate fails here and not at the first use.
        control.status()
    except Failure:
        control.close()
        raise
    return Server(control)


class Server:
    """A connection to an fl-server. Close it, or use it within `with`.

    Attributes:
        control: All calls of the control port, with their messages.
    """

    def __init__(self, control: Control) -> None:
        self.control = control

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the connection, and everything that waits for it."""
        self.control.close()

    def start(
        self,
        job: Mapping[str, Any] | str | Path = MappingProxyType({}),
        *,
        key: str = "",
        sign: bool = False,
        **keys: Any,
    ) -> "Job":
        """Queue a job, and return at once.

        Args:
            job: Its keys (docs/configuration.md), or a .toml or .json file with them. The server has defaults for
                those that are missing. In the place of a name there may be the function or class itself, if server and
                clients can import it.
            key: Idempotency key: the same job with the same key is queued once. By default every call has a new key.
            sign: Whether to sign the job with the key of `tls_cert`, for clients that follow only signed jobs. None of
                the server's defaults count then, and `start` must be "fresh" or the number of a version.
            keys: Further keys, which take precedence over those of `job`.

        Raises:
            Failure: If the file, a key or a value is wrong, if others cannot import a function or class, or if the
                server refuses the job.
        """
        from fedring.control.job_file import check_job  # imports the schema of jobs, which nothing else here needs

        try:
            table = dict(job) if isinstance(job, Mapping) else read_document(Path(job))
            table = with_names(table | keys)
            check_job(table, where="the job")
        except ConfigError as error:
            raise Failure(str(error), Exit.CONFIG) from error
        if sign:
            from fedring.control.signing import sign_job  # as above

            reply = self.control.start_signed(sign_job(self.control, table), key=key)
        else:
            reply = self.control.start_job(table, key=key)
        if reply.warning:
            warnings.warn(reply.warning, stacklevel=2)
        return Job(self.control, reply.job_id)

    def job(self, job_id: int = 0) -> "Job":
        """Return a job by its id, or the newest one.

        Raises:
            Failure: If there is no such job.
        """
        if job_id:
            self.control.job(job_id)
            return Job(self.control, job_id)
        if jobs := self.jobs(limit=1):
            return jobs[0]
        raise Failure(f"fl-server at {self.control.address} has no job yet")

    def jobs(self, *, limit: int = 0) -> list["Job"]:
        """Return jobs, newest first, at most `limit`; 0 = 100."""
        return [Job(self.control, message.job_id) for message in self.control.jobs(limit=limit)]

    def running(self) -> list["Job"]:
        """Return the jobs that run now, oldest first."""
        return [Job(self.control, message.job_id) for message in self.control.status().running]


class Job:
    """A job of an fl-server.

    It goes on whether or not anybody watches it.

    Attributes:
        id: Its number, as flctl shows it.
    """

    def __init__(self, control: Control, job_id: int) -> None:
        self._control = control
        self.id = job_id

    def __repr__(self) -> str:
        return f"<Job {self.id} of {self._control.address}>"

    @property
    def message(self) -> pb.Job:
        """The job's state at the server: name, state, reason, rounds_done, ..."""
        return self._control.job(self.id)

    @property
    def state(self) -> str:
        """The state: "queued", "running", "completed", "failed" or "stopped"."""
        return self.message.state

    @property
    def spec(self) -> dict[str, Any]:
        """All keys of the job, with the server's defaults."""
        spec: dict[str, Any] = json.loads(self.message.spec)
        return spec

    def _repr_html_(self) -> str | None:
        try:
            message = self.message
            rows = self._rows()
            rounds = [_view_of(row) for row in rows if row["phase"] in _ENDED_PHASES]
        except Failure:  # then a notebook shows the text of repr()
            return None
        state = f"{message.state}: {message.reason}" if message.reason else message.state
        return JobView(message.name, f"job {self.id} is {state}", message.rounds, rounds).html()

    def stop(self) -> None:
        """End the job, with the round in progress."""
        self._control.stop_job(self.id)

    def stop_round(self) -> None:
        """End the round in progress, and go on with the next one."""
        self._control.stop_round(self.id)

    def move(self, *, before: "Job | None" = None, last: bool = False) -> None:
        """Move the job within the queue, in which it waits.

        Args:
            before: The queued job that it is to be ahead of; None = of all.
            last: Whether it is to be behind all others instead.
        """
        self._control.move_job(self.id, before=before.id if before else 0, last=last)

    def events(self) -> Iterator[pb.Event]:
        """Yield the events of the job and of clients from now on.

        They end when the job has ended.
        """
        return self._control.follow_job(self.id)

    def watch(self) -> Iterator[Row]:
        """Yield a row for each round as soon as it has ended.

        Rounds before this call are included. The rows end when the job has ended.

        Raises:
            Failure: If the job failed or was stopped; the sentence says why. Its rounds have been yielded before.
        """
        last = 0
        for event in self._control.follow_job(self.id):
            ended = event.kind == "job_ended" and event.job_id == self.id
            if ended or (event.kind in _ROUND_ENDED and event.job_id == self.id):
                # The job may be many rounds ahead of its reader. Those are told with their own events.
                for row in self._rows(after=last, below=0 if ended else event.round + 1):
                    yield row
                    last = int(row["round"] or 0)
        check_completed(self.message)

    def wait(self) -> Self:
        """Wait until the job has ended.

        In a notebook, the cell shows the progress.

        Raises:
            Failure: If it failed or was stopped; the sentence says why.
        """
        live = live_view()
        for event in self.events():
            if live is not None:
                ended = event.kind == "job_ended" and event.job_id == self.id
                live.update(self._repr_html_, last=ended)
        check_completed(self.message)
        return self

    def rounds(self) -> list[Row]:
        """Return a row for each round so far, oldest first.

        `pandas.DataFrame(job.rounds())` is a table of them.

        A row has the fields of a round (docs/flctl.md), `accuracy` and `loss`, which are None where they are not known,
        and every metric under its name, such as "eval/f1".
        """
        return list(self._rows())

    def best(self) -> Row | None:
        """Return the row of the best round; None without an evaluated one.

        The job's key best_by says how rounds are compared.
        """
        rows = [row for row in self.rounds() if row["model_version"]]
        place = best_of([_numbers(row) for row in rows], self.spec.get("best_by", ""))
        return None if place is None else rows[place]

    def export(self, path: str | Path, version: int | Literal["newest", "best"] = "newest") -> int:
        """Write a model of the job to a .safetensors file.

        Returns the model's version.

        Args:
            path: The file.
            version: A version number; "newest" is the job's last model, "best" that of its best round.

        Raises:
            Failure: If there is no such model, if the server keeps it no longer, or if the file cannot be written.
        """
        number = version if isinstance(version, int) else self._version(version)
        return self._control.export_model(number, Path(path)).version

    def load_model(
        self, model: "_Module", version: int | Literal["newest", "best"] = "newest", *, partial: bool = False
    ) -> "_Module":
        """Fill `model` with a model of the job, and return it.

        Args:
            model: A module with the same tensors.
            version: As for export().
            partial: The module may have further tensors, which keep their values: those that the job does not share.

        Raises:
            Failure: As for export(), or if `model` does not fit.
        """
        from fedring.train.errors import SeamError  # these import torch
        from fedring.train.tensors.files import load_model

        with TemporaryDirectory() as folder:
            path = Path(folder) / "model.safetensors"
            self.export(path, version)
            try:
                load_model(path, model, partial=partial)
            except SeamError as error:
                raise Failure(str(error).replace(f"{path} ", f"the model of job {self.id} "), Exit.CONFIG) from error
        return model

    def _rows(self, *, after: int = 0, below: int = 0) -> Iterator[Row]:
        """Yield the rows of the rounds above `after`, oldest first.

        Those from `below` on are left out; 0 = none.
        """
        # A job may have had more rounds than it asks for, since those that its sites had not approved do not count.
        limit = below - 1 - after if below else _ALL
        found = self._control.rounds(job_id=self.id, limit=min(limit, _ALL), after=after, below=below)
        return (figures.row(round_) for round_ in reversed(found))

    def _version(self, which: str) -> int:
        if which == "best":
            row = self.best()
        else:
            row = next((row for row in reversed(self.rounds()) if row["model_version"]), None)
        if row is None:
            raise Failure(f"job {self.id} has no {which} model yet")
        return int(row["model_version"] or 0)


def _view_of(row: Row) -> RoundFigures:
    numbers = _numbers(row)
    metrics = {name: value for name, value in numbers.items() if "/" in name}
    return RoundFigures(int(numbers["job_round"]), numbers.get("accuracy"), numbers.get("loss"), metrics)


def _numbers(row: Row) -> dict[str, float]:
    return {name: value for name, value in row.items() if isinstance(value, int | float)}
