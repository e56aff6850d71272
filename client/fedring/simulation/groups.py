"""Secure aggregation in a simulation, without masks.

The integers are the same as with real clients.

Masks cancel in the sum, so they change neither the models nor the sizes of updates. They would only hide the updates of
clients that all live in this process.
"""

import random
from collections.abc import Iterable, Sequence

from fedring.client.policy.privacy import SitePolicy
from fedring.client.policy.promises import dp_of
from fedring.client.policy.secret import ClientSecret
from fedring.client.protection import CannotProtect, Protection
from fedring.client.secure.protection import SummedUpdates
from fedring.client.transfer.residual import Residual
from fedring.client.transfer.update import Update
from fedring.codec.schema import Vectors
from fedring.secure import SecureError
from fedring.secure.levels import bits_of
from fedring.secure.limits import fewest_survivors
from fedring.secure.masks import wrap
from fedring.server.model.masked_sum import GroupMasks, PrivateIntegers
from fedring.server.secure.machine import form_groups
from fedring.signatures.digests import task_digest
from fedring.train.jobs.job import Job
from fedring.train.tensors.download import HeldModel
from fedring.v1 import federation_pb2 as pb

Group = tuple[str, ...]
"""The ids of the clients whose updates are added up."""


def groups_of(job: Job, clients: Iterable[str], seed: int) -> list[Group]:
    """Return the groups of a round; none without secure aggregation.

    A server draws them with the operating system's random numbers instead of the seed of the round.
    """
    table = job.secure_aggregation
    return list(form_groups(clients, table.group_size, random.Random(seed))) if table else []


def groups_that_count(
    groups: Sequence[Group], delivered: Iterable[str], command: pb.TrainCmd, dimension: int
) -> list[GroupMasks] | None:
    """Return the groups with enough clients left, with those clients.

    None without secure aggregation.

    Args:
        groups: of the round.
        delivered: the clients whose updates were accepted.
        command: of the round.
        dimension: number of parameters.
    """
    if not groups:
        return None
    left, found = set(delivered), list[GroupMasks]()
    for group in groups:
        survivors = tuple(client for client in group if client in left)
        integers = _integers(command, len(group), dimension)
        if len(survivors) >= fewest_survivors(len(group), command.job.min_results if integers else 0):
            bits = integers.plan.bits if integers else bits_of(command.secure, len(group))
            found.append(GroupMasks(survivors[0], survivors, bits, (), integers))
    return found


class UnmaskedUpdates(SummedUpdates):
    """Updates as the client has them before it masks them.

    Args:
        command: The command that is answered.
        client_id: The id of the client.
        secret: Its secret.
        clients: Of the client's group.
    """

    def __init__(self, command: pb.TrainCmd, client_id: str, secret: ClientSecret, clients: int) -> None:
        super().__init__(command, client_id, SitePolicy.model_validate({}), secret)
        self._clients = clients

    def update(
        self, base: HeldModel, trained: Vectors | None, samples: int, residual: Residual | None
    ) -> Update | None:
        """See Protection."""
        try:
            maker = self.maker(self._clients, base.vectors.parameters.size, wrap)
            return maker.make(base, trained, samples, residual)
        except SecureError as error:
            raise CannotProtect(error.reason, str(error)) from error


def protection_of(command: pb.TrainCmd, client_id: str, secret: ClientSecret, clients: int) -> Protection:
    """Return the protection of a simulated client's updates.

    Args:
        command: The command that is answered.
        client_id: The id of the client.
        secret: Its secret.
        clients: Of the client's group; 0 = there are no groups.
    """
    return UnmaskedUpdates(command, client_id, secret, clients) if clients else Protection()


def _integers(command: pb.TrainCmd, clients: int, dimension: int) -> PrivateIntegers | None:
    """Return the private integers of a group; None for levels."""
    privacy = dp_of(command.job)
    if privacy is None:
        return None
    return PrivateIntegers(privacy.plan(clients, dimension, command.job.min_results), task_digest(command))


def short_of(job: Job, groups: Sequence[GroupMasks]) -> str:
    """Return why a round cannot be unmasked, as a clause.

    It is empty if the round can be unmasked.
    """
    left = sum(len(group.clients) for group in groups)
    if left and left >= job.min_clients_to_aggregate:
        return ""
    return f"{left} clients are left in groups that can be unmasked, and {job.min_clients_to_aggregate} are needed"
