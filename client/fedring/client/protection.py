"""How updates of a round are protected from the server.

By default, they are not at all. The room of a kind of round may have another protection, such as one with which the
server reads only sums of updates.
"""

from fedring.client.errors import UpdateRefused
from fedring.client.transfer.residual import Residual
from fedring.client.transfer.update import Update
from fedring.codec.schema import Vectors
from fedring.train.tensors.download import HeldModel


class CannotProtect(UpdateRefused):
    """An update cannot be protected, so it is not sent.

    The client has left the round, and the server was told.
    """


class Protection:
    """The protection of one client's updates in one round: here, none.

    Attributes:
        trains_on_residual: Whether training begins with what past updates have left out.
    """

    trains_on_residual = False

    def residual_schema(self, schema_hash: bytes) -> bytes:
        """Return the schema name by which residuals of such updates are known.

        What protected updates leave out must not come into others, which are seen.
        """
        return schema_hash

    def weight(self, samples: int) -> int:
        """Return the weight to note for rounds in which the training fails.

        0 = updates do not count by their samples, or the server need not be deceived.
        """
        return 0

    def update(
        self, base: HeldModel, trained: Vectors | None, samples: int, residual: Residual | None
    ) -> Update | None:
        """Return the protected update from `base` to `trained`, plus the residual.

        None = the update is sent as it is.

        Args:
            base: The model that the training began with.
            trained: The values that it ended with, which are overwritten; None = the update changes nothing.
            samples: How many samples it was trained on.
            residual: What past updates left out, [num_parameters]; None = nothing.

        Raises:
            CodecError: With the reason "non_finite", if a value is not finite.
            CannotProtect: If it cannot be protected.
            RoundOver: If the round ended before.
        """
        return None

    def has_lost_update(self) -> bool:
        """Return whether no update can follow the one that was lost.

        If so, the client has left the round, and the server was told.
        """
        return False

    def may_send(self, payload: str) -> bool:
        """Return whether a payload of this name may leave the client."""
        return True

    def bind(self, payload: str) -> None:
        """Bind the round to one payload, which may be sent then.

        Raises:
            UpdateRefused: If it is bound to another one, or that cannot be noted.
            RoundOver: If the round ended before.
        """
