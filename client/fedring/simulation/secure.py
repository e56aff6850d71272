"""Secure aggregation in a simulation, without masks.

The integers are the same as with real clients.

Masks cancel in the sum, so they change neither the models nor the sizes of updates. They would only hide the updates of
clients that all live in this process.
"""

import random
from collections.abc import Iterable, Sequence

from fedring.client.policy.privacy import SitePolicy
from fedring.client.policy.promises import dp_of
from fedring.client.secure.masked import MaskedUpdates
from fedring.secure.levels import bits_of
from fedring.secure.limits import fewest_survivors, group_count, threshold
from fedring.secure.masks import wrap
from fedring.secure.statements import task_digest
from fedring.server.model.masked_sum import GroupMasks, PrivateIntegers
from fedring.train.jobs.job import Job
from fedring.v1 import federation_pb2 as pb

Group = tuple[str, ...]
"""The ids of the clients whose updates are added up."""


def draw_groups(clients: Iterable[str], size: int, seed: int) -> list[Group]:
    """Return the groups of a round, each sorted.

    A server draws them with the operating system's random numbers instead.

    Args:
        clients: of the round.
        size: clients in a group; 0 = as few groups as possible.
        seed: of the round.
    """
    names = sorted(clients)
    count = group_count(len(names), size)
    if count > 1:
        random.Random(seed).shuffle(names)
    return [tuple(sorted(names[number::count])) for number in range(count)]


def groups_that_count(
    groups: Iterable[Group], delivered: Iterable[str], command: pb.TrainCmd, dimension: int
) -> list[GroupMasks]:
    """Return the groups with enough clients left, with those clients.

    Args:
        groups: of the round.
        delivered: the clients whose updates were accepted.
        command: of the round.
        dimension: number of parameters.
    """
    left, found = set(delivered), []
    for group in groups:
        survivors = tuple(client for client in group if client in left)
        integers, needed = _integers(command, len(group), dimension), threshold(len(group))
        if integers:
            needed = fewest_survivors(len(group), command.job.min_results)
        if len(survivors) >= needed:
            bits = integers.plan.bits if integers else bits_of(command.secure, len(group))
            found.append(GroupMasks(survivors[0], survivors, bits, (), integers))
    return found


def unmasked_updates(command: pb.TrainCmd, client: str, dimension: int, clients: int, dither: bytes) -> MaskedUpdates:
    """Return the maker of a client's updates, which are not masked.

    It makes them as the client does before it masks them.

    Args:
        command: The command that is answered.
        client: The id of the client.
        dimension: Number of parameters.
        clients: Of the client's group.
        dither: 32 bytes that it follows from, for one update only.
    """
    if private := _integers(command, clients, dimension):
        return MaskedUpdates(command, client, wrap, private.plan.bits, private.plan)
    most = SitePolicy.model_validate({}).max_clipped_share
    bits = bits_of(command.secure, clients)
    return MaskedUpdates(command, client, wrap, bits, dither=dither, max_clipped_share=most)


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
