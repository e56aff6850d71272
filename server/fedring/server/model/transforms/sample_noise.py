"""Differential privacy for single samples, by the clients."""

from dataclasses import dataclass, replace
from typing import Self

from fedring.codec.schema import Schema
from fedring.server.aggregation.terms import Terms
from fedring.server.model.transforms.transform import Feature, Skeleton
from fedring.train.jobs.job import Job
from fedring.v1 import federation_pb2 as pb


@dataclass(frozen=True, slots=True)
class SampleNoise(Feature):
    """The table [sample_dp]."""

    @classmethod
    def of(cls, job: Job) -> Self | None:
        """See Feature.of."""
        return None if job.sample_dp is None else cls()

    def check(self, job: Job, schema: Schema, skeleton: Skeleton) -> None:
        """See Transform.check."""
        from fedring.train.private_layers import unfit_layer  # imports torch

        if why := unfit_layer(skeleton()):
            raise ValueError(f"sample_dp: {why}")

    def terms(self, terms: Terms, command: pb.TrainCmd, members: int) -> Terms:
        """See Transform.terms."""
        return replace(terms, bare=True, silent=True)
