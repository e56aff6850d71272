"""The table [bounds] of a job: limits of changes while it runs.

    [bounds]
    lr = [0.01, 0.1]

Sites that check an operator's signature hold the server to it (`fedring.train.orders`). A key that has no bounds here
changes as its schedule says, and in no other way.
"""

from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from fedring.train.bounds import NonNegative

MAX_DAYS = 3650.0
"""The longest time for which a signature counts."""


def _check_order(pair: list[float]) -> list[float]:
    if pair[0] > pair[1]:
        raise ValueError(f"must be [least, most], and is [{pair[0]:g}, {pair[1]:g}]")
    return pair


_Range = Annotated[list[NonNegative], Field(min_length=2, max_length=2), AfterValidator(_check_order)]


class Bounds(BaseModel):
    """The bounds of a job at sites that check its signature.

    Unknown keys are errors. Each range is [least, most].
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    lr: _Range | None = Field(
        None, description="learning rates that the job's own strategy may choose, such as [0.01, 0.1]"
    )
    epochs: _Range | None = Field(None, description="epochs that it may choose")
    subset_size: _Range | None = Field(None, description="subset_size that it may choose; 0 = all samples")
    batch_size: _Range | None = Field(None, description="batch_size that it may choose")
    momentum: _Range | None = Field(None, description="momentum that it may choose")
    mu: _Range | None = Field(None, description="mu that it may choose")
    start_model: str = Field(
        "",
        pattern=r"^(blake3-[0-9a-f]{64})?$",
        description="digest of the model that the first round starts from; flctl run --sign sets it if start is the "
        "number of a version",
    )
    repeats: int = Field(
        3,
        ge=0,
        le=1000,
        description="rounds that a site may be asked for beyond `rounds`: rounds are asked for again if the server was "
        "restored, or if sites had not approved the job",
    )
    days: float = Field(30.0, gt=0, le=MAX_DAYS, description="days after which the signature ends")

    @property
    def ranges(self) -> Mapping[str, tuple[float, float]]:
        """The ranges that are set, by the keys of the job."""
        keys = ("lr", "epochs", "subset_size", "batch_size", "momentum", "mu")
        found = {key: getattr(self, key) for key in keys}
        return {key: (pair[0], pair[1]) for key, pair in found.items() if pair is not None}
