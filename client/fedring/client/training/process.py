"""The code of jobs in a process of its own.

fl-client keeps everything that must outlive a job: keys, accounts, residuals, updates. It sends the values that a
training begins with, and gets those with which it has ended, or an error. A process that crashes, is killed, or passes
a limit is an error of its job, like any other: no update is made of it, and a training with [sample_dp] is charged all
the same.
"""

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedring.client.config import ClientConfig
from fedring.client.training.frames import (
    CORRECTION,
    LOOK_SECONDS,
    OWN,
    BadPipeMessage,
    CodePipe,
    Message,
    PipeClosed,
    StandIn,
    pack,
    put,
    size_of_values,
    values_of,
)
from fedring.client.training.local_training import LoadedJob, LocalTraining
from fedring.codec.schema import Schema
from fedring.data import Split
from fedring.train.errors import TrainError, TrainingStopped
from fedring.train.evaluation import Counts, counts_of
from fedring.train.metrics import sendable_metrics
from fedring.train.plan import Plan, TrainResult
from fedring.v1 import federation_pb2 as pb

log = logging.getLogger(__name__)

_REASON = re.compile(r"[a-z0-9_]{1,64}")
_STOP_SECONDS = 2.0  # that code has to stop when its round has ended; then its process is ended
_PAGE = os.sysconf("SC_PAGE_SIZE")
_OPTIONAL = ("trainer", "evaluator")


class CodeFailed(TrainError):
    """The code of a job has failed in its process.

    Attributes:
        kind: The type of the error, if its text may quote a sample; empty = it does not.
    """

    def __init__(self, reason: str, detail: str, kind: str = "") -> None:
        super().__init__(reason, detail)
        self.kind = kind


class CodeProcess:
    """The process of the code of jobs.

    It is started when it is needed first, and again after it has ended.

    Args:
        config: Of the client.
        waiting: Is told whether fl-client waits for the process.
    """

    def __init__(self, config: ClientConfig, waiting: Callable[[bool], None] = lambda waits: None) -> None:
        self._config, self._waiting = config, waiting
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: CodePipe | None = None

    def call(
        self,
        do: str,
        job: pb.JobSpec,
        asked: Message,
        values: bytes = b"",
        *,
        most: int,
        stopped: Callable[[], bool] = lambda: False,
        progress: Callable[[float], None] = lambda share: None,
    ) -> tuple[Message, bytearray]:
        """Let the process do something, and return its answer with tensors.

        Args:
            do: "load", "train", "own" or "evaluate".
            job: The job.
            asked: What is asked for.
            values: The tensors that go with it.
            most: The most bytes of tensors in the answer.
            stopped: Whether the answer is not wanted any more.
            progress: Is told the share that is done.

        Raises:
            TrainingStopped: If `stopped` returned True.
            CodeFailed: If the code has failed, or its process has ended or passed a limit.
        """
        watch = _Watch(self, stopped, self._config.training.max_seconds, self._config.training.max_memory_bytes)
        self._waiting(True)
        try:
            pipe = self._started(watch)
            watch.began = time.monotonic()  # The start of the process takes seconds, and is not the code's.
            pipe.send({"do": do, "job": job.SerializeToString(deterministic=True).hex(), **asked}, values)
            while True:
                answer, found = pipe.receive(most)
                if "progress" not in answer:
                    break
                progress(min(1.0, max(0.0, float(answer["progress"]))))
        except PipeClosed:
            raise self._ended(watch) from None
        except (BadPipeMessage, TypeError, ValueError) as error:
            self.close()
            raise CodeFailed("process_ended", f"The process of the job's code has sent nonsense: {error}.") from error
        except BaseException:  # also a signal: what has begun must not go on
            self.close()
            raise
        finally:
            self._waiting(False)
        if "stopped" in answer:
            if watch.asked is None:
                raise CodeFailed("process_ended", "The process of the job's code stopped, and nobody had asked for it.")
            raise TrainingStopped
        if isinstance(failed := answer.get("failed"), dict):
            reason, detail, kind = (str(failed.get(key, ""))[:2000] for key in ("reason", "detail", "kind"))
            raise CodeFailed(reason if _REASON.fullmatch(reason) else "bad_reason", detail, kind[:100])
        return answer, found

    def close(self) -> None:
        """End the process, and all that it has started."""
        process, pipe, self._process, self._pipe = self._process, self._pipe, None, None
        if pipe is not None:
            pipe.close()
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    @property
    def memory(self) -> int:
        """The resident bytes of the process and its children."""
        return _resident(self._process.pid) if self._process is not None else 0

    def ask_to_stop(self) -> bool:
        """Tell the code that its round has ended.

        Returns:
            Whether it was told; False = it must be ended.
        """
        if self._pipe is None or self._pipe.sending:
            return False
        with suppress(PipeClosed):
            self._pipe.send({"do": "stop"})
        return True

    def _started(self, watch: "_Watch") -> CodePipe:
        if self._process is not None and self._pipe is not None and self._process.poll() is None:
            self._pipe.look = watch.look
            return self._pipe
        self.close()
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "fedring.client.training.child", str(theirs.fileno())]
            # A session of its own: Ctrl-C reaches fl-client alone, and whatever the code starts can be ended with it.
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        watch.began = float("inf")
        self._pipe = CodePipe(ours, watch.look)
        config = self._config.model_dump(mode="json")
        config["training"] = {}
        self._pipe.send({"parent": os.getpid(), "path": sys.path, "config": config})
        self._pipe.receive(0)  # It is ready.
        log.info("the code of jobs runs in process %d", self._process.pid)
        return self._pipe

    def _ended(self, watch: "_Watch") -> Exception:
        process = self._process
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(_STOP_SECONDS) if process is not None else 0
        code = process.returncode if process is not None else 0
        self.close()
        if watch.asked is not None:
            return TrainingStopped()
        how = f"by signal {-code} ({_name_of(-code)})" if code and code < 0 else f"with exit code {code}"
        if code == -signal.SIGKILL:
            how += ", as it does if the machine has too little memory"
        return CodeFailed("process_ended", f"The process of the job's code ended {how}.", "ProcessEnded")


@dataclass(slots=True)
class _Watch:
    """Looks after a process while fl-client waits for it."""

    process: CodeProcess
    stopped: Callable[[], bool]
    max_seconds: float
    max_bytes: int
    began: float = field(default_factory=time.monotonic)
    asked: float | None = None  # when the code was asked to stop
    looked: float = 0.0

    def look(self) -> None:
        """Raise if the process must end.

        Raises:
            TrainingStopped: If its code was asked to stop, and goes on.
            CodeFailed: If it has passed a limit.
        """
        now = time.monotonic()
        if now < self.looked + LOOK_SECONDS / 2:
            return
        self.looked = now
        if self.asked is not None:
            if now >= self.asked + _STOP_SECONDS:
                log.warning("the job's code did not stop when its round had ended: its process is ended")
                raise TrainingStopped
        elif self.stopped():
            self.asked = now
            if not self.process.ask_to_stop():
                raise TrainingStopped
        elif self.max_seconds and now >= self.began + self.max_seconds:
            text = f"The job's code took longer than this client's training.max_seconds = {self.max_seconds:g}."
            raise CodeFailed("too_long", text, "TimeLimit")
        elif self.max_bytes and (found := self.process.memory) > self.max_bytes:
            limit = f"training.max_memory_bytes = {self.max_bytes:,} here"
            text = f"The job's code had {found:,} bytes of memory, more than {limit}."
            raise CodeFailed("out_of_memory", text, "MemoryLimit")


class _CountedSamples:
    """Samples that another process has, by their number."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size


@dataclass(frozen=True, slots=True, eq=False)
class RemoteTraining(LocalTraining):
    """The training of one round in the process of the job's code."""

    process: CodeProcess = field(kw_only=True)

    def _train_own(
        self, plan: Plan, schema: Schema, start: Mapping[str, Tensor] | None, progress: Callable[[float], None]
    ) -> dict[str, Tensor] | None:
        model = values_of(self.loaded.model)
        asked: Message = {"plan": asdict(plan), "names": sorted(schema.names), "started": start is not None}
        values = pack({**model, **{OWN + name: tensor for name, tensor in (start or {}).items()}})
        answer, found = self.process.call(
            "own",
            self.command.job,
            asked,
            values,
            most=size_of_values(model),
            stopped=self.stopped,
            progress=progress,
        )
        if not answer.get("own"):
            return None
        own = {name: torch.empty_like(model[name]) for name in schema.names}
        put(found, own)
        return own

    def _train(
        self,
        plan: Plan,
        progress: Callable[[float], None],
        corrections: Mapping[str, Tensor] | None = None,
        *,
        on_nothing: bool = False,
    ) -> TrainResult:
        model = values_of(self.loaded.model)
        asked: Message = {"plan": asdict(plan), "corrected": corrections is not None, "on_nothing": on_nothing}
        extra = {CORRECTION + name: tensor for name, tensor in (corrections or {}).items()}
        answer, found = self.process.call(
            "train",
            self.command.job,
            asked,
            pack({**model, **extra}),
            most=size_of_values(model),
            stopped=self.stopped,
            progress=progress,
        )
        result = _result_of(answer)
        put(found, model)
        return result


def load_remote(process: CodeProcess, job: pb.JobSpec, config: ClientConfig, stopped: Callable[[], bool]) -> LoadedJob:
    """Return a job that the process has loaded.

    It has the model's tensors, and the numbers of samples.

    Raises:
        CodeFailed: If it cannot.
    """
    told, values = process.call("load", job, {}, most=_most_first(config), stopped=stopped)
    model = StandIn(told.get("tensors"), values)
    train, test = (_CountedSamples(size) if isinstance(size, int) and size >= 0 else object() for size in _sizes(told))
    split: Any = Split(train, test, 0)  # type: ignore[arg-type]  # nobody here reads a sample
    trainer, evaluator = (_nothing if getattr(config, name) or getattr(job, name) else None for name in _OPTIONAL)
    return LoadedJob(model, split, _nothing, _nothing, trainer, evaluator)


def _most_first(config: ClientConfig) -> int:
    """Return the most bytes of a model of unknown size.

    Its process must have room for it, too.
    """
    return config.training.max_memory_bytes or _PAGE * os.sysconf("SC_PHYS_PAGES")


def evaluate_remote(process: CodeProcess, job: pb.JobSpec, loaded: LoadedJob, stopped: Callable[[], bool]) -> Counts:
    """Return the counts that the process finds for the loaded model.

    Raises:
        TrainError: If the evaluation fails, or its result cannot be used.
    """
    model = values_of(loaded.model)
    told, found = process.call("evaluate", job, {}, pack(model), most=size_of_values(model), stopped=stopped)
    if found:
        put(found, model)
    try:
        correct, warnings = told["correct"], tuple(str(each)[:300] for each in told["warnings"])[:10]
        counts = Counts(
            None if correct is None else int(correct),
            int(told["total"]),
            float(told["loss_sum"]),
            dict(told["metrics"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise TrainError("bad_result", f"The evaluation's result cannot be used: {error}.") from error
    checked = counts_of(counts)
    return Counts(checked.correct, checked.total, checked.loss_sum, checked.metrics, checked.warnings + warnings)


def _nothing(*_: Any) -> Any:
    """Stand for a function of the job."""


def _sizes(told: Message) -> tuple[object, object]:
    return told.get("train"), told.get("test")


def _result_of(answer: Message) -> TrainResult:
    try:
        samples, seconds, metrics = int(answer["num_samples"]), float(answer["seconds"]), dict(answer["metrics"])
        named = sendable_metrics({str(name): float(value) for name, value in metrics.items()})
        loss, accuracy = (named.pop(name, None) for name in ("loss", "accuracy"))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise TrainError("bad_result", f"The training's result cannot be used: {error}.") from error
    if samples < 1 or not (isfinite(seconds) and seconds >= 0):
        raise TrainError("bad_result", f"The training's result cannot be used: {samples} samples, {seconds:g} s.")
    return TrainResult(samples, loss, accuracy, seconds, named=named)


def _resident(pid: int) -> int:
    """Return the resident bytes of a process and its children.

    0 if it has ended.
    """
    try:
        size = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (OSError, IndexError, ValueError):
        return 0
    return size + sum(map(_resident, children))


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
