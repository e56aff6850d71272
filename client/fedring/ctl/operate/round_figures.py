"""Figures of a round for people, computed from the sums that the server reports."""

from fedring.v1 import control_pb2 as pb


def accuracy(round_: pb.Round) -> float | None:
    """Return the share of the clients' held-out samples that the round's model classifies correctly.

    None means that the model was not evaluated.
    """
    return round_.eval_correct / round_.eval_total if round_.eval_total else None


def loss(round_: pb.Round) -> float | None:
    """Return the mean loss over the same samples, or None."""
    return round_.eval_loss_sum / round_.eval_total if round_.eval_total else None


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
