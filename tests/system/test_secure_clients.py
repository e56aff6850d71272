"""Clients of secure aggregation with an honest server: what they send, keep and never send again."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedring.client.policy.secret import DITHER, kept_secret
from fedring.client.secure.state import FOLDER
from fedring.secure.levels import blocks_of, shorten, to_integers
from fedring.v1 import federation_pb2 as pb
from fedring.v1 import secure_pb2 as wire
from tests.honest_clients import BLOCK, LEVELS, STEP, HonestClient, learned
from tests.secure_server import SecureServer
from tests.secure_sums import names_of, peers_of
from tests.waiting import until

NAMES = names_of(3)
SIZE = 42


@pytest.fixture
def server() -> Iterator[SecureServer]:
    """Yield a server that listens."""
    with SecureServer() as server:
        yield server


@pytest.fixture
def clients(server: SecureServer, tmp_path: Path) -> Iterator[dict[str, HonestClient]]:
    """Yield three clients, by name."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(HonestClient(server.address, name, tmp_path)) for name in NAMES}


def round_of(blocks: list[int] | None = None, **fields: Any) -> wire.SecureRound:
    """Return a round that sends these blocks; None = all."""
    count = blocks_of(SIZE, BLOCK)
    bitmap = bytes([sum(1 << block for block in blocks)]) if blocks is not None else b""
    scales = np.full(count if blocks is None else len(blocks), STEP, "<f4").tobytes()
    return wire.SecureRound(scales=scales, blocks=bitmap, block=BLOCK, levels=LEVELS, **fields)


def test_what_is_left_out_of_one_round_is_sent_in_the_next(
    server: SecureServer, clients: dict[str, HonestClient]
) -> None:
    first = server.run_round(1, NAMES, secure=round_of([0]))
    one, two = (np.sum([learned(name, round_) for name in NAMES], axis=0) / STEP for round_ in (1, 2))
    assert np.array_equal(first, one[:BLOCK])
    second = server.run_round(2, NAMES, secure=round_of([1, 2]))
    sent = [np.clip((learned(name, 1) + learned(name, 2)) / STEP, -LEVELS, LEVELS) for name in NAMES]
    assert np.array_equal(second, np.sum(sent, axis=0)[BLOCK:])
    assert not np.array_equal(second, two[BLOCK:])


def test_training_begins_with_what_was_left_out_if_the_round_leaves_blocks_out(
    server: SecureServer, clients: dict[str, HonestClient]
) -> None:
    for round_, blocks in ((1, [0]), (2, [1]), (3, None)):
        server.run_round(round_, NAMES, secure=round_of(blocks))
    for name, client in clients.items():
        left_out = learned(name, 1)
        left_out[:BLOCK] = 0
        assert not client.starts[1].any()  # as the model
        assert np.array_equal(client.starts[2], left_out)
        assert not client.starts[3].any()


def test_updates_count_by_their_samples_up_to_the_largest_weight(
    server: SecureServer, clients: dict[str, HonestClient]
) -> None:
    for round_, most, weight in ((1, 4, 4), (2, 1000, 10)):  # each client trains on 10 samples
        total = server.run_round(round_, NAMES, secure=round_of(max_weight=most))
        wanted = weight * np.sum([learned(name, round_) for name in NAMES], axis=0) / STEP
        assert np.array_equal(total, [*wanted, 3 * weight])


def test_a_server_with_tiny_steps_learns_no_signs(server: SecureServer, clients: dict[str, HonestClient]) -> None:
    tiny = round_of(max_weight=1000)
    tiny.scales = np.full(blocks_of(SIZE, BLOCK), 1e-9, "<f4").tobytes()
    total = server.run_round(1, NAMES, secure=tiny)
    assert np.array_equal(total, [0] * SIZE + [30])  # zeros of the weight that each client always has
    total = server.run_round(2, NAMES, secure=round_of(max_weight=1000))
    kept = [learned(name, 1) + learned(name, 2) for name in NAMES]
    assert np.array_equal(total, [*(10 * np.sum(kept, axis=0) / STEP), 30])


def test_a_site_says_how_much_of_its_update_may_be_cut(server: SecureServer, tmp_path: Path) -> None:
    small = round_of()
    small.scales = np.full(blocks_of(SIZE, BLOCK), STEP / 2, "<f4").tobytes()  # values of 4 to 7 steps are cut
    limits = dict(zip(NAMES, (0.0, 0.9, 1.0), strict=True))
    with ExitStack() as stack:
        for name, limit in limits.items():
            stack.enter_context(HonestClient(server.address, name, tmp_path, privacy={"max_clipped_share": limit}))
        total = server.run_round(1, NAMES, secure=small)
        sent = [np.clip(learned(name, 1) / (STEP / 2), -LEVELS, LEVELS) for name in NAMES[1:]]
        assert np.array_equal(total, np.sum(sent, axis=0))


def test_a_long_update_is_shortened_before_it_is_masked(server: SecureServer, clients: dict[str, HonestClient]) -> None:
    total = server.run_round(1, NAMES, secure=round_of(clip=1.0))
    wanted = np.zeros(SIZE, np.int64)
    for name, client in clients.items():
        vector, dither = learned(name, 1), kept_secret(client.state_dir).derive(server.commands[1], DITHER)
        shorten(vector, 1.0)
        assert np.linalg.norm(vector) == pytest.approx(1.0)
        wanted += to_integers(vector, server.commands[1].secure, 1, dither=dither).integers
    assert total.tolist() == wanted.tolist()


def test_an_update_that_is_lost_after_its_masks_were_bound_ends_the_round(
    server: SecureServer, clients: dict[str, HonestClient]
) -> None:
    lost = clients[NAMES[0]]
    server.begin(1, NAMES)
    server.share(1)
    server.pair(1)
    lost.__exit__(None, None, None)
    server.gone(lost.name)
    (lost.state_dir / "update").unlink(missing_ok=True)
    server.payloads.pop((1, lost.name))
    lost.__enter__()
    server.until(lambda: lost.name in server.matched)
    server.train(lost.name, server.commands[1])
    assert server.failure(1, lost.name) == "lost_masked_update"
    server.failures.clear()  # as a server that was restarted
    server.train(lost.name, server.commands[1])
    assert server.failure(1, lost.name) == "lost_masked_update"
    assert (1, lost.name) not in server.payloads
    check_secrets_are_gone(lost, 1)
    assert server.run_round(2, NAMES) is not None


def test_an_update_that_was_spooled_is_sent_again_as_it_is(
    server: SecureServer, clients: dict[str, HonestClient]
) -> None:
    again = clients[NAMES[0]]
    server.begin(1, NAMES)
    server.share(1)
    server.refuse_updates.set()
    for name in NAMES:
        server.step(name, 1, peers=peers_of(server.of(server.shares, 1), name))
    server.until(lambda: again.name in server.offered)
    again.__exit__(None, None, None)
    server.gone(again.name)
    server.refuse_updates.clear()
    again.__enter__()
    server.until(lambda: again.name in server.matched)
    server.train(again.name, server.commands[1])
    server.await_all(server.payloads, 1, NAMES)
    server.name_survivors(1)
    server.unmask(1)
    assert np.array_equal(server.total(1), np.sum([learned(name, 1) for name in NAMES], axis=0) / STEP)
    assert len(server.offered[again.name]) == 1  # all offers name the same bytes


def test_secrets_are_gone_when_the_next_round_begins(server: SecureServer, clients: dict[str, HonestClient]) -> None:
    server.run_round(1, NAMES)
    server.run_round(2, NAMES)
    for client in clients.values():
        check_secrets_are_gone(client, 1)
        assert len(list((client.state_dir / FOLDER).glob("*-0-2.json"))) == 1


@pytest.mark.parametrize("end", ["the end of the round", "another round"])
def test_secrets_of_a_client_that_was_started_again_are_gone_with_the_round(
    server: SecureServer, clients: dict[str, HonestClient], end: str
) -> None:
    server.run_round(1, NAMES)
    again = clients[NAMES[0]]
    again.__exit__(None, None, None)
    server.gone(again.name)
    again.__enter__()
    server.until(lambda: again.name in server.matched)
    if end == "another round":
        server.train(again.name, server.command(2, secure=None, job=pb.JobSpec(mode="unknown")))
    else:
        server.end(again.name, 1)
    until(lambda: not list((again.state_dir / FOLDER).glob("*-0-1.json*")))


def check_secrets_are_gone(client: HonestClient, round_: int) -> None:
    """Check that no file holds anything of a round."""
    assert list((client.state_dir / FOLDER).glob(f"*-0-{round_}.json*")) == []
