"""A version of the model, as a client holds it."""

from dataclasses import dataclass

from fedring.codec import Schema, Vectors


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """One version, whole. Nobody changes its vectors."""

    run_id: str
    version: int
    schema: Schema
    vectors: Vectors
