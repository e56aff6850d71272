"""Decoders of files that may be damaged, or written by somebody else."""

import contextlib
import json
import sqlite3
import struct
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import safetensors.torch
import torch

from fedring.client.consent.card import differences
from fedring.client.consent.cards import read_kept
from fedring.client.policy.ledger import LEDGER, Ledger
from fedring.client.secure.released import Released
from fedring.client.secure.state import SecureState
from fedring.client.transfer.kept import KeptFiles, Section, digest_of
from fedring.client.transfer.spool import Spool
from fedring.codec import CodecError
from fedring.daemon.config import ConfigError
from fedring.daemon.durable import with_digest
from fedring.server.aggregation.modelfile import ModelReader, model_file_header
from fedring.server.aggregation.optimizer import ServerOptimizer
from fedring.server.aggregation.rule import OptimizerError
from fedring.server.model.transforms.states import read_states, write_states
from fedring.server.state.backup.contents import parse_manifest
from fedring.server.state.wal import scan
from fedring.train.errors import SeamError, TrainError
from fedring.train.tensors.files import read_tensors
from fedring.v1 import federation_pb2 as pb
from fedring.workers.replica_checkpoints import BadCheckpoint, checkpoint_digest, decode, encode
from fedring.workers.state_file import TensorFile, write_tensors
from tests.fuzz.target import Target
from tests.fuzz.wires import DEEP, LENGTH, MODEL, SCHEMA, update_offers


class _Blob:
    """A file in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    @property
    def size(self) -> int:
        return len(self._data)

    def read(self, offset: int, size: int) -> bytes:
        return self._data[offset : offset + size]


def _model(data: bytes) -> None:
    reader = ModelReader(_Blob(data))
    assert reader.schema.num_parameters * 4 <= len(data)
    assert dict(reader.metadata) is not None
    reader.vectors()


def _model_file() -> bytes:
    return model_file_header(SCHEMA, {"version": "1"}) + MODEL.buffers.tobytes() + MODEL.parameters.tobytes()


def _in_folder(use: Callable[[Path, bytes], object]) -> Callable[[bytes], object]:
    """Return a function that gives `use` an empty folder."""

    def run(data: bytes) -> object:
        with tempfile.TemporaryDirectory(prefix="fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
            return use(Path(name), data)

    return run


def _made(make: Callable[[Path], object], name: str) -> bytes:
    """Return the file of that name after `make` has worked in an empty folder."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        make(Path(folder))
        (found,) = Path(folder).glob(name)
        return found.read_bytes()


def _checkpoint(folder: Path, data: bytes) -> None:
    (folder / "file").write_bytes(data)
    with TensorFile(folder / "file") as file:
        for name, stored in file.tensors.items():
            if stored.size <= len(data):
                file.read_into(name, torch.empty(stored.shape, dtype=stored.dtype))


def _tensors(folder: Path, data: bytes) -> None:
    (folder / "file").write_bytes(data)
    read_tensors(folder / "file")


def _kept(folder: Path, data: bytes) -> None:
    """Load a file whose digest is right, and whose texts are the data."""
    KeptFiles(folder, "c").put("line", {"residual": Section({"a": torch.ones(2)}, {})})
    (path,) = folder.glob("kept-*")
    words, _, line = data.decode("utf-8", "replace").partition("\0")
    known = {"client": "c", "line": line or "line", "update": "", "words": words}
    tensors = safetensors.torch.load_file(path)
    safetensors.torch.save_file(tensors, path, known | {"digest": digest_of(tensors, known)})
    KeptFiles(folder, "c").load("line")


def _spool(folder: Path, data: bytes) -> None:
    (folder / "update").write_bytes(data)
    spool = Spool(folder, "c")
    if (found := spool.pending()) is not None and found.header.total_bytes <= 1 << 20:
        assert found.is_sound in (True, False)


def _spooled() -> bytes:
    offer = pb.UpdateOffer.FromString(update_offers()[0])
    return _made(lambda folder: Spool(folder, "c").write(offer, [b"a payload"]), "update")


def _ledger(folder: Path, data: bytes) -> None:
    (folder / LEDGER).write_bytes(with_digest(data))
    Ledger(folder)
    Ledger(folder)  # what it adopted or wrote is read


def _card(data: bytes) -> None:
    kept = read_kept(with_digest(data))
    kept.refusal(1e9)
    differences(kept.card.facts, {})
    assert len(kept.card.name) == 64


def _released(folder: Path, data: bytes) -> None:
    (folder / "released.json").write_bytes(with_digest(data))
    Released(folder).sets_of("base")


def _finished(folder: Path, data: bytes) -> None:
    (folder / "secure").mkdir()
    (folder / "secure" / "finished.json").write_bytes(with_digest(data))
    SecureState(folder)


def _optimizer(data: bytes) -> None:
    ServerOptimizer("Adam", {"lr": 0.1}).load(data, LENGTH)


def _replica(data: bytes) -> None:
    """Decode a replica's checkpoint whose digest is right."""
    text = data.decode("utf-8", "replace")
    tensors, metadata = encode({"a": torch.ones(2)}, "j")
    decode(tensors, metadata | {"content": text, "digest": checkpoint_digest("j", text, tensors)}, "j")


def _manifest(data: bytes) -> None:
    parse_manifest(data.decode("utf-8", "replace"), Path("manifest"))


def _with_header(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def _optimizer_file() -> bytes:
    identity = json.dumps(["Adam", {"lr": 0.1}], sort_keys=True)
    return safetensors.torch.save({"exp_avg": torch.zeros(LENGTH), "step": torch.ones(())}, {"optimizer": identity})


def _log() -> bytes:
    """Return the log of a database with two commits."""

    def make(folder: Path) -> None:
        with contextlib.closing(sqlite3.connect(folder / "x", isolation_level=None)) as database:
            database.execute("pragma page_size = 512")
            database.execute("pragma journal_mode = wal")
            database.execute("create table t (a)")
            database.execute("insert into t values (1)")
            (folder / "copy").write_bytes((folder / "x-wal").read_bytes())

    return _made(make, "copy")


@cache
def disk_targets() -> dict[str, Target]:
    """Return the targets by name."""
    tensors = {"a": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.int64)}
    return {
        "model file": Target(_model, [_model_file(), _with_header(DEEP)], (CodecError,)),
        "checkpoint": Target(
            _in_folder(_checkpoint),
            [_made(lambda folder: write_tensors(folder / "file", tensors, {"facts": "{}"}), "file")],
            (TrainError,),
        ),
        "tensors": Target(_in_folder(_tensors), [safetensors.torch.save(tensors), _with_header(DEEP)], (SeamError,)),
        "states": Target(
            read_states, [write_states({"feddyn": {"h": np.ones(4, np.float32)}}, {"feddyn": "x"})], (CodecError,)
        ),
        "optimizer": Target(_optimizer, [_optimizer_file()], (OptimizerError,)),
        "replica": Target(_replica, [b'{"a": ["tensor", "0 a"], "b": ["list", 1]}', DEEP], (BadCheckpoint,)),
        "manifest": Target(_manifest, [b'{"format": 1}', DEEP], (ConfigError,)),
        "kept": Target(_in_folder(_kept), [b'{"residual": {}}\0line', b'{"residual": {"a": 1}}', DEEP]),
        "spool": Target(_in_folder(_spool), [_spooled(), bytes(16)]),
        "ledger": Target(
            _in_folder(_ledger),
            [b'{"last": "", "rounds": {"1.5": 3}, "samples": [], "jobs": [], "told": null}', DEEP],
            (ConfigError,),
        ),
        "card": Target(
            _card,
            [
                b'{"card": {"job": {"rounds": 3}}, "free": {}, "seen": 1.0, "decisions": []}',
                b'{"card": {}, "free": {}, "seen": 1, "decisions": [{"at": 1, "until": 0, "approved": true, '
                b'"note": "", "by": ""}]}',
                DEEP,
            ],
            (ValueError,),
        ),
        "released": Target(
            _in_folder(_released),
            [
                b'{"clients": ["a"], "sets": [[0]], "bases": {"x": [0]}}',
                b'{"clients": [], "sets": [], "bases": []}',
                b'{"clients": ["a"], "sets": [[-1]], "bases": {"x": [0]}}',
                DEEP,
            ],
            (ConfigError,),
        ),
        "finished rounds": Target(_in_folder(_finished), [b'{"ab": [1, 2, "over"]}', DEEP], (ConfigError,)),
        "log": Target(lambda data: scan(lambda at, size: data[at : at + size], len(data)), [_log(), bytes(64)]),
    }
