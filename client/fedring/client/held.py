"""A version of the model, as a client holds it."""

from dataclasses import dataclass

from fedring.codec import Schema, Vectors


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """One version, whole. Nobody changes its vectors."""

    digest: str  # names it
    schema: Schema
    vectors: Vectors
