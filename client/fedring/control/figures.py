"""Figures of a round, computed from the sums that the server reports."""

from typing import TypeAlias

from fedring.v1 import control_pb2 as pb

Row: TypeAlias = dict[str, float | int | str | None]
"""A round as one flat row of values by name, as pandas and trackers want it."""

_FIELDS = (
    *("round", "job_id", "job_round", "phase", "reason", "started_at", "model_version", "selected", "delivered"),
    *("seconds", "train_seconds_max", "evaluate_seconds", "upload_bytes", "download_bytes"),
)


def row(round_: pb.Round) -> Row:
    """Return a round as a row of named values.

    It has the round's fields, accuracy and loss (None if they are not known), and every metric by name.
    """
    server: Row = {
        "server_accuracy": round_.server_accuracy if round_.HasField("server_accuracy") else None,
        "server_loss": round_.server_loss if round_.HasField("server_loss") else None,
    }
    fields = {name: getattr(round_, name) for name in _FIELDS}
    return {**fields, "accuracy": accuracy(round_), "loss": loss(round_), **server, **round_.metrics}


def accuracy(round_: pb.Round) -> float | None:
    """Return the model's accuracy on the clients' held-out samples.

    None means that the model was not evaluated, or that accuracy is not defined.
    """
    classified = round_.eval_classified if round_.HasField("eval_classified") else round_.eval_total
    return round_.eval_correct / classified if classified else None


def loss(round_: pb.Round) -> float | None:
    """Return the mean loss over the same samples, or None."""
    return round_.eval_loss_sum / round_.eval_total if round_.eval_total else None


def upload_per_client(round_: pb.Round) -> float:
    """Return the mean bytes that a client of the round sent."""
    return round_.upload_bytes / _took_part(round_)


def download_per_client(round_: pb.Round) -> float:
    """Return the mean bytes that a client of the round received."""
    return round_.download_bytes / _took_part(round_)


def communication_seconds(round_: pb.Round) -> float:
    """Return the mean seconds of a client's download and upload."""
    return sum(client.upload_seconds + client.download_seconds for client in round_.clients) / _took_part(round_)


def _took_part(round_: pb.Round) -> int:
    return sum(client.num_samples > 0 for client in round_.clients) or max(1, len(round_.clients))
