"""The process of a job's code, which trains and evaluates for fl-client.

It is started by `fedring.client.training.process`, ends with it, and holds nothing that must outlive it: keys, accounts
and updates stay in fl-client.
"""

import ctypes
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from fedring.client.config import ClientConfig
from fedring.client.training.frames import (
    CORRECTION,
    OWN,
    CodePipe,
    Message,
    PipeClosed,
    describe,
    pack,
    put,
    values_of,
)
from fedring.client.training.local_training import LoadedJob, loop_of
from fedring.client.training.personal import personal_of, train_own
from fedring.client.training.trainer import DeclaredTrainer, prepare
from fedring.daemon.logs import set_up_logs
from fedring.data import DataError
from fedring.job_code import job_code
from fedring.train.batches import size_of
from fedring.train.errors import SeamError, TrainError, TrainingStopped, failure_detail, failure_reason
from fedring.train.evaluation import run_evaluator
from fedring.train.plan import Plan
from fedring.train.tensors.state import schema_of
from fedring.v1 import federation_pb2 as pb

_PR_SET_PDEATHSIG = 1
_MOST = 1 << 62  # bytes of tensors: fl-client is trusted here
_LEAST_SHARE = 0.005  # of a training, between two reports of its progress

Answer = tuple[Message, bytes]


class JobProcess:
    """Answers fl-client, one message at a time."""

    def __init__(self, pipe: CodePipe, config: ClientConfig) -> None:
        self._pipe, self._trainer = pipe, DeclaredTrainer(config)
        self._device = self._trainer.device
        self._doing: dict[str, Callable[[LoadedJob, Message, bytearray], Answer]] = {
            "load": self._load,
            "train": self._train,
            "own": self._own,
            "evaluate": self._evaluate,
        }

    def answer(self, asked: Message, values: bytearray) -> Answer:
        """Return the answer to a message, and its tensors."""
        try:
            with job_code():
                if asked["do"] == "load":
                    self._trainer.forget()
                loaded = self._trainer.load(pb.JobSpec.FromString(bytes.fromhex(asked["job"])))
                return self._doing[asked["do"]](loaded, asked, values)
        except PipeClosed:
            raise
        except TrainingStopped:
            return {"stopped": True}, b""
        except (SeamError, TrainError, DataError) as error:
            kind = type(error.__cause__ or error).__name__ if isinstance(error, DataError) else ""
            return _failed(error.reason, str(error), kind), b""
        except Exception as error:  # noqa: BLE001  # the job's code may raise anything
            sys.excepthook(type(error), error, error.__traceback__)
            return _failed(failure_reason(error), failure_detail(error), type(error).__name__), b""
        finally:
            self._trainer.forget_changed()

    def _load(self, loaded: LoadedJob, asked: Message, values: bytearray) -> Answer:
        """Describe the job's model and its samples."""
        tensors = values_of(loaded.model)
        told = {"tensors": describe(loaded.model), "train": _size(loaded.split.train), "test": _size(loaded.split.test)}
        return told, pack(tensors)

    def _train(self, loaded: LoadedJob, asked: Message, values: bytearray) -> Answer:
        job = pb.JobSpec.FromString(bytes.fromhex(asked["job"]))
        rest = put(values, values_of(loaded.model))
        corrections = _below(CORRECTION, rest) if asked["corrected"] else None
        result = loop_of(job).train(
            loaded,
            loaded.split.train,
            Plan(**asked["plan"]),
            device=self._device,
            progress=self._progress(),
            stopped=self._stopped,
            corrections=corrections,
            on_nothing=asked["on_nothing"],
        )
        told = {"num_samples": result.num_samples, "seconds": result.seconds, "metrics": result.metrics}
        return told, pack(values_of(loaded.model))

    def _own(self, loaded: LoadedJob, asked: Message, values: bytearray) -> Answer:
        """Train the client's own model."""
        rest = put(values, values_of(loaded.model))
        own = train_own(
            loaded.model,
            loaded.split.train,
            Plan(**asked["plan"]),
            personal_of(pb.JobSpec.FromString(bytes.fromhex(asked["job"]))),
            loss=loaded.loss,
            optimizer_factory=loaded.optimizer,
            schema=schema_of(loaded.model, asked["names"]),
            start=_below(OWN, rest) if asked["started"] else None,
            device=self._device,
            progress=self._progress(),
            stopped=self._stopped,
        )
        return {"own": own is not None}, pack(own or {})

    def _evaluate(self, loaded: LoadedJob, asked: Message, values: bytearray) -> Answer:
        put(values, values_of(loaded.model))
        counts = run_evaluator(loaded.evaluator, loaded.model, loaded.split.test, loss=loaded.loss, device=self._device)
        told = asdict(counts) | {"metrics": dict(counts.metrics)}
        return told, pack(values_of(loaded.model)) if loaded.evaluator is not None else b""

    def _progress(self) -> "_Progress":
        return _Progress(self._pipe)

    def _stopped(self) -> bool:
        """Return whether fl-client wants the training to stop, or has ended."""
        if not select.select([self._pipe], [], [], 0)[0]:
            return False
        self._pipe.receive(_MOST)
        return True


class _Progress:
    def __init__(self, pipe: CodePipe) -> None:
        self._pipe, self._told = pipe, 0.0

    def __call__(self, share: float) -> None:
        if share >= self._told + _LEAST_SHARE:
            self._told = share
            self._pipe.send({"progress": share})


def serve(descriptor: int) -> None:
    """Answer fl-client until it closes the connection."""
    pipe = CodePipe(socket.socket(fileno=descriptor))
    hello, _ = pipe.receive(0)
    _end_with(hello["parent"])
    sys.path[:] = hello["path"]
    config = ClientConfig.model_validate(hello["config"])
    set_up_logs(config.log_style, config.log_level)
    prepare(config)
    process = JobProcess(pipe, config)
    pipe.send({"ready": True})
    while True:
        asked, values = pipe.receive(_MOST)
        if asked["do"] == "stop":
            continue  # It came when the work was done.
        pipe.send(*process.answer(asked, values))


def main() -> None:
    """Run the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        serve(int(sys.argv[1]))
    except PipeClosed:
        os._exit(0)  # At once: the job's code may have threads that never end.


def _end_with(parent: int) -> None:
    """Let the kernel kill this process when fl-client ends, in whatever way."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # It has ended before.
        os._exit(1)
    with suppress(OSError):  # The kernel takes this process first when the memory ends.
        Path("/proc/self/oom_score_adj").write_text("1000")


def _failed(reason: str, detail: str, kind: str) -> Message:
    return {"failed": {"reason": reason, "detail": detail[:2000], "kind": kind}}


def _size(samples: object) -> int | None:
    try:
        return size_of(samples)  # type: ignore[arg-type]  # it says so itself
    except (TrainError, TypeError):
        return None


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


if __name__ == "__main__":
    main()
