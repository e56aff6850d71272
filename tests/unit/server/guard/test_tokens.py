"""Tokens: one that was revoked is refused from the commit on, whatever goes wrong behind it."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from tests.store_implementations import IMPLEMENTATIONS, Implementation
from tests.unit.gate import Gate

from fedring.rpc.errors import NoSuchToken, Unauthenticated
from fedring.server.guard.tokens import Tokens
from fedring.server.state.blobs import FileBlobs
from fedring.server.state.facts import Facts
from fedring.server.state.failures import StorageFailed
from fedring.server.state.rows import KEEP_EVENTS, TokenRow


@pytest.fixture(params=IMPLEMENTATIONS)
def facts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Facts]:
    implementation: Implementation = request.param
    facts = Facts(implementation(tmp_path, KEEP_EVENTS), FileBlobs(tmp_path), threads=1)
    yield facts
    facts.close()


async def refused(tokens: Tokens, token: str) -> str:
    """Return the reason for which a token is refused."""
    with pytest.raises(Unauthenticated) as caught:
        await tokens.identify(token)
    return caught.value.reason


async def test_a_token_is_revoked_although_the_store_cannot_be_read_then(
    facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable() -> NoReturn:
        raise StorageFailed("disk_error", "it cannot be read")

    tokens = Tokens(facts)
    row, token = await tokens.create("client", "ann", 0)
    assert (await tokens.identify(token)).name == "ann"
    monkeypatch.setattr(facts.store.tokens, "all", unreadable)
    revoked = await tokens.revoke(row.token_id)
    assert (revoked.token_id, revoked.revoked_at is None) == (row.token_id, False)
    assert await refused(tokens, token) == "revoked_token"
    assert await tokens.revoke(row.token_id) == revoked


async def test_a_token_is_revoked_although_its_operator_goes_away(
    facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, revoke = Gate(), facts.store.tokens.revoke

    def slow(token_id: str, at: float) -> TokenRow | None:
        gate.pass_("revoke")
        return revoke(token_id, at)

    monkeypatch.setattr(facts.store.tokens, "revoke", slow)
    tokens = Tokens(facts)
    row, token = await tokens.create("operator", "eve", 0)
    gate.close("revoke")
    call = asyncio.create_task(tokens.revoke(row.token_id))
    await gate.reached()
    call.cancel()
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await refused(tokens, token) == "revoked_token"


async def test_a_list_that_was_read_before_brings_no_revoked_token_back(facts: Facts) -> None:
    tokens = Tokens(facts)
    row, token = await tokens.create("client", "ann", 0)
    for _ in range(20):
        await asyncio.gather(tokens.load(), tokens.revoke(row.token_id), tokens.load())
        assert await refused(tokens, token) == "revoked_token"


@pytest.mark.parametrize("name", ["", "nobody", "no\0body", "\ud800"])
async def test_a_token_that_nobody_has_cannot_be_revoked(facts: Facts, name: str) -> None:
    with pytest.raises(NoSuchToken, match="there is no token"):
        await Tokens(facts).revoke(name)
