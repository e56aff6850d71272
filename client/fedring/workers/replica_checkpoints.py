"""Checkpoints of one worker on its disk.

With them it goes on with a job after it was killed.

    step-100.safetensors    the tensors; the header's metadata hold, as JSON, where each tensor belongs and all plain
                            values, and the BLAKE3 of everything

A file is written under another name, made durable, and then renamed, so that a file with this name is complete. Nothing
in it is unpickled. The two newest checkpoints are kept, since a worker may have been killed before it wrote the newest
one, which others have.
"""

import json
import logging
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedring.daemon.crash import crashpoint
from fedring.daemon.durable import delete, make_folder, sync
from fedring.untrusted import parse_json
from fedring.workers.optimizer_groups import is_plain
from fedring.workers.replica import digest_of

log = logging.getLogger(__name__)

KEPT = 2
"""How many checkpoints a worker keeps."""

_VERSION = "1"
_NAME = re.compile(r"step-([0-9]{1,18})\.safetensors")

Content = dict[str, Any]
"""Tensors, and values that JSON can hold, in dicts with texts as keys and in lists."""


class CannotKeep(ValueError):
    """A value cannot go into a checkpoint.

    The text is a clause that names it.
    """


class BadCheckpoint(ValueError):
    """A file is damaged, or is no checkpoint of this job.

    The text is a clause.
    """


@dataclass(slots=True)
class ReplicaCheckpoints:
    """The checkpoints of one job in one folder.

    No other process uses the folder.

    Attributes:
        folder: Is made when the first checkpoint is written.
        job: Names the job; checkpoints of any other job are deleted.
        bytes_written: The bytes of all checkpoints that were written.
        seconds: The time that this took.
    """

    folder: Path
    job: str
    bytes_written: int = 0
    seconds: float = 0.0

    def steps(self) -> list[int]:
        """Return the steps of all usable checkpoints, the newest first.

        All other files are deleted.

        This reads the files, to check their digests.
        """
        usable = []
        for path in sorted(self.folder.glob("*")):
            try:
                found = _NAME.fullmatch(path.name)
                if found is None:
                    raise BadCheckpoint("it is not complete")
                _read(path, self.job)
                usable.append(int(found[1]))
            except BadCheckpoint as error:
                log.warning("the checkpoint %s is deleted: %s", path, error)
                delete(path)  # It is a folder if the job before was a pipeline.
        return sorted(usable, reverse=True)

    def read(self, step: int) -> Content:
        """Return the content of a checkpoint.

        Raises:
            BadCheckpoint: If it is damaged, or of another job.
        """
        return _read(self._path(step), self.job)

    def write(self, step: int, content: Content) -> None:
        """Write a checkpoint durably, and delete those that are too old.

        If the disk is full or fails, the error is logged, and training can go on without this checkpoint.

        Raises:
            CannotKeep: If the content holds something that cannot be written.
        """
        began = time.perf_counter()
        part = self._path(step).with_suffix(".part")
        tensors, metadata = encode(content, self.job)
        try:
            make_folder(self.folder)
            save_file(tensors, part, metadata=metadata)
            # The content must be on the disk before the name is, or a power loss could leave a complete name with half
            # a file.
            sync(part)
            crashpoint("worker_checkpoint_written")
            part.rename(self._path(step))
            sync(self.folder)
            size = self._path(step).stat().st_size
            for old in self._written()[KEPT:]:
                self._path(old).unlink()
        except (OSError, SafetensorError) as error:
            log.error("the checkpoint of step %d was not written: %s", step, error)
            with suppress(OSError):  # a disk that the system has made read-only removes nothing, either
                part.unlink(missing_ok=True)
            return
        self.bytes_written += size
        self.seconds += time.perf_counter() - began
        log.debug("the checkpoint of step %d has %d bytes", step, size, extra={"step": step})

    def drop_after(self, step: int) -> None:
        """Delete the checkpoints of later steps.

        The job goes on from `step`, and will take them again.
        """
        for later in self._written():
            if later > step:
                self._path(later).unlink()

    def _written(self) -> list[int]:
        found = (_NAME.fullmatch(path.name) for path in self.folder.glob("*"))
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step}.safetensors"


def encode(content: Content, job: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return a checkpoint's tensors and metadata: the inverse of decode().

    The tensors have unique names.

    Raises:
        CannotKeep: If something is neither a tensor nor a value that JSON can hold.
    """
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_encoded(content, "", tensors))
    storages: set[int] = set()
    for name, tensor in tensors.items():  # safetensors takes no tensors that share memory
        storage = tensor.untyped_storage()
        if storage.nbytes() != tensor.nbytes or storage.data_ptr() in storages:
            tensors[name] = tensor.clone()
        storages.add(storage.data_ptr())
    return tensors, {"version": _VERSION, "job": job, "content": text, "digest": checkpoint_digest(job, text, tensors)}


def decode(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], job: str) -> Content:
    """Return the content of a checkpoint; the inverse of encode().

    Raises:
        BadCheckpoint: If it is damaged, or of another job or version.
    """
    if metadata.get("version") != _VERSION:
        raise BadCheckpoint(f"it is of version {metadata.get('version')!r:.20}, not {_VERSION!r}")
    if metadata.get("job") != job:
        raise BadCheckpoint("it is of another job")
    text = metadata.get("content", "")
    if metadata.get("digest") != checkpoint_digest(job, text, tensors):
        raise BadCheckpoint("its digest is wrong")
    try:
        content: Content = _decoded(parse_json(text), tensors)
    except (ValueError, LookupError, TypeError) as error:
        raise BadCheckpoint(f"its content cannot be read: {error!r:.200}") from error
    if not isinstance(content, dict):
        raise BadCheckpoint("its content is no table")
    return content


def _read(path: Path, job: str) -> Content:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        # Copies: the reader maps the file into memory, and what it says later would be used unchecked.
        return decode({name: tensor.clone() for name, tensor in load_file(path).items()}, metadata, job)
    except (OSError, SafetensorError) as error:
        raise BadCheckpoint(f"it cannot be read: {error}") from error


def checkpoint_digest(job: str, text: str, tensors: Mapping[str, Tensor]) -> str:
    """Return the digest of everything that a checkpoint says."""
    values = digest_of(tensors[name] for name in sorted(tensors))
    return blake3(b"\0".join([job.encode(), text.encode(), values])).hexdigest()


def _encoded(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return `value` for JSON.

    A tensor becomes ["tensor", name], and a list ["list", ...].
    """
    if isinstance(value, Tensor):
        name = f"{len(tensors)} {path}"
        tensors[name] = value.detach().cpu().contiguous()
        return ["tensor", name]
    if isinstance(value, Mapping):
        if others := [key for key in value if not isinstance(key, str)]:  # which JSON would make texts
            raise CannotKeep(f"{path or 'it'} has the key {others[0]!r:.100}, which is no text")
        return {key: _encoded(inner, f"{path}/{key}" if path else key, tensors) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return ["list", *(_encoded(inner, f"{path}/{place}", tensors) for place, inner in enumerate(value))]
    if is_plain(value):
        return value
    raise CannotKeep(f"{path} is a {type(value).__name__}, which is neither a tensor nor a plain value")


def _decoded(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, dict):
        return {key: _decoded(inner, tensors) for key, inner in value.items()}
    if isinstance(value, list):
        kind, *inner = value
        return tensors[inner[0]] if kind == "tensor" else [_decoded(one, tensors) for one in inner]
    return value
