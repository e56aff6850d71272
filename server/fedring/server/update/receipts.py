"""Receipts of updates, in a chained log (`fedring.daemon.chain`).

Each line has the head of the client's own log, and the client gets the head of this one with the acceptance. So neither
side can change its log without the other's showing it.
"""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedring.daemon.chain import Chain, DamagedChain
from fedring.daemon.config import ConfigError
from fedring.server.state.facts import Facts
from fedring.server.state.rows import UpdateRow

log = logging.getLogger(__name__)

FOLDER = "receipts"


class Receipts:
    """The chained log of a server.

    A line says that an update has come and was found good. It is written before the update is committed: the same
    update may have two lines, and one whose commit has failed has one. Other lines name the verbs of operators.

    Args:
        folder: Where it lies; None = there is none.
        run_id: Names the server's state.

    Raises:
        ConfigError: If it is damaged, or cannot be written.
    """

    def __init__(self, folder: Path | None, run_id: str) -> None:
        self._chain: Chain | None = None
        if folder is None:
            return
        try:
            self._chain = Chain(folder)
            self._chain.add({"what": "start", "side": "server", "run_id": run_id})
        except DamagedChain as error:
            text = f"the receipts of this server are damaged: {error}"
            raise ConfigError(f"{text}; keep {folder} as evidence in another place, and start again") from error
        except OSError as error:
            raise ConfigError(f"the receipts of this server cannot be written: {error}") from error

    def verb(self, who: str, verb: str, result: str) -> None:
        """Add a line of an operator's verb.

        A disk that fails is only logged.
        Operators do something so rarely that the caller may wait for the disk.

        Args:
            who: The operator, as text.
            verb: The verb of flctl.
            result: "ok", or why it has failed.
        """
        try:
            if self._chain is not None:
                self._chain.add({"what": "verb", "who": who, "verb": verb, "result": result})
        except OSError as error:
            log.error("the receipts lack a line (%s by %s): %s", verb, who, error)

    async def note(self, facts: Facts, updates: Iterable[tuple[UpdateRow, str]]) -> str:
        """Add a line for each update durably, and return the head.

        It is empty without a log.

        Args:
            facts: Whose threads do it.
            updates: The updates, each with the head of its client's log.

        Raises:
            OSError: If that is impossible.
        """
        chain = self._chain
        if chain is None:
            return ""
        entries = [_entry(row, head) for row, head in updates]
        return await facts.work(chain.add, *entries)


def _entry(row: UpdateRow, head: str) -> Mapping[str, Any]:
    return {
        "what": "update",
        "client": row.client_id,
        "round": row.round,
        "update": row.name,
        "client_head": head,
    }
