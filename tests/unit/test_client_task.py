"""What a task makes of its command."""

from fedring.client.task import own_seed


def test_each_client_draws_for_itself_and_the_same_again() -> None:
    assert own_seed(1, "a") == own_seed(1, "a")
    assert len({own_seed(seed, client) for seed in (1, 2) for client in ("a", "b")}) == 4
    assert 0 <= own_seed(2**63, "a") < 2**63
