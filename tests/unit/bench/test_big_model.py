"""The benchmark of a large model: its bare server, and its smallest run."""

from pathlib import Path

import numpy as np
import pytest
from tests.bench import big_model
from tests.bench.lab import bare

from fedring.rpc.chunks import CHUNK_BYTES


def test_a_bare_server_makes_the_next_model_of_the_mean(tmp_path: Path) -> None:
    size = CHUNK_BYTES + 4 * 10  # the last message is a short one
    found = bare.bare_rounds(2, size, 1, tmp_path, mean=True)
    assert len(found.round_seconds) == 1
    # Two rounds, one of them not counted; each client sends ones.
    assert (tmp_path / "model").read_bytes() == np.full(size // 4, 2, np.float32).tobytes()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_bare_server_without_the_mean_keeps_its_model(tmp_path: Path) -> None:
    bare.bare_rounds(1, 400, 1, tmp_path, mean=False)
    assert (tmp_path / "model").read_bytes() == bytes(400)


def test_fedring_takes_turns_with_the_bare_servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    ways: list[object] = []

    def fleet(clients: int, size: int, rounds: int) -> dict[str, object]:
        ways.append((clients, size, rounds))
        return {"server_cpu_seconds_per_round": 3.0}

    def server(clients: int, size: int, rounds: int, folder: Path, *, mean: bool) -> bare.BareRounds:
        ways.append(mean)
        return bare.BareRounds([1.0], 2.0 if mean else 1.5, 1)

    monkeypatch.setattr(big_model, "_measure", fleet)
    monkeypatch.setattr(big_model, "bare_rounds", server)
    found = big_model._beside_bare(2, 100, 4, turns=2)
    assert ways == [(2, 100, 4), False, True] * 2
    assert (found["by_bare"], found["by_bare_with_mean"]) == (2.0, 1.5)
    assert len(found["memory_copy"]) == 2
