"""Clients' own models in real daemons: how good they are is told, they are continued, and they are never sent."""

from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.numpy import load_file

from tests.fleets import Control, Fleet, until_watching
from tests.kept import kept_file, sections_in

JOB: dict[str, Any] = {
    "rounds": 3,
    "min_clients": 2,
    "partition": "shards",
    "encoding": "fp32",
    "personal": {"mu": 0.1, "epochs": 2},
    "start": "newest",
}


def test_a_clients_own_model_is_better_on_its_data_is_continued_and_is_never_sent(tmp_path: Path) -> None:
    with Fleet(tmp_path, {}, [{}] * 2) as fleet:
        state = Path(fleet.server.settings["state_dir"])
        folders = [Path(client.settings["state_dir"]) for client in fleet.clients]
        job_id = 0
        paths: list[Path] = []
        updates: list[list[str]] = []
        for _ in range(2):
            with Control(fleet.control) as control:
                until_watching(control, 2)
                job_id = control.start_job(JOB).job_id
                list(control.follow_job(job_id))
                assert control.job(job_id).state == "completed"
            paths = [path for path in map(kept_file, folders) if path is not None]
            updates.append([_update_of(path) for path in paths])
            for index in range(2):
                fleet.restart(index)
        assert not set(updates[0]) & set(updates[1])
        with Control(fleet.control) as control:
            for round_ in control.rounds(job_id=job_id):
                accuracy = round_.eval_correct / round_.eval_total
                assert round_.metrics["eval/accuracy_personal"] > accuracy + 0.02
        sent = b"".join(path.read_bytes() for path in state.rglob("*") if path.is_file())
        bases = [load_file(path) for path in (state / "blobs").rglob("*") if path.is_file() and _is_model(path)]
        assert len(bases) >= 3
        for path in paths:
            for name, values in sections_in(path)["personal"].tensors.items():
                assert values.numpy().tobytes()[:64] not in sent
                assert all((values.numpy() - base[name]).tobytes()[:64] not in sent for base in bases)
        assert all(base["1.weight"].tobytes()[:64] in sent for base in bases)  # what is there would have been found


def _update_of(path: Path) -> str:
    with safe_open(path, framework="numpy") as file:
        return str(file.metadata()["update"])


def _is_model(path: Path) -> bool:
    return b'"schema_hash"' in path.read_bytes()[:10_000]
