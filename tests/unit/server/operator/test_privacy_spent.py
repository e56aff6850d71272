"""What is spent of the clients' privacy is computed once for each number of charges."""

from math import isnan
from pathlib import Path

import pytest
from tests.unit.host import Host

from fedring.privacy.account import NoAccountant
from fedring.server.operator import privacy_spent
from fedring.server.operator.privacy_spent import PrivacySpent
from fedring.server.state.failures import Deposed
from fedring.server.state.rows import ChargeRow


class Spending:
    """A host whose store has as many charges as a test says."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host = Host(root)
        self.count = 0
        monkeypatch.setattr(
            self.host.store.rounds,
            "charges",
            lambda: [ChargeRow(n, 1, 5.0, 0.1, 0.0) for n in range(1, self.count + 1)],
        )
        self.spent = PrivacySpent(self.host.facts, self.host.rounds, self.host.parts.metrics.epsilon)

    @property
    def gauge(self) -> float:
        value = self.host.parts.metrics.registry.get_sample_value("fl_server_privacy_epsilon")
        assert value is not None
        return value


@pytest.fixture
def spending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spending:
    return Spending(tmp_path, monkeypatch)


async def test_epsilon_follows_the_charges(spending: Spending) -> None:
    await spending.spent.refresh()
    assert spending.spent.now is None
    assert isnan(spending.gauge)
    spending.count = 50
    await spending.spent.refresh()
    assert spending.spent.now is not None
    assert spending.spent.now.epsilon == spending.gauge == pytest.approx(7.08, rel=0.01)
    assert spending.spent.now.delta == 1e-5
    spending.count = 51
    await spending.spent.refresh()
    assert spending.gauge > 7.09


async def test_the_same_charges_are_not_computed_again(spending: Spending, monkeypatch: pytest.MonkeyPatch) -> None:
    spending.count = 3
    await spending.spent.refresh()
    monkeypatch.setattr(privacy_spent, "privacy_message", None)
    await spending.spent.refresh()
    assert spending.spent.now is not None


async def test_without_the_accountant_nothing_is_shown(spending: Spending, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise NoAccountant("install it")

    monkeypatch.setattr(privacy_spent, "privacy_message", missing)
    spending.count = 2
    await spending.spent.refresh()
    assert spending.spent.now is None
    assert isnan(spending.gauge)


async def test_a_server_that_leads_no_more_has_no_fault_to_tell(
    spending: Spending, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def deposed() -> None:
        raise Deposed("another server leads")

    monkeypatch.setattr(spending.host.store.rounds, "charges", deposed)
    with pytest.raises(Deposed):
        await spending.spent.run()
    assert not caplog.records
