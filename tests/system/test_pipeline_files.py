"""Files that workers of a pipeline send to each other, between real processes."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fedring.codec.digest import Digest
from fedring.codec.schema import Entry, Schema
from fedring.workers.assembly import agree_on_digest, assemble
from fedring.workers.exchange import TAG, exchange_files, gather_integers
from fedring.workers.stage_checkpoints import Checkpoint, Layout, StageCheckpoints, recover, share_copies
from fedring.workers.state_file import write_tensors
from tests import waiting
from tests.system.ring_scripts import ranks

SIZES = (1, 700_000, 1 << 20)
SCHEMA = Schema(
    (
        Entry("a", (300, 300), "float32", "parameter"),
        Entry("mean", (3,), "float32", "buffer"),
        Entry("b", (5,), "bfloat16", "parameter"),
        Entry("c", (200, 500), "float32", "parameter"),
        Entry("count", (), "int64", "buffer"),
    )
)


def content(rank: int) -> bytes:
    return bytes((rank + at) % 251 for at in range(SIZES[rank]))


def send_around(folder: Path, rank: int, size: int) -> dict[str, Any]:
    """Send each rank's file to the next one, and then one that is larger than the next one takes."""
    mine, theirs = folder / f"mine-{rank}", folder / f"theirs-{rank}"
    mine.write_bytes(content(rank))
    before, after = (rank - 1) % size, (rank + 1) % size
    exchange_files((mine, after), (theirs, before), limit=1 << 20)
    same = theirs.read_bytes() == content(before)
    rows = gather_integers(list(range(rank)))
    if rank == 1:
        (folder / "taken" / "by a folder").mkdir(parents=True)
        taken = ranks.error_of(lambda: exchange_files(None, (folder / "taken", 0), limit=1))
        rest = sorted(path.name for path in folder.glob("taken*"))
        more = {"taken": taken["kind"], "rest": rest}
        return {
            "same": same,
            "rows": rows,
            **more,
            **ranks.error_of(lambda: exchange_files(None, (theirs, 0), limit=0)),
        }
    if rank == 0:
        exchange_files((mine, 1), None)
        ranks.error_of(lambda: exchange_files((mine, 1), None))
    return {"same": same, "rows": rows}


def test_files_go_around_and_one_that_is_too_large_is_refused(tmp_path: Path) -> None:
    results = ranks.run(partial(send_around, tmp_path), 3, tmp_path)
    assert [result["same"] for result in results] == [True] * 3
    assert results[0]["rows"] == [[], [0], [0, 1]]
    assert (results[1]["taken"], results[1]["rest"]) == ("TrainError", ["taken"])  # so is the place of this file
    assert "rank 0 sends 1 bytes, which must be 1 to 0" in results[1]["text"]


def break_off(folder: Path, rank: int, size: int) -> dict[str, Any]:
    """Begin to send a file to rank 1, and abort the group once it has begun to write it."""
    theirs = folder / "theirs"
    if rank == 0:
        group: Any = dist.group.WORLD
        dist.send(torch.tensor([1 << 20]), 1, tag=TAG)
        dist.send(torch.zeros(1 << 18, dtype=torch.uint8), 1, tag=TAG)
        waiting.until((folder / "theirs.part").exists)
        group.abort()
        return {}
    error = ranks.error_of(lambda: exchange_files(None, (theirs, 0), limit=1 << 20))
    return {"kind": error["kind"], "left": [path.name for path in folder.glob("theirs*")]}


def test_what_has_come_of_a_file_is_deleted_if_its_sender_is_lost(tmp_path: Path) -> None:
    _, result = ranks.run(partial(break_off, tmp_path), 2, tmp_path)
    assert result == {"kind": "RingError", "left": []}


def write_stage(path: Path, rank: int) -> None:
    write_tensors(path, {"x": torch.frombuffer(bytearray(content(rank)), dtype=torch.uint8)}, {})


def lose_and_recover(root: Path, rank: int, size: int) -> dict[str, Any]:
    """Make two checkpoints, of which the second is incomplete, and lose the folder of rank 1.

    Rank 2 has a file of each step that another group has written.
    """
    layout = Layout(size, size)
    folder = StageCheckpoints(root / str(rank), "job", max_file_bytes=1 << 21)
    checkpoint, alike = Checkpoint(10, 7), root / f"{rank}.alike"
    write_stage(folder.path(checkpoint, rank), rank)
    share_copies(folder, layout, checkpoint)
    kept = sorted(folder.held())
    if rank == 0:
        folder.path(Checkpoint(20, 7), 0).write_bytes(b"alone")
        folder.path(Checkpoint(20, 7), 1).write_bytes(b"alone")
    if rank == 1:
        folder.keep(None, ())
    if rank == 2:
        folder.path(Checkpoint(20, 8), 2).write_bytes(b"of another group")
    found = recover(folder, layout)
    contents = []
    for _, stage in sorted(folder.held()):
        write_stage(alike, stage)
        contents.append(folder.path(checkpoint, stage).read_bytes() == alike.read_bytes())
    return {"kept": kept, "found": found, "held": sorted(folder.held()), "contents": contents}


def test_a_worker_that_has_lost_its_files_gets_them_back(tmp_path: Path) -> None:
    results = ranks.run(partial(lose_and_recover, tmp_path), 3, tmp_path)
    name = [10, 7]
    expected = [[[name, 0], [name, 2]], [[name, 0], [name, 1]], [[name, 1], [name, 2]]]
    assert [result["kept"] for result in results] == expected
    assert [result["held"] for result in results] == expected
    assert [(result["found"], result["contents"]) for result in results] == [(name, [True, True])] * 3


def values(name: str) -> torch.Tensor:
    entry = next(entry for entry in SCHEMA.entries if entry.name == name)
    generator = torch.Generator().manual_seed(len(name) + entry.size)
    return torch.randn(entry.shape, generator=generator).mul(10).to(getattr(torch, entry.dtype))


def put_together(folder: Path, rank: int, size: int) -> dict[str, Any]:
    """Assemble a model of which each rank has a part, on two of them; then, on rank 0, one that is not finite."""
    owners = {"a": 0, "mean": 0, "b": 1, "c": 2, "count": 2}
    mine = {name: values(name) for name, owner in owners.items() if owner == rank}
    made = None
    for target in (0, 1):
        made = assemble(folder / str(rank), SCHEMA, mine, owners, target=target) or made
    digest = agree_on_digest(made)
    everything = {name: values(name) for name in owners}
    everything["c"][-1, -1] = torch.inf
    alone = dict.fromkeys(owners, 0)
    error = ranks.error_of(lambda: assemble(folder / "bad", SCHEMA, everything, alone, target=0)) if rank == 0 else {}
    return {"digest": digest, "payload": made.payload_digest if made else "", **error}


def test_a_model_is_put_together_on_two_workers(tmp_path: Path) -> None:
    results = ranks.run(partial(put_together, tmp_path), 3, tmp_path)
    files = [(tmp_path / str(rank)).read_bytes() for rank in (0, 1)]
    vectors = [
        torch.cat([values(entry.name).to(dtype).reshape(-1) for entry, _ in SCHEMA.spans(role)]).numpy().tobytes()
        for role, dtype in (("parameter", torch.float32), ("buffer", torch.float64))
    ]
    model, payload = Digest(), Digest()
    for vector in vectors:
        model.update(vector)
    payload.update(files[0])
    assert files[0] == files[1]
    assert (files[0][16 : 16 + len(vectors[0])], files[0][-len(vectors[1]) :]) == (vectors[0], vectors[1])
    assert {result["digest"] for result in results} == {model.name}
    assert [result["payload"] for result in results] == [payload.name, payload.name, ""]
    assert "A value of c is not finite" in results[0]["text"]
