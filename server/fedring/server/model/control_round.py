"""The control variate of a round: the file that it begins with, and what its updates make of it."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack

from fedring.codec.errors import CodecError
from fedring.server.model.control import ControlPlan, plan_control
from fedring.server.model.modelfile import ModelReader
from fedring.server.model.versions import ModelVersions
from fedring.server.state.blob_interfaces import Blobs
from fedring.server.state.checked import CheckedReader, Room, unreadable
from fedring.server.state.failures import StorageError
from fedring.server.state.rows import ModelRow, UpdateRow
from fedring.train.job import Job

log = logging.getLogger(__name__)


def open_control(
    blobs: Blobs, versions: ModelVersions, base: ModelRow, line: str, room: Room, files: ExitStack
) -> CheckedReader | None:
    """Open the file of the control variate that a round of this line begins with; None if all of it is zero.

    Raises:
        DamagedModel: if it cannot be read.
    """
    if not base.control_blob or base.control_line != line:
        return None
    try:
        blob = files.enter_context(blobs.reader(base.control_blob))
    except StorageError as error:
        raise versions.damage_of(base, unreadable(base.control_blob, error)) from error
    return CheckedReader(blob.read, blob.size, base.control_blob, room)


def control_plan(
    versions: ModelVersions,
    base: ModelRow,
    updates: Sequence[UpdateRow],
    job: Job,
    job_round: int,
    control: CheckedReader | None,
) -> ControlPlan | None:
    """Return how the updates change the control variate in a file; None if it has to begin anew.

    Raises:
        DamagedModel: if the file cannot be read.
    """
    before = None
    try:
        if control is not None:
            before = ModelReader(control)
        plan = plan_control(job, job_round, updates, before)
    except (CodecError, StorageError) as error:
        raise versions.damage_of(base, error) from error
    if isinstance(plan, ControlPlan):
        return plan
    log.warning(
        "the control variate begins anew, because %s used one that its newest counted update has not left",
        ", ".join(plan),
    )
    return None
