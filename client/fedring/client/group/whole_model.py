"""The model of a round that no worker holds as a whole.

It is fetched in parts, and delivered as a file.
"""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from torch import nn

from fedring.client.answer import check_size
from fedring.client.errors import RoundOver, UpdateRefused, WrongModel
from fedring.client.task import Task
from fedring.client.transfer.partial import PartialDownload, Sink
from fedring.client.transfer.update import TrainingReport, offer_of
from fedring.codec.schema import Schema
from fedring.train.tensors.download import BadModel
from fedring.train.tensors.state import schema_of
from fedring.v1 import federation_pb2 as pb

if TYPE_CHECKING:
    from fedring.workers.assembly import AssembledModel  # imports torch.distributed's collectives


class WholeModel:
    """The whole model of a round, for a worker with a part.

    Args:
        task: The round.
        client_id: The client that delivers it.
    """

    def __init__(self, task: Task, client_id: str) -> None:
        self._task, self._client_id = task, client_id

    def check(self, model: nn.Module) -> None:
        """Compare a model's schema with that of the round's model.

        The model may be without values.

        Raises:
            WrongModel: If it has another schema than the one that is trained. The server has been told, and the round
                goes on without this client.
            RoundOver: If the round has ended, or the server does not say what the other schema is.
        """
        schema = schema_of(model)
        if schema.hash != self._task.command.schema_hash:
            self.fetch(schema, [entry.name for entry in schema.entries], lambda entry, start, values: None)
        self._task.link.session.begin(pb.ACTIVITY_TRAINING)

    def fetch(self, schema: Schema, names: Collection[str], sink: Sink) -> None:
        """Fetch some tensors of the round's model, and nothing else.

        Args:
            schema: The schema of the whole model.
            names: The tensors.
            sink: Takes their values; after an error on the way, they are sent again.

        Raises:
            WrongModel: As check() raises it.
            RoundOver: If the round has ended, or the model cannot be fetched.
        """
        task, digest = self._task, self._task.command.model_digest
        task.link.session.begin(pb.ACTIVITY_FETCHING)
        try:
            what, make = f"a part of model {digest}", lambda: PartialDownload(digest, schema, names, sink)
            task.link.call(lambda: task.models.download(what, make, lambda: task.end.reason))
        except WrongModel as error:
            task.fail(error.reason, error.detail)
            raise
        except BadModel as error:  # Another round may go better.
            task.fail("bad_model", str(error))
            raise RoundOver("bad_model", str(error)) from error
        task.link.session.begin(pb.ACTIVITY_TRAINING)

    def submit(
        self, assembled: "AssembledModel", samples: int, metrics: Mapping[str, float], train_seconds: float
    ) -> None:
        """Send a trained model that is a file.

        This returns once the server has accepted it.

        Args:
            assembled: The file, which this moves to the spool.
            samples, metrics, train_seconds: As for Task.submit().

        Raises:
            RoundOver: If the round has ended without this update.
            UpdateRefused: If the server has refused the update.
            ValueError: If a figure is out of range.
        """
        command, end = self._task.command, self._task.end
        training = TrainingReport(samples, train_seconds, metrics)
        end.trained(train_seconds)
        spooled = None
        try:
            check_size(command, sum(size for _, _, size in assembled.packets))
            offer = offer_of(command, self._client_id, assembled.packets, assembled.payload_digest, training)
            spooled = end.adopt(offer, assembled.path)
            end.deliver(spooled)
            end.result = "accepted"
        except UpdateRefused as error:
            if spooled is None:
                self._task.fail(error.reason, error.detail)
            end.result = "refused"
            raise
