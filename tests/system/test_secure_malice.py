"""Clients of secure aggregation before a malicious server: they refuse each lie, and go on with the next round."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedring.client.policy.identity import load_signer
from fedring.rpc.identity import Role
from fedring.rpc.tls import PLAINTEXT
from fedring.secure.keys import own_seed
from fedring.v1 import federation_pb2 as pb
from fedring.v1 import secure_pb2 as wire
from tests.honest_clients import LEVELS, HonestClient, levels_of
from tests.pki import Pki
from tests.secure_server import SecureServer
from tests.secure_sums import (
    Client,
    names_of,
    peers_of,
    read_roster,
    roster_of,
    secret_of,
    survivors_of,
    total_of,
    unmask_of,
)

NAMES = names_of(4)
VICTIM = NAMES[-1]

Start = Callable[..., HonestClient]


@pytest.fixture
def server() -> Iterator[SecureServer]:
    """Yield a server that listens."""
    with SecureServer() as server:
        yield server


@pytest.fixture
def start(server: SecureServer, tmp_path: Path) -> Iterator[Start]:
    """Yield a function that starts a client, which is stopped in the end."""
    with ExitStack() as stack:
        yield lambda name, **settings: stack.enter_context(HonestClient(server.address, name, tmp_path, **settings))


@pytest.fixture
def clients(start: Start) -> dict[str, HonestClient]:
    """Return four clients, by name."""
    return {name: start(name) for name in NAMES}


def plain(server: SecureServer, round_: int, names: list[str]) -> Any:
    """Return the sum of what clients have learned, in levels."""
    return np.sum([levels_of(server.commands[round_].secure, name, round_) for name in names], axis=0)


def check_next_round(server: SecureServer, round_: int = 2, names: list[str] = NAMES) -> None:
    """Check that an honest round works, after whatever has happened."""
    assert np.array_equal(server.run_round(round_, names), plain(server, round_, names))


def test_an_honest_server_learns_the_exact_sum(server: SecureServer, clients: dict[str, HonestClient]) -> None:
    for round_ in (1, 2):
        check_next_round(server, round_)
    assert server.failures == {}
    assert np.abs(server.total(1)).max() > LEVELS  # it is a sum
    for name in NAMES:
        assert not np.array_equal(server.words(1, name) & 63, levels_of(server.commands[1].secure, name, 1) & 63)


def test_clients_that_are_lost_on_the_way_do_not_change_the_sum(server: SecureServer, start: Start) -> None:
    names = names_of(5)
    clients = {name: start(name) for name in names}
    clients[names[4]].may_submit.clear()
    server.begin(1, names)
    server.share(1)
    for name in names:
        server.step(name, 1, peers=peers_of(server.of(server.shares, 1), name))
    server.await_all(server.payloads, 1, names[:4])
    server.name_survivors(1)
    server.unmask(1)
    assert np.array_equal(server.total(1), plain(server, 1, names[:4]))
    server.end(names[4], 1, "deadline")
    clients[names[4]].may_submit.set()
    check_next_round(server, 2, names)
    assert clients[names[4]].over == {1: "deadline"}


@pytest.mark.parametrize("step", ["keys", "shares", "payloads", "signatures", "answers"])
def test_a_client_that_is_started_again_says_the_same_bytes(
    server: SecureServer, clients: dict[str, HonestClient], tmp_path: Path, step: str
) -> None:
    steps: list[tuple[str, Callable[[], object]]] = [
        ("keys", lambda: server.begin(1, NAMES)),
        ("shares", lambda: server.share(1)),
        ("payloads", lambda: server.pair(1)),
        ("signatures", lambda: server.name_survivors(1)),
        ("answers", lambda: server.unmask(1)),
    ]
    for name, take in steps:
        take()
        if name != step:
            continue
        clients[VICTIM].__exit__(None, None, None)
        server.gone(VICTIM)
        clients[VICTIM].__enter__()
        server.until(lambda: VICTIM in server.matched)
        if name in ("keys", "shares"):  # as a server does for clients whose update it waits for
            server.train(VICTIM, server.commands[1])
        if name != "keys":
            server.step(VICTIM, 1, roster=server.roster(1))
        if name in ("signatures", "answers"):
            server.step(VICTIM, 1, survivors=survivors_of(NAMES))
        if name == "answers":
            server.step(VICTIM, 1, unmask=unmask_of(server.of(server.signatures, 1)))
    called = {"signatures": "SignSurvivors", "answers": "SendUnmaskShares", "keys": "SendKeys"}
    server.until(lambda: server.said_twice[called.get(step, "SendShares")])
    assert np.array_equal(server.total(1), plain(server, 1, NAMES))
    assert server.failures == {}


def test_an_answer_that_is_lost_is_asked_for_again(server: SecureServer, clients: dict[str, HonestClient]) -> None:
    calls = {"SendKeys", "SendShares", "SignSurvivors", "SendUnmaskShares"}
    server.lost_answers |= calls
    check_next_round(server, 1)
    server.until(lambda: calls <= server.said_twice.keys())
    assert server.failures == {}


def test_two_sets_of_survivors_do_not_give_both_kinds_of_shares_of_a_client(
    server: SecureServer, clients: dict[str, HonestClient]
) -> None:
    server.run_round(1, NAMES)
    others = NAMES[:-1]
    for name in others:
        server.step(name, 1, survivors=survivors_of(others))
        assert server.failure(1, name) == "other_survivors"
    for name in others:  # now it tries the other kind of shares with the signatures that it has
        server.step(name, 1, unmask=unmask_of({each: server.signatures[1, each] for each in others}))
    check_next_round(server)
    # With all that it was told, the server has the seed of the victim's own mask. The other masks stay on its update.
    group = read_roster(server.roster(1), server.commands[1])
    seed = own_seed(secret_of(group, 3, server.of(server.answers, 1)), group.digest, VICTIM)
    tried = total_of([server.words(1, VICTIM)], [(seed, 1)], server.bits(1))
    assert not np.array_equal(tried, levels_of(server.commands[1].secure, VICTIM, 1))


def test_different_survivors_for_different_clients_unmask_nobody(
    server: SecureServer, clients: dict[str, HonestClient]
) -> None:
    server.begin(1, NAMES)
    server.share(1)
    server.pair(1)
    sets = {name: NAMES[:3] if name in NAMES[:2] else NAMES for name in NAMES}
    for name, survivors in sets.items():
        server.step(name, 1, survivors=survivors_of(survivors))
    server.await_all(server.signatures, 1, NAMES)
    for name in NAMES:
        server.step(name, 1, unmask=unmask_of(server.of(server.signatures, 1)))
    reasons = {name: server.failure(1, name) for name in NAMES}
    assert set(reasons.values()) == {"bad_peer_signature", "bad_survivors"}
    assert server.answers == {}
    check_next_round(server)


def stranger(tmp_path: Path, command: pb.TrainCmd, name: str = "c9") -> wire.SecureKeys:
    """Return the keys of a client that the server has made up."""
    (tmp_path / "minted").mkdir(exist_ok=True)
    return Client(name, tmp_path / "minted").party(command).keys()


def swapped(server: SecureServer) -> wire.SecureRoster:
    """Return the group, with a masking key of the server's in the place of one of a client's."""
    roster = server.roster(1)
    statement = wire.KeyStatement.FromString(roster.members[2].statement)
    statement.masking_key = bytes(range(32))
    roster.members[2].statement = statement.SerializeToString(deterministic=True)
    return roster


def without(server: SecureServer, *names: str) -> wire.SecureRoster:
    return roster_of({name: keys for name, keys in server.of(server.keys, 1).items() if name not in names})


ROSTERS: dict[str, tuple[str, Callable[[SecureServer, str], wire.SecureRoster]]] = {
    "a swapped key": ("bad_peer_signature", lambda server, name: swapped(server)),
    "without the client": ("bad_roster", lambda server, name: without(server, name)),
    "too small": ("too_few_peers", lambda server, name: without(server, *[n for n in NAMES if n != name][1:])),
    "large": ("too_large", lambda server, name: wire.SecureRoster(members=[wire.SignedKeys(statement=bytes(3 << 20))])),
}


@pytest.mark.parametrize("lie", ROSTERS)
def test_a_group_that_lies_is_refused_by_every_client(
    server: SecureServer, clients: dict[str, HonestClient], lie: str
) -> None:
    server.begin(1, NAMES)
    reason, roster = ROSTERS[lie]
    for name in NAMES:
        server.step(name, 1, roster=roster(server, name))
        assert server.failure(1, name) == reason
    assert server.shares == {}
    check_next_round(server)


def test_different_groups_for_different_clients_open_no_share(
    server: SecureServer, clients: dict[str, HonestClient]
) -> None:
    server.begin(1, NAMES)
    for name in NAMES:
        server.step(name, 1, roster=server.roster(1) if name != VICTIM else without(server, NAMES[0]))
    server.await_all(server.shares, 1, NAMES)
    shares = {name: server.shares[1, name] for name in NAMES[1:]}
    for name in NAMES[1:]:
        server.step(name, 1, peers=peers_of(shares, name))
        assert server.failure(1, name) == "bad_share"
    server.step(NAMES[0], 1, roster=without(server, NAMES[1]))
    assert server.failure(1, NAMES[0]) == "other_roster"
    assert server.payloads == {}
    check_next_round(server)


def test_two_models_in_one_round_are_refused(server: SecureServer, clients: dict[str, HonestClient]) -> None:
    server.begin(1, NAMES[:3])
    server.train(VICTIM, server.command(1, lr=0.5))  # another task for one of them
    server.await_all(server.keys, 1, NAMES)
    for name in NAMES[:3]:
        server.step(name, 1, roster=server.roster(1))
        assert server.failure(1, name) == "other_task"
    server.train(VICTIM, server.commands[1])  # both tasks for the same client
    assert server.failure(1, VICTIM) == "other_task"
    check_next_round(server)


def test_a_round_is_not_played_twice(server: SecureServer, clients: dict[str, HonestClient]) -> None:
    server.run_round(2, NAMES)
    for name in NAMES:
        server.end(name, 2)
    for name in NAMES:
        server.train(name, server.commands[2])
        assert server.failure(2, name) == "replayed_round"
        server.train(name, server.command(1))
        assert server.failure(1, name) == "replayed_round"
        server.step(name, 2, roster=server.roster(2))
    assert {round_ for round_, _ in server.keys} == {2}
    check_next_round(server, 3)


@pytest.mark.parametrize(
    ("reason", "peers"),
    [
        ("too_few_peers", lambda honest: wire.SecurePeers(shares=honest.shares[:1])),
        ("bad_share", lambda honest: _changed(honest, lambda sealed: sealed[:-1] + bytes([sealed[-1] ^ 1]))),
        ("bad_share", lambda honest: _changed(honest, lambda sealed: sealed[:-1])),
        ("bad_share", lambda honest: _changed(honest, lambda sealed: sealed * 1000)),
    ],
    ids=["below the threshold", "forged", "truncated", "long"],
)
def test_peers_that_cannot_be_are_refused_by_every_client(
    server: SecureServer,
    clients: dict[str, HonestClient],
    reason: str,
    peers: Callable[[wire.SecurePeers], wire.SecurePeers],
) -> None:
    server.begin(1, NAMES)
    server.share(1)
    for name in NAMES:
        server.step(name, 1, peers=peers(peers_of(server.of(server.shares, 1), name)))
        assert server.failure(1, name) == reason
    assert server.payloads == {}
    check_next_round(server)


def _changed(peers: wire.SecurePeers, change: Callable[[bytes], bytes]) -> wire.SecurePeers:
    peers.shares[0].sealed = change(peers.shares[0].sealed)
    return peers


def test_survivors_and_signatures_that_are_too_few_unmask_nobody(
    server: SecureServer, clients: dict[str, HonestClient]
) -> None:
    server.begin(1, NAMES)
    server.share(1)
    server.pair(1)
    server.step(NAMES[0], 1, survivors=survivors_of(NAMES[:2]))
    assert server.failure(1, NAMES[0]) == "bad_survivors"
    server.step(NAMES[1], 1, survivors=survivors_of([*NAMES[:1], *NAMES[2:]]))
    assert server.failure(1, NAMES[1]) == "bad_survivors"
    for name in NAMES[2:]:
        server.step(name, 1, survivors=survivors_of(NAMES))
    server.await_all(server.signatures, 1, NAMES[2:])
    signed = server.of(server.signatures, 1)
    for name in NAMES[2:]:
        server.step(name, 1, unmask=unmask_of(signed))
        assert server.failure(1, name) == "too_few_signatures"
    assert server.answers == {}
    check_next_round(server)


def test_a_client_of_the_servers_making_is_refused_where_peers_are_pinned(
    server: SecureServer, start: Start, tmp_path: Path
) -> None:
    pins = {}
    for name in NAMES:
        (tmp_path / name).mkdir()
        pins[name] = load_signer(PLAINTEXT, tmp_path / name).fingerprint
    for name in NAMES:
        start(name, privacy={"peers": pins})
    server.begin(1, NAMES)
    minted = roster_of(server.of(server.keys, 1) | {"c9": stranger(tmp_path, server.commands[1])})
    taken = roster_of(server.of(server.keys, 1) | {VICTIM: stranger(tmp_path, server.commands[1], VICTIM)})
    for name in NAMES[:3]:
        server.step(name, 1, roster=taken if name == NAMES[0] else minted)
        assert server.failure(1, name) == "unknown_peer"
    assert server.shares == {}
    check_next_round(server)


def test_a_client_of_another_authority_is_refused(tmp_path: Path) -> None:
    pki, other = Pki(tmp_path / "pki"), Pki(tmp_path / "other")
    pki.issue(*NAMES)
    pki.issue("c9", role=Role.OPERATOR)
    other.issue("c9")
    with SecureServer(pki.tls("server")) as server, ExitStack() as stack:
        for name in NAMES:
            stack.enter_context(HonestClient(server.address, name, tmp_path, tls=pki.table(name)))
        for round_, liar in enumerate((other.tls("c9"), pki.tls("c9"), PLAINTEXT), 1):
            server.begin(round_, NAMES)
            minted = Client("c9", tmp_path, load_signer(liar, tmp_path)).party(server.commands[round_]).keys()
            for name in NAMES:
                server.step(name, round_, roster=roster_of(server.of(server.keys, round_) | {"c9": minted}))
                assert server.failure(round_, name) == "unknown_peer"
        assert server.shares == {}
        check_next_round(server, 4)
