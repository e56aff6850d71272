"""A client's training plan for a round, with its own seed."""

import hashlib
from dataclasses import replace

from fedring.client.policy.promises import hides_training
from fedring.client.policy.secret import TRAINING, ClientSecret
from fedring.train.plan import Plan
from fedring.v1 import federation_pb2 as pb


def plan_of(command: pb.TrainCmd, client_id: str, secret: ClientSecret) -> Plan:
    """Return a client's training plan, with its own seed.

    Raises:
        ConfigError: If the secret is needed, and cannot be read or made.
    """
    return replace(unseeded_plan(command), seed=seed_of(command, client_id, secret))


def unseeded_plan(command: pb.TrainCmd) -> Plan:
    """Return the training plan of a command, with the seed 0."""
    c = command
    return Plan(
        epochs=c.epochs,
        batch_size=c.batch_size,
        lr=c.lr,
        momentum=c.momentum,
        mu=c.mu,
        subset_size=c.subset_size,
        round=c.round,
        job_round=c.job_round,
        clip_norm=c.clip_norm,
        precision=c.precision or "fp32",
    )


def seed_of(command: pb.TrainCmd, client_id: str, secret: ClientSecret) -> int:
    """Return the seed of a client's training, 0 to 2^63 - 1.

    Whoever knows the seed can repeat the training. If nobody else may (`hides_training`), it follows from the client's
    secret.

    Raises:
        ConfigError: If the secret is needed, and cannot be read or made.
    """
    if hides_training(command):
        return _number(secret.derive(command, TRAINING))
    return own_seed(command.seed, client_id)


def own_seed(seed: int, client_id: str) -> int:
    """Return this client's seed for a round, 0 to 2^63 - 1.

    With the same seed, all clients would draw samples at the same places of their parts. Data sets are ordered (such as
    MNIST by writer), so all clients of a round would see the same few writers.

    Args:
        seed: The round's seed, which is the same for all clients.
        client_id: This client's id.
    """
    return _number(hashlib.sha256(f"{seed}:{client_id}".encode()).digest())


def _number(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little") >> 1
