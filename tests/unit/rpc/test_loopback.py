"""Which addresses count as this host's own, where plaintext and tokens are allowed."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from fedring.client.config import ClientConfig
from fedring.rpc.channel import is_loopback


@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "127.1:1", "127.255.0.9:1", "localhost:1", "[::1]:1", "unix:/run/fl.sock"]
)
def test_addresses_of_this_host_are_loopback(address: str) -> None:
    assert is_loopback(address)


@pytest.mark.parametrize("address", ["127.example.org:1", "127.0.0.1.example.org:1", "127.:1", "10.0.0.1:1", "[::]:1"])
def test_a_name_is_no_loopback_address_however_it_begins(address: str, tmp_path: Path) -> None:
    assert not is_loopback(address)
    with pytest.raises(ValidationError, match="a token must not travel in plaintext"):
        ClientConfig.model_validate({"server": address, "token_file": tmp_path / "token"})
