"""Differential privacy of asynchronous rounds: what one update can move, and what a version costs."""

from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant
from tests.closed_rounds import FixedPast, closed_round
from tests.unit.host import ONES, running, spec

from fedring.privacy.account import epsilon
from fedring.server.aggregation.combining import Combination
from fedring.server.aggregation.modelfile import ModelReader
from fedring.server.model.transforms.listing import transforms_of
from fedring.server.state.checked import CheckedReader
from fedring.server.state.rows import ChargeRow, UpdateRow

NOISE: dict[str, Any] = {"clip": 0.5, "noise_multiplier": 2.0, "adaptive": False, "delta": 1e-3}
KEYS: dict[str, Any] = {"weights": "uniform", "min_clients": 2, "rounds": 3}
TABLE = {"concurrency": 2, "buffer": 2}


async def charges_of(folder: Path, **keys: Any) -> list[ChargeRow]:
    """Run a job of three versions with two clients, and return what it cost."""
    async with running(folder) as host:
        job, _ = await host.jobs.start(spec(dp=NOISE, **KEYS, **keys), "")
        sessions = [host.join(name) for name in "ab"]
        for _ in range(3):
            for session in sessions:
                await host.push(session, await host.command(session), ONES)
        assert await host.ended(job.job_id) == "completed"
        return await host.facts.db(host.store.rounds.charges)


async def test_a_version_costs_what_a_synchronous_round_with_the_same_noise_costs(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    late = await charges_of(tmp_path / "one", asynchronous=TABLE)
    plain = await charges_of(tmp_path / "other")
    assert [each.cost for each in late] == [each.cost for each in plain] == [2.0] * 3
    accountant = RdpAccountant().compose(dp_accounting.GaussianDpEvent(2.0), 3)
    assert epsilon([each.cost for each in late], 1e-3) == pytest.approx(accountant.get_epsilon(1e-3), rel=1e-9)


def test_the_noise_is_that_of_the_buffer_however_few_updates_there_are() -> None:
    job = spec(dp=NOISE, asynchronous=TABLE | {"concurrency": 8, "buffer": 4}, **KEYS | {"min_clients": 8})
    rows = [UpdateRow(1, name, "", "", (), 1, 1, 1.0, 9.0, 1.0, staleness=3) for name in "ab"]
    closed = closed_round(job, rows, past=FixedPast())
    steps = transforms_of(job).close(closed, None).steps
    how = Combination()
    for step in steps:
        how = step.combination(how)
    assert how.divisor == 4.0


async def test_one_update_moves_a_version_by_its_share_of_the_clip_also_if_it_is_old(tmp_path: Path) -> None:
    silent = NOISE | {"noise_multiplier": 1e-9}
    async with running(tmp_path) as host:
        await host.jobs.start(spec(dp=silent, asynchronous=TABLE | {"concurrency": 3}, **KEYS | {"min_clients": 3}), "")
        sessions = {name: host.join(name) for name in ("a", "b", "slow")}
        told = {name: await host.command(session) for name, session in sessions.items()}
        for name in ("a", "b"):
            await host.push(sessions[name], told[name], 0 * ONES)
        second = await host.command(sessions["a"])
        await host.push(sessions["slow"], told["slow"], 1e6 * ONES)
        await host.push(sessions["a"], second, 0 * ONES)
        third = await host.command(sessions["a"])
        before, after = [await host.facts.db(host.store.models.get, each.model_version) for each in (second, third)]

        def values(row: Any) -> Any:
            with host.blobs.reader(row.blob) as blob:
                return ModelReader(CheckedReader(blob.read, blob.size, row.blob)).vectors().parameters

        moved = float(np.linalg.norm(values(after).astype(np.float64) - values(before)))
        assert moved == pytest.approx(0.5 / 2 / np.sqrt(2), rel=1e-4)
