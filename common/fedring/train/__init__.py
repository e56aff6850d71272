"""What a client trains: the user's seam, the local epochs, the evaluation, and models as vectors and files."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedring.train.errors import SeamError as SeamError
    from fedring.train.errors import TrainError as TrainError
    from fedring.train.errors import TrainingStopped as TrainingStopped
    from fedring.train.evaluation import Counts as Counts
    from fedring.train.evaluation import evaluate as evaluate
    from fedring.train.files import load_model as load_model
    from fedring.train.files import save_model as save_model
    from fedring.train.plan import Plan as Plan
    from fedring.train.plan import TrainResult as TrainResult

# Found on first use: those who only read a job from this package need not wait for torch.
_MODULES = {
    "SeamError": "errors",
    "TrainError": "errors",
    "TrainingStopped": "errors",
    "Counts": "evaluation",
    "evaluate": "evaluation",
    "load_model": "files",
    "save_model": "files",
    "Plan": "plan",
    "TrainResult": "plan",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
