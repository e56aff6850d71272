"""The requests of a rank to an owner, as JSON.

Values in it are trees (see `fedring.remote.values`).
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from fedring.remote.contexts import MAX_CONTEXT
from fedring.remote.errors import BadMessage

Number = Annotated[int, Field(ge=0, le=MAX_CONTEXT)]
MAX_NAME = 1000
Name = Annotated[str, Field(max_length=MAX_NAME)]
Key = Number | Name
REASON = r"^[a-z0-9_]{0,64}$"


class Place(BaseModel):
    """A parameter: the key of its holder, and its name there."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    target: Key
    name: Name


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    released: list[Number] = []  # references that the caller does not have any more


class Call(_Request):
    """Call a function ("module:attribute"), or a method of a held value."""

    verb: Literal["call"] = "call"
    function: Name = ""
    target: Key = ""  # used if there is no function
    method: Name = ""
    arguments: Any  # [positional, by name]
    stay: bool = False  # keep the result, and answer with its reference
    context: Number | None = None  # keep the graph in this context


class Fetch(_Request):
    """Return a held value."""

    verb: Literal["fetch"] = "fetch"
    target: Key
    context: Number | None = None


class Claim(_Request):
    """Answer with a reference of the caller's own for another rank's."""

    verb: Literal["claim"] = "claim"
    reference: Number


class Parameters(_Request):
    """Return the names of a held value's parameters."""

    verb: Literal["parameters"] = "parameters"
    target: Key


class Backward(_Request):
    """Compute the gradients of a call's inputs from those of its outputs."""

    verb: Literal["backward"] = "backward"
    context: Number
    record: Number
    retain_graph: bool = False
    gradients: Any


class FetchGradients(_Request):
    """Return a context's gradients of a held value, by parameter name."""

    verb: Literal["gradients"] = "gradients"
    context: Number
    target: Key


class Create(_Request):
    """Make an optimizer, and answer with its reference."""

    verb: Literal["create"] = "create"
    kind: Name
    parameters: list[Place]
    options: Any


class Lock(_Request):
    """Wait until the context may step."""

    verb: Literal["lock"] = "lock"
    context: Number


class Prepare(_Request):
    """Do a step so that it can still be undone.

    The answer is False if another context steps.
    """

    verb: Literal["prepare"] = "prepare"
    context: Number
    optimizer: Number


class Commit(_Request):
    """Keep the step, and let others step."""

    verb: Literal["commit"] = "commit"
    context: Number
    optimizer: Number


class Abort(_Request):
    """Undo the step if there is one, and let others step."""

    verb: Literal["abort"] = "abort"
    context: Number
    optimizer: Number


class End(_Request):
    """Free a context. There is no answer."""

    verb: Literal["end"] = "end"
    context: Number


class Release(_Request):
    """Drop references. There is no answer."""

    verb: Literal["release"] = "release"


Request = (
    Call
    | Fetch
    | Claim
    | Parameters
    | Backward
    | FetchGradients
    | Create
    | Lock
    | Prepare
    | Commit
    | Abort
    | End
    | Release
)

_ADAPTER: TypeAdapter[Request] = TypeAdapter(Annotated[Request, Field(discriminator="verb")])


def content_of(request: Request) -> Any:
    """Return a request as JSON, without default values."""
    return {"verb": request.verb, **request.model_dump(exclude_defaults=True)}


def parse(content: Any) -> Request:
    """Parse a request from a peer's JSON.

    Raises:
        BadMessage: It is none.
    """
    try:
        return _ADAPTER.validate_python(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(str(part)[:40] for part in first["loc"]) or "it"
        raise BadMessage(f"a request is not valid: {place}: {first['msg'][:200]}") from None


class RemoteFailure(BaseModel):
    """The failure of a call."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    type: Annotated[str, Field(max_length=200)]
    message: Annotated[str, Field(max_length=5000)]
    reason: Annotated[str, Field(pattern=REASON)] = ""
    traceback: Annotated[str, Field(max_length=20000)] = ""


class Reply(BaseModel):
    """The answer of an owner."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    value: Any = None
    record: Number | None = None  # the graph that was kept; the tensors with `grad` are its outputs
    error: RemoteFailure | None = None
