"""The assembly of a round's update from the stages of all workers.

It is put together at the end of the round, on a worker's disk.

The model passes tensor by tensor, in the order of the schema, from the workers that have trained it to the one that
writes it. So no worker holds more of the model than its own stages. The file is the payload of the update:

    fp32 header | all parameters, float32 | fp64 header | all buffers, float64
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from fedring.codec import BUFFERS
from fedring.codec.dense import dense_header
from fedring.codec.digest import Digest
from fedring.codec.schema import Entry, Schema
from fedring.daemon.durable import private_opener
from fedring.train.errors import TrainError, on_disk
from fedring.workers.exchange import TAG, gather_integers
from fedring.workers.state_file import PIECE, pieces
from fedring.workers.training import Diverged

_AHEAD = 8  # pieces that are asked for before they are needed
_VECTORS = (("parameter", "fp32", torch.float32), ("buffer", BUFFERS, torch.float64))


@dataclass(frozen=True, slots=True)
class AssembledModel:
    """A whole model in a file, as an update sends it."""

    path: Path
    model_digest: str  # the name of the model
    payload_digest: str  # the name of the file's bytes
    packets: tuple[tuple[str, str, int], ...]  # role, encoding and bytes of each packet


def assemble(
    path: Path, schema: Schema, tensors: Mapping[str, Tensor], owners: Mapping[str, int], *, target: int
) -> AssembledModel | None:
    """Write the whole model to a file of one worker.

    Every worker of the default group must call this.

    Args:
        path: The file on the target.
        schema: The schema of the whole model.
        tensors: This worker's tensors, by their names in the schema.
        owners: The rank that has each tensor; the target for those that it has itself.
        target: The rank that writes the file.

    Returns:
        The model that the target has written; None on other workers.

    Raises:
        TrainError: With the reason non_finite, if a value is not finite, or disk_failed.
    """
    if dist.get_rank() != target:
        for entry, dtype, source in _order(schema, owners):
            if source == dist.get_rank():
                for piece in pieces(tensors[entry.name], dtype):
                    dist.recv(_request(), target, tag=TAG)
                    dist.send(piece, target, tag=TAG)
        return None
    requests = _Requests([(e, source) for e, _, source in _order(schema, owners) if source != target])
    with on_disk(path), open(path, "wb", buffering=0, opener=private_opener) as file:
        writer = _Writer(file, Digest(), Digest())
        packets: list[tuple[str, str, int]] = []
        for role, encoding, dtype in _VECTORS:
            size = schema.num_parameters if role == "parameter" else schema.num_buffers
            if not size:
                continue
            head = dense_header(encoding, size)
            writer.write(memoryview(head), of_model=False)
            packets.append((role, encoding, len(head) + size * dtype.itemsize))
            for entry, _, source in _order(schema, owners, role):
                mine = source == target
                for values in pieces(tensors[entry.name], dtype) if mine else requests.receive(entry, dtype, source):
                    if not bool(values.isfinite().all()):
                        # Better no update than one that the server refuses after the whole upload.
                        raise TrainError("non_finite", f"A value of {entry.name} is not finite after the training.")
                    writer.write(values.view(torch.uint8).numpy().data, of_model=True)
    return AssembledModel(path, writer.model.name, writer.payload.name, tuple(packets))


def agree_on_digest(assembled: AssembledModel | None) -> str:
    """Return the digest of the trained model on all workers.

    The workers that have assembled the model know it.

    Every worker of the default group must call this.

    Raises:
        Diverged: If they have not assembled the same model.
    """
    mine = list(bytes.fromhex(assembled.model_digest.rpartition("-")[2])) if assembled else []
    known = [bytes(row) for row in gather_integers(mine) if len(row) == 32 and all(0 <= one < 256 for one in row)]
    if len(set(known)) != 1:
        raise Diverged(f"{len(set(known))} different models were assembled")
    return f"blake3-{known[0].hex()}"


@dataclass(frozen=True, slots=True, eq=False)
class _Writer:
    file: FileIO
    model: Digest
    payload: Digest

    def write(self, data: memoryview, *, of_model: bool) -> None:
        self.payload.update(data)
        if of_model:
            self.model.update(data)
        while data:
            data = data[self.file.write(data) :]


def _order(schema: Schema, owners: Mapping[str, int], only: str = "") -> Iterator[tuple[Entry, torch.dtype, int]]:
    for role, _, dtype in _VECTORS:
        if only in ("", role):
            for entry, _ in schema.spans(role):
                if entry.size:
                    yield entry, dtype, owners[entry.name]


class _Requests:
    """The target's requests for pieces, a few ahead of the received ones.

    If nobody asked, the pieces of fast workers would pile up in the memory of a slower target.
    """

    def __init__(self, entries: Sequence[tuple[Entry, int]]) -> None:
        self._sources = (source for entry, source in entries for _ in range(0, entry.size, PIECE))
        for _ in range(_AHEAD):
            self._ask()

    def receive(self, entry: Entry, dtype: torch.dtype, source: int) -> Iterator[Tensor]:
        """Yield the pieces of the next tensor, [n] each."""
        for start in range(0, entry.size, PIECE):
            values = torch.empty(min(PIECE, entry.size - start), dtype=dtype)
            dist.recv(values, source, tag=TAG)
            self._ask()
            yield values

    def _ask(self) -> None:
        source = next(self._sources, None)
        if source is not None:
            dist.send(_request(), source, tag=TAG)


def _request() -> Tensor:
    return torch.zeros(1, dtype=torch.uint8)
