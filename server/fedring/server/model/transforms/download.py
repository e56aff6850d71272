"""The encoded download, from one model to the next."""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np

from fedring.codec import encode_buffers
from fedring.codec.encoding import BUFFERS, Encoding
from fedring.server.aggregation.modelfile import LoadedModel
from fedring.server.aggregation.rule import Rule
from fedring.server.aggregation.steps import BaseFiles, Draft, Step
from fedring.server.aggregation.walk import gather, tiles_of
from fedring.server.model.downlink import delta_step
from fedring.server.model.transforms.transform import ClosedRound, Feature
from fedring.server.state.rows import ModelRow, Vector, lay_out
from fedring.train.jobs.job import Job


@dataclass(frozen=True, slots=True)
class EncodedDownload(Feature):
    """The key `download_encoding`, unless it is "full"."""

    encoding: Encoding

    @classmethod
    def of(cls, job: Job) -> Self | None:
        """See Feature.of."""
        if job.download_encoding == "full":
            return None
        return cls(Encoding(job.download_encoding, job.chunk, job.keep_ratio, job.step))

    def close(self, closed: ClosedRound, rule: Rule | None) -> Step:
        """See Transform.close."""
        return Encoded(self.encoding)


class Encoded(Step):
    """The encoded delta of one round.

    Args:
        encoding: of the delta.
        residual: the float32 values that the encoding left out in the round before; empty = none.
    """

    whole: ClassVar[bool] = True

    def __init__(self, encoding: Encoding, residual: bytes = b"") -> None:
        self._encoding, self._residual = encoding, residual

    def read(self, base: ModelRow, files: BaseFiles) -> None:
        """See Step.read."""
        self._residual = files.read(base.residual_blob)

    def change(self, base: LoadedModel, draft: Draft) -> Draft:
        """See Step.change."""
        before = base.vectors()
        target = gather(draft.parameters(), np.empty_like(before.parameters))
        residual = np.frombuffer(self._residual, "<f4") if self._residual else None
        step = delta_step(before.parameters, target, residual, self._encoding)
        change = draft.buffers - before.buffers
        payloads: list[tuple[Vector, str, bytes]] = [
            ("parameters", self._encoding.name, step.payload),
            ("buffers", BUFFERS, encode_buffers(change)),
        ]
        present = [part for part, values in zip(payloads, (target, change), strict=True) if len(values)]
        files = {
            "delta_blob": b"".join(payload for _, _, payload in present),
            "residual_blob": step.residual.astype("<f4").tobytes(),
        }
        return replace(
            draft,
            # Not draft.buffers: the sum is what a client computes, and it may differ in the last bit.
            buffers=before.buffers + change,
            parameters=lambda: tiles_of(step.model),
            delta_packets=lay_out([(vector, "delta", name, len(payload)) for vector, name, payload in present]),
            files={**draft.files, **files},
        )
