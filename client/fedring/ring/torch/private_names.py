"""Private names of torch, by the features that need them.

torch may rename them in any version. So each feature looks for its names once; without one of them it is left out,
with one warning, and all else works. No other module of fedring uses private names of torch.
"""

import warnings
from collections.abc import Mapping
from functools import cache, reduce, wraps
from importlib import import_module
from typing import Any, NamedTuple

import torch

from fedring.ring.errors import NotSupported

TESTED = ("2.13", "2.15")
"""Versions of torch with which the backend is tested."""


class Feature(NamedTuple):
    """Names of torch, each as "module:attribute", and the sentence about their absence."""

    names: tuple[str, ...]
    without: str


FEATURES: Mapping[str, Feature] = {
    "compile": Feature(
        (
            "torch._C._dynamo.eval_frame:set_code_exec_strategy",
            "torch._C._dynamo.eval_frame:_FrameAction.SKIP",
            "torch._C._dynamo.eval_frame:_FrameExecStrategy",
        ),
        "torch.compile looks into the methods of the ring, and may fail there",
    ),
    "profiler": Feature(
        (
            "torch._C._autograd:_profiler_enabled",
            "torch._C._profiler:_RecordFunctionFast",
            "torch:ops.profiler._record_function_enter_new",
            "torch:ops.profiler._call_end_callbacks_on_jit_fut",
        ),
        "torch.profiler shows no records of the ring",
    ),
}


@cache
def find(feature: str) -> tuple[Any, ...]:
    """Return the objects of a feature, in the order of its names.

    Empty, after one warning, if this version of torch lacks one of them.
    """
    names, without = FEATURES[feature]
    try:
        return tuple(_look_up(name) for name in names)
    except (ImportError, AttributeError) as error:
        tested = " and ".join(TESTED)
        text = f"fedring's ring is tested with torch {tested}; with {torch.__version__}, {without} ({error})"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        return ()


def _look_up(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return reduce(getattr, attribute.split("."), import_module(module))


def record_no_flights_of(group: type) -> None:
    """Keep torch's flight recorder from groups of a class.

    From 2.15 on, torch attaches the recorder to every new group with devices, and fails for one without a backend in
    C++ ("ProcessGroup name not set"). Other groups are recorded as before.
    """
    module: Any = import_module("torch.distributed.distributed_c10d")
    attach = getattr(module, "_maybe_attach_flight_recorder", None)
    if attach is None:  # before 2.15
        return

    def attach_to_others(given: Any, *rest: Any, **named: Any) -> Any:
        return None if isinstance(given, group) else attach(given, *rest, **named)

    module._maybe_attach_flight_recorder = attach_to_others


def refuse_beside_others(name: str) -> None:
    """Refuse a backend that shares a group with other backends, by devices.

    torch would make the group of the first that is written in Python, and give it the tensors of all devices, without a
    word. It passes no backend the names of the others, but parses them in a class of its own, before anything starts.
    """
    module: Any = import_module("torch.distributed.distributed_c10d")
    parse = module.BackendConfig.__init__

    @wraps(parse)
    def parse_and_check(self: Any, backend: Any) -> None:
        parse(self, backend)
        used = set(self.get_device_backend_map().values())
        if name in used and len(used) > 1:
            other = " and ".join(sorted(used - {name}))
            raise NotSupported(
                f"the backend {str(backend)!r} cannot be made: a group of {name} takes the tensors of all devices, and "
                f"leaves none to {other}. Use {name!r} alone, and dist.new_group(backend={other!r}) beside it"
            )

    module.BackendConfig.__init__ = parse_and_check
