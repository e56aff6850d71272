"""The table [approval] of a client."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedring.client.consent.card import JOB_KEYS, ROUND_KEYS
from fedring.rpc.identity import NAME

_Name = Annotated[str, Field(pattern=rf"^{NAME.pattern}$")]


class Approval(BaseModel):
    """The table [approval]: which jobs need a person's consent here.

    Unknown keys are errors.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Literal["off", "cards"] = Field(
        "off",
        description="cards = this client trains and evaluates only for jobs whose card was approved here "
        "(`fl-client cards`)",
    )
    free: list[str] = Field(
        [],
        description="keys of jobs and rounds that may differ without a new approval, such as "
        '["name", "rounds", "lr", "seed"]',
    )
    allowed_operators: list[_Name] = Field(
        [],
        description="names of the only operators whose jobs this client follows: they must have signed them (flctl run "
        "--sign), and the server can change nothing that they have not left open; needs tls.ca; empty = signatures are "
        "not looked at",
    )

    @model_validator(mode="after")
    def _known(self) -> Self:
        if unknown := set(self.free) - {*JOB_KEYS, *ROUND_KEYS}:
            keys = ", ".join(sorted({*JOB_KEYS, *ROUND_KEYS}))
            raise ValueError(f"free: no card has the key {min(unknown)!r}: choose from {keys}")
        return self
