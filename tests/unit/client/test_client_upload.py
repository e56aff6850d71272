"""Uploads, and what they leave on disk: broken streams, refusals, and kills between any two steps."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.kept import kept_residual
from tests.left_updates import SECONDS, leave_behind, take_part, train
from torch import nn

from fedring.client import RoundOver, UpdateRefused, connect
from fedring.client.transfer.spool import Spool
from fedring.codec import decode
from fedring.codec.digest import name_of
from fedring.rpc.errors import (
    BadUpdate,
    FedringError,
    NoSession,
    Overloaded,
    TooLarge,
    Unavailable,
    UnknownRound,
)
from fedring.train.tensors.state import read_vectors, schema_of
from fedring.v1 import federation_pb2 as pb

if TYPE_CHECKING:
    from tests.scripted_server import ScriptedServer


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(50, 40)


def once(error: FedringError) -> Any:
    """Return a function that returns `error` the first time and None afterwards."""
    errors = [error]
    return lambda *args: errors.pop() if errors else None


def test_a_broken_upload_resumes_after_the_bytes_that_the_server_has(
    server: "ScriptedServer", settings: dict[str, Any]
) -> None:
    model = nn.Linear(1000, 600)  # 2.4 MB: three chunks
    breaks = [Unavailable("the cable")]
    server.on_bytes = lambda received: breaks.pop() if breaks and received > 1 << 20 else None
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        take_part(server, federation, model)
    assert server.resumed == [0, 2 << 20]
    assert server.accepted.qsize() == 1


def test_after_a_lost_acceptance_the_client_asks_and_does_not_send_the_update_again(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module
) -> None:
    server.on_accepted = once(Unavailable("the answer was lost"))
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        take_part(server, federation, model)
    assert server.accepted.qsize() == 1
    assert server.resumed == []


def test_small_updates_share_one_call_until_one_of_them_is_refused(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module
) -> None:
    calls = []
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        for round_, error in enumerate((None, None, UnknownRound("it is over"), None, None), start=1):
            if error:
                server.on_header = once(error)
            with nullcontext() if error is None else pytest.raises(RoundOver, match="unknown_round"):
                take_part(server, federation, model, round_)
            calls.append(server.small_calls)
    assert calls == [1, 1, 1, 2, 2]
    assert [server.accepted.get(timeout=SECONDS)[0].round for _ in range(4)] == [1, 2, 4, 5]


def test_small_updates_of_a_new_session_use_a_new_call(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module
) -> None:
    with connect(**settings) as federation:
        for round_ in (1, 2):
            server.joins.get(timeout=SECONDS)
            take_part(server, federation, model, round_)
            server.send(NoSession("join again"))
    assert (server.small_calls, server.resumed) == (2, [])


@pytest.mark.parametrize("error", [NoSession("who?"), Overloaded("later"), Unavailable("gone")])
def test_an_update_is_sent_again_after_a_temporary_refusal(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module, error: FedringError
) -> None:
    server.on_header = once(error)
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        take_part(server, federation, model)
    assert server.accepted.qsize() == 1


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BadUpdate("no", reason="wrong_schema"), UpdateRefused),
        (TooLarge("no"), UpdateRefused),
        (UnknownRound("no", reason="round_closed"), RoundOver),
        (BadUpdate("another round has the number", reason="wrong_model"), RoundOver),  # the server was reverted
    ],
)
def test_a_final_refusal_leaves_the_residual_unchanged(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module, error: FedringError, kind: type[RoundOver]
) -> None:
    state = Path(settings["state_dir"])
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        server.train(server.command(model, round_=1, encoding="fp32_sparse"))
        task = next(federation)
        train(task, model, 1)
        task.submit(model, samples=1)
        before = kept_residual(state)
        assert before is not None

        server.on_header = once(error)
        server.train(server.command(model, round_=2, encoding="fp32_sparse"))
        task = next(federation)
        train(task, model, 2)
        with pytest.raises(kind, match=error.reason):
            task.submit(model, samples=1)
        np.testing.assert_array_equal(kept_residual(state), before)
        assert Spool(Path(settings["state_dir"]), "alice").pending() is None
        task.fail("last", "a failure that is reported after all others")
        failures = iter(lambda: server.failures.get(timeout=SECONDS).reason, "last")
        assert list(failures) == ([error.reason] if kind is UpdateRefused else [])


def test_no_part_of_any_accepted_update_is_lost(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module
) -> None:
    """What was sent plus the residual is what was learned, over rounds with all encodings, refusals and restarts."""
    learned = np.zeros(50 * 40 + 40, np.float32)
    sent = np.zeros_like(learned)
    for round_, encoding in enumerate(["packed", "fp32_sparse", "sq8", "packed"], start=1):
        with connect(**settings) as federation:
            server.joins.get(timeout=SECONDS)
            server.train(server.command(model, round_=round_, encoding=encoding))
            task = next(federation)
            move = train(task, model, round_)
            if round_ == 3:
                server.on_header = once(BadUpdate("not this one"))
                with pytest.raises(UpdateRefused):
                    task.submit(model, samples=1)
                continue
            task.submit(model, samples=1)
        learned += move
        header, payload = server.accepted.get_nowait()
        sent += decode(payload, name=header.packets[0].encoding, length=learned.size)
    residual = kept_residual(Path(settings["state_dir"]))
    assert residual is not None
    np.testing.assert_allclose(sent + residual, learned, atol=1e-5)
    assert np.abs(residual).max() > 0.1


@pytest.mark.parametrize("epochs", [(0, 0), (7, 7), (7, 8)])
@pytest.mark.parametrize("newer", [True, False])
def test_a_residual_is_sent_once_even_if_the_server_was_restored(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module, newer: bool, epochs: tuple[int, int]
) -> None:
    """Either the client was killed before it noted its last update, or its server was restored."""
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        first = take_part(server, federation, model, round_=3, encoding="fp32_sparse", epoch=epochs[0])
    header, payload = server.accepted.get_nowait()
    left_out = first - decode(payload, name="fp32_sparse", length=first.size)
    assert server.last_accepted == pb.LastAccepted(epoch=epochs[0], round=3, name=server.offers.get_nowait().name)
    other = pb.LastAccepted(epoch=epochs[1], round=4, name=name_of(b"another"))
    server.last_accepted = other if newer else pb.LastAccepted(epoch=epochs[0], round=2, name=other.name)
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        second = take_part(server, federation, model, round_=5, epoch=epochs[1])
    header, payload = server.accepted.get_nowait()
    assert (header.epoch, header.round) == (epochs[1], 5)
    sent = decode(payload, name="fp32", length=second.size)
    np.testing.assert_allclose(sent, second if newer else second + left_out, atol=1e-5)
    assert np.abs(left_out).max() > 0.1


def test_a_dense_update_takes_the_whole_residual_along(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module
) -> None:
    moves = []
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        for round_, encoding in ((1, "fp32_sparse"), (2, "fp32")):
            moves.append(take_part(server, federation, model, round_, encoding))
    first, second = (
        decode(payload, name=header.packets[0].encoding, length=moves[0].size)
        for header, payload in (server.accepted.get_nowait(), server.accepted.get_nowait())
    )
    np.testing.assert_allclose(first + second, moves[0] + moves[1], atol=1e-5)
    assert kept_residual(Path(settings["state_dir"])) is None


def test_an_update_that_is_not_finite_is_not_sent(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module
) -> None:
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        server.train(server.command(model))
        task = next(federation)
        task.load_into(model)
        with torch.no_grad():
            next(model.parameters()).fill_(float("nan"))
        with pytest.raises(UpdateRefused, match="non_finite"):
            task.submit(model, samples=1)
        assert server.failures.get(timeout=SECONDS).reason == "non_finite"


def test_a_spooled_update_is_sent_when_its_round_is_asked_for_again(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module
) -> None:
    state = leave_behind(server, settings, model, accepted=False)
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        server.train(server.command(model, round_=1, encoding="fp32_sparse"))
        with ThreadPoolExecutor(1) as executor:
            task = executor.submit(next, federation)
            assert server.accepted.get(timeout=SECONDS)[0].round == 1
            server.train(server.command(model, round_=2, encoding="fp32_sparse"))
            assert task.result(SECONDS).round == 2
    assert kept_residual(state) is not None
    assert Spool(state, "alice").pending() is None


def test_a_round_of_a_restored_server_is_trained_again_from_its_model(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module
) -> None:
    state = leave_behind(server, settings, model, accepted=False)
    other = nn.Linear(50, 40)
    server.publish(1, schema_of(other), read_vectors(other))
    server.on_header = once(BadUpdate("from another model", reason="wrong_model"))
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        take_part(server, federation, model, round_=1)
        assert server.accepted.get_nowait()[0].base_digest == read_vectors(other).digest()
    assert Spool(state, "alice").pending() is None


def test_a_spooled_update_of_a_round_that_is_over_is_dropped(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    state = leave_behind(server, settings, model, accepted=False)
    server.on_header = once(UnknownRound("round 1 is not open"))
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        server.train(server.command(model, round_=2))
        assert next(federation).round == 2
    assert "dropped the spooled update of round 1" in caplog.text
    assert Spool(state, "alice").pending() is None
    assert not (state / "update.left").exists()


def test_an_update_whose_acceptance_was_not_heard_counts_as_accepted(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module
) -> None:
    state = leave_behind(server, settings, model, accepted=True)
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        server.train(server.command(model, round_=2))
        assert next(federation).round == 2
    assert kept_residual(state) is not None
    assert server.accepted.qsize() == 1
