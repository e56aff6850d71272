"""Figures of a round for people, computed from the sums that the server reports."""

from fedring.ctl.output import number, percent
from fedring.v1 import control_pb2 as pb


def accuracy(round_: pb.Round) -> float | None:
    """Return the share of the clients' held-out samples that the round's model classifies correctly.

    None means that the model was not evaluated, or that accuracy is not defined.
    """
    classified = round_.eval_classified if round_.HasField("eval_classified") else round_.eval_total
    return round_.eval_correct / classified if classified else None


def loss(round_: pb.Round) -> float | None:
    """Return the mean loss over the same samples, or None."""
    return round_.eval_loss_sum / round_.eval_total if round_.eval_total else None


def sentence(accuracy: float | None, loss: float | None) -> str:
    """Return the accuracy in words, or the loss if accuracy is not defined; empty if neither is known."""
    if accuracy is not None:
        return f"accuracy {percent(accuracy)}"
    return f"loss {number(loss)}" if loss is not None else ""


def upload_per_client(round_: pb.Round) -> float:
    """Return the bytes that the round's clients have sent, divided by the clients that took part."""
    return round_.upload_bytes / _took_part(round_)


def download_per_client(round_: pb.Round) -> float:
    """Return the bytes that the round's clients have received, divided by the clients that took part."""
    return round_.download_bytes / _took_part(round_)


def communication_seconds(round_: pb.Round) -> float:
    """Return the mean seconds that a client of the round spent on its download and upload."""
    return sum(client.upload_seconds + client.download_seconds for client in round_.clients) / _took_part(round_)


def _took_part(round_: pb.Round) -> int:
    return sum(client.num_samples > 0 for client in round_.clients) or max(1, len(round_.clients))
