"""Rounds that are in progress on a server."""

from dataclasses import replace

from fedring.server.round.open_round import OpenRound
from fedring.server.state.rows import RoundRow
from fedring.train.jobs.job import Job
from fedring.v1 import federation_pb2 as pb
from tests.unit.rows import a_model


def opened(*selected: str, failures: tuple[str, ...] = ()) -> OpenRound:
    row = RoundRow(7, 1, 1, "training", 0.0, base_version=1)
    return OpenRound(
        replace(row, selected=selected), Job.model_validate({}), pb.TrainCmd(), a_model(1), failures=list(failures)
    )
