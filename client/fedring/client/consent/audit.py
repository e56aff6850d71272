"""The chained log of a client's deeds (`fedring.daemon.chain`).

No sample, no label and no path is in it.
"""

import hashlib
import logging
import logging.handlers
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, model_validator

from fedring.daemon.chain import Chain, DamagedChain
from fedring.daemon.config import ConfigError

log = logging.getLogger(__name__)

FOLDER = "audit"
_SYSLOG = "/dev/log"
_MOST_TEXT = 500
"""The most characters of a text that is written as it is: a server chooses some, and a line has no room for any."""


class AuditTable(BaseModel):
    """The table [audit]: a chained log of a client's deeds.

    Unknown keys are errors.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    chain: bool = Field(
        False,
        description="keep a chained log in state_dir/audit: what was asked, trained, sent, accepted and refused; no "
        "update leaves that is not in it",
    )
    keep_days: NonNegativeInt = Field(
        0, description="days after its last line after which a month of that log is deleted; 0 = never"
    )
    forward: Literal["", "log", "syslog"] = Field(
        "",
        description="where the lines go, too: log = this daemon's log, which systemd's journal keeps; "
        "syslog = the socket /dev/log",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.chain and (self.keep_days or self.forward):
            raise ValueError("keep_days and forward are of the chained log: set audit.chain = true")
        return self


class Audit:
    """The log of one client. Any thread may use it.

    Args:
        table: The table [audit].
        state_dir: The state folder.

    Raises:
        ConfigError: If the log is damaged, or cannot be written.
    """

    def __init__(self, table: AuditTable, state_dir: Path) -> None:
        self._chain: Chain | None = None
        self._forward: Callable[[str], None] = lambda line: None
        if not table.chain:
            return
        try:
            self._chain = Chain(state_dir / FOLDER, keep_days=table.keep_days)
            self._forward = _forward_to(table.forward)
        except DamagedChain as error:
            text = f"the audit of this client is damaged: {error}"
            advice = f"keep {state_dir / FOLDER} as evidence in another place, and start again"
            raise ConfigError(f"{text}; {advice}") from error
        except OSError as error:
            raise ConfigError(f"the audit of this client cannot be written: {error}") from error

    @property
    def on(self) -> bool:
        """Whether there is a log."""
        return self._chain is not None

    def note(self, what: str, **facts: Any) -> str:
        """Add a line durably, and return the head of the log.

        It is empty without a log.

        Args:
            what: What has happened, one word.
            facts: Its keys. Of a very long text, the beginning is written, with its digest.

        Raises:
            OSError: If that is impossible.
        """
        if self._chain is None:
            return ""
        facts = {key: _shortened(value) for key, value in facts.items()}
        head = self._chain.add({"what": what, **facts})
        self._forward(f"{what} {facts} {head}")
        return head

    def try_to_note(self, what: str, **facts: Any) -> None:
        """Add a line of something that has happened already.

        A disk that fails is only logged."""
        try:
            self.note(what, **facts)
        except OSError as error:
            log.error("the audit of this client lacks a line (%s): %s", what, error)

    def close(self) -> None:
        """Close the file."""
        if self._chain is not None:
            self._chain.close()


def _shortened(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_shortened(each) for each in value]
    if not isinstance(value, str) or len(value) <= _MOST_TEXT:
        return value
    digest = hashlib.sha256(value.encode()).hexdigest()
    return f"{value[:_MOST_TEXT]}... ({len(value)} characters with the SHA-256 {digest})"


def _forward_to(where: str) -> Callable[[str], None]:
    if where == "log":
        return lambda line: log.info("audit: %s", line)
    if where == "syslog":
        handler = logging.handlers.SysLogHandler(_SYSLOG)
        handler.ident = "fl-client: "
        return lambda line: handler.emit(logging.LogRecord("audit", logging.INFO, "", 0, line, None, None))
    return lambda line: None
