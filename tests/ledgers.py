"""The account of a client as its file has it."""

import json
from pathlib import Path
from typing import Any

from fedring.client.policy.ledger import LEDGER
from fedring.daemon.durable import text_after_digest


def account_in(folder: Path) -> dict[str, Any]:
    """Return the account in a state folder."""
    known: dict[str, Any] = json.loads(text_after_digest((folder / LEDGER).read_bytes()))
    return known
