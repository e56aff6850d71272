"""The transforms of a job, in their order."""

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from fedring.client.transfer.kept import Sections
from fedring.client.transforms import named
from fedring.client.transforms.interface import RoundStart, Transform
from fedring.client.transforms.scaffold import Scaffold
from fedring.v1 import federation_pb2 as pb


class Asked(BaseModel):
    """A transform that a job names, and its arguments."""

    name: str = Field(min_length=1)
    args: dict[str, Any]


_LIST = TypeAdapter(list[Asked])


def begin_transforms(start: RoundStart, kept: Sections) -> list[Transform]:
    """Return the transforms of a round, in their order.

    Args:
        start: What the round begins with.
        kept: What the client's newest accepted update has left.

    Raises:
        ValueError: If an argument does not fit.
        KeyError: If there is no such transform: see `unknown_in`.
    """
    chosen: list[tuple[type[Transform], Mapping[str, object]]] = []
    if start.command.HasField("control"):
        chosen.append((Scaffold, {}))
    chosen += [(known()[each.name], each.args) for each in _asked(start.command.job)]
    return [kind(start, kept.get(kind.name), args) for kind, args in chosen]


def unknown_in(job: pb.JobSpec) -> str:
    """Return why this client cannot apply a job's transforms.

    The reason is a sentence; empty = it can apply them.
    """
    try:
        names = [each.name for each in _asked(job)]
    except ValidationError:
        return f"this client does not understand the job's transforms = {job.transforms[:200]}: update it"
    if twice := next((name for name in names if names.count(name) > 1), ""):
        return f"the job names the transform {twice} twice"
    if missing := next((name for name in names if name not in known()), ""):
        return f"this client has no transform {missing[:64]!r}, but {', '.join(sorted(known()))}: it may be too old"
    return ""


@cache
def known() -> Mapping[str, type[Transform]]:
    """Return the transforms that jobs can name.

    They are those of the modules in the room `named`.
    """
    modules = (import_module(f"{named.__name__}.{module.name}") for module in iter_modules(named.__path__))
    offered = (each for module in modules for each in vars(module).values())
    return {each.name: each for each in offered if isinstance(each, type) and issubclass(each, Transform) and each.name}


def _asked(job: pb.JobSpec) -> list[Asked]:
    return _LIST.validate_json(job.transforms) if job.transforms else []
